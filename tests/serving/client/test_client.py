from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import pkgutil
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from email.utils import formatdate

import httpx
import pytest
import torch

from rm_optimizer import core, landscape, serving, training
from rm_optimizer.core.base import Scorer
from rm_optimizer.core.pairs.pair import Message
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.errors import (
    ConfigError,
    DataError,
    HandshakeFailed,
    RewardServerRefused,
    RewardServerUnavailable,
    WrongAnswer,
    WrongVersion,
)
from rm_optimizer.serving import trl_reward
from rm_optimizer.serving.client.client import AsyncRewardClient, RewardClient
from rm_optimizer.serving.client.connection import CONVERSATION_FORM, retry_after
from rm_optimizer.serving.protocol import sigmoid
from rm_optimizer.serving.weights.publisher import create_rm_publisher
from tests.builders import decoder_tokenizer
from tests.serving.engines import InProcessEngine, exported, options_of
from tests.serving.running import engine_running

CONVERSATIONS = [(f"Question {i // 3}?", f"Answer {i}" + "!" * (i % 4)) for i in range(20)]
PROMPTS, RESPONSES = (list(column) for column in zip(*CONVERSATIONS, strict=True))


def reward_of(ids: list[int]) -> float:
    """What the stub's model gives: not between 0 and 1 for all, not symmetric."""
    return (sum(ids) % 97 - 40) / 10


class StubServer:
    """Answers as our server does, and misbehaves as it is told: `faults` is asked before each request is answered."""

    def __init__(self, renderer: ConversationRenderer, *, max_items: int = 4096, max_tokens: int = 100_000) -> None:
        self.renderer, self.max_items, self.max_tokens = renderer, max_items, max_tokens
        self.faults: list[httpx.Response | Exception | Callable[[], None]] = []
        self.requests: list[tuple[str, dict]] = []
        self.squash = lambda reward, wanted: sigmoid(reward) if wanted else reward
        self.template_hash = renderer.template_hash
        self.version: Callable[[], str] = lambda: "v1"
        self.revision: Callable[[], int] = lambda: 7
        self.shift = 0
        self.is_ours = True
        self.open = self.most_open = 0
        self.pause = 0.0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            await asyncio.sleep(self.pause)
            return self._answer(request)
        finally:
            self.open -= 1

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        self.requests.append((request.url.path, body))
        if request.method == "POST" and self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            return fault
        route = {"/rm/info": self._info, "/rm/version": self._version, "/v1/models": self._models}.get(request.url.path)
        if route is not None:
            return route()
        if request.url.path == "/tokenize":
            ids = self.renderer.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            return httpx.Response(200, json={"tokens": [token + self.shift for token in ids]})
        return self._score(request.url.path, body)

    def _info(self) -> httpx.Response:
        if not self.is_ours:
            return httpx.Response(404, json={"detail": "Not Found"})
        identity = self.renderer.identity()
        rendering = {key: identity[key] for key in ("kind", "rendering", "pinned_date")}
        return httpx.Response(
            200,
            json={
                **{"engine": "stub", "model": "rm", "version": "v1", "revision": 7},
                **{"architecture": "Stub", "dtype": "float32"},
                "rendering": rendering | {"template_hash": self.template_hash},
                **{"max_length": 128, "vocab_size": 500, "pad_token_id": 0, "eos_token_id": 1, "token_budget": 512},
                **{"max_request_tokens": self.max_tokens, "max_request_items": self.max_items},
                **{"shares_prompts": True, "parity": None, "reward_statistics": None},
            },
        )

    def _version(self) -> httpx.Response:
        return httpx.Response(200, json={"version": self.version()})

    def _models(self) -> httpx.Response:
        return httpx.Response(200, json={"data": [{"id": "plain"}]})

    def _score(self, path: str, body: dict) -> httpx.Response:
        if path == "/rm/score" and not self.is_ours:
            return httpx.Response(404, json={"detail": "Not Found"})
        if path == "/rm/score":
            pairs = [(self._prompt(item["prompt"]), text) for item in body["items"] for text in item["responses"]]
            rows = [self.renderer.encode(prompt, text).ids for prompt, text in pairs]
        else:
            rows = body["input"]
        if len(rows) > self.max_items or sum(map(len, rows)) > self.max_tokens:
            error = {"message": "too much", "type": "TooLarge", "code": 413}
            return httpx.Response(413, json={"error": error})
        numbers = [self.squash(reward_of(row), body["use_activation"]) for row in rows]
        headers = {"x-rm-version": self.version(), "x-rm-revision": str(self.revision())} if self.is_ours else {}
        if path == "/classify":
            data = [{"index": i, "probs": [number]} for i, number in enumerate(numbers)]
            return httpx.Response(200, json={"model": "plain", "data": data[::-1]}, headers=headers)
        sizes = [len(item["responses"]) for item in body["items"]]
        rewards = [[numbers.pop(0) for _ in range(size)] for size in sizes]
        return httpx.Response(200, json={"model": "rm", "rewards": rewards}, headers=headers)

    @staticmethod
    def _prompt(prompt: str | list) -> str | tuple[Message, ...]:
        return prompt if isinstance(prompt, str) else tuple(Message(**message) for message in prompt)


@pytest.fixture
def renderer():
    return ConversationRenderer(decoder_tokenizer(), 128)


@pytest.fixture
def stub(renderer):
    return StubServer(renderer)


@pytest.fixture
def expected(renderer):
    rows = renderer.encode_batch(PROMPTS, RESPONSES)
    return torch.tensor([reward_of(list(row.ids)) for row in rows])


def connected(stub: StubServer, **options: object) -> RewardClient:
    return RewardClient("http://stub", transport=httpx.MockTransport(stub), **options)  # type: ignore[arg-type]


def failure(status: int, **headers: str) -> httpx.Response:
    body = {"error": {"message": "the queue is full", "type": "Overloaded", "code": status}}
    return httpx.Response(status, json=body, headers=headers)


@pytest.mark.parametrize("tokenizes_here", [True, False])
def test_rewards_come_in_the_order_of_the_responses(stub, renderer, expected, tokenizes_here):
    with connected(stub, renderer=renderer if tokenizes_here else None) as client:
        assert isinstance(client, Scorer)
        assert torch.equal(client.score(PROMPTS, RESPONSES), expected)
        assert client.score_pair(PROMPTS[0], *RESPONSES[:2]) == pytest.approx(float(expected[0] - expected[1]))
        assert client.score_versioned(PROMPTS[:1], RESPONSES[:1]).version == client.version == "v1"
        assert client.score([], []).shape == (0,)
        first, none, second = client.score_groups([PROMPTS[0], "Hi", PROMPTS[1]], [RESPONSES[:1], [], RESPONSES[1:2]])
        assert torch.equal(torch.cat([first, none, second]), expected[:2])


@pytest.mark.parametrize(
    "fault",
    [failure(503), failure(429), httpx.ConnectError("refused"), httpx.RemoteProtocolError("dropped"),
     httpx.ReadError("reset")],
    ids=["503", "429", "refused", "dropped", "reset"],
)  # fmt: skip
def test_a_passing_failure_is_retried(stub, renderer, expected, fault):
    with connected(stub, renderer=renderer) as client:
        stub.faults = [fault, fault]
        assert torch.equal(client.score(PROMPTS, RESPONSES), expected)
        assert stub.faults == []


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 502, 504])
def test_a_refusal_is_not_retried_and_says_why(stub, renderer, status):
    with connected(stub, renderer=renderer) as client:
        stub.faults = [failure(status)]
        asked = len(stub.requests)
        with pytest.raises(RewardServerRefused, match=f"{status} the queue is full") as caught:
            client.score(PROMPTS, RESPONSES)
        assert (caught.value.status, caught.value.kind, len(stub.requests) - asked) == (status, "Overloaded", 1)


@pytest.mark.parametrize("status", [502, 504])
def test_an_answer_of_a_proxy_is_not_retried_and_its_status_is_named(stub, renderer, status):
    async def main() -> tuple[str, int]:
        transport = httpx.MockTransport(stub)
        async with AsyncRewardClient("http://stub", renderer=renderer, transport=transport) as client:
            stub.faults = [httpx.Response(status, text="<h1>no upstream</h1>")]
            asked = len(stub.requests)
            with pytest.raises(RewardServerRefused) as caught:
                await client.score(PROMPTS, RESPONSES)
            return str(caught.value), len(stub.requests) - asked

    assert asyncio.run(main()) == (f"http://stub/classify: {status} <h1>no upstream</h1>", 1)


def test_retry_after_is_honored_and_the_deadline_with_it(stub, renderer):
    with connected(stub, renderer=renderer, timeout_seconds=1.0) as client:
        stub.faults = [failure(503, **{"retry-after": "30"})]
        with pytest.raises(RewardServerUnavailable, match=r"no answer within 1 s.*the queue is full"):
            client.score(PROMPTS, RESPONSES)


def test_a_dead_server_raises_after_the_deadline_and_gives_no_reward(stub, renderer):
    with connected(stub, renderer=renderer, timeout_seconds=0.4) as client:
        stub.faults = [httpx.ConnectError("refused")] * 1000
        with pytest.raises(RewardServerUnavailable, match="ConnectError refused"):
            client.score(PROMPTS, RESPONSES)
        stub.faults = [httpx.ReadTimeout("slow")]
        with pytest.raises(RewardServerUnavailable, match="ReadTimeout"):
            client.score(PROMPTS, RESPONSES)


@pytest.mark.parametrize("tokenizes_here", [True, False])
def test_large_calls_are_split_by_the_announced_limits(renderer, expected, tokenizes_here):
    stub = StubServer(renderer, max_items=3, max_tokens=2000)
    with connected(stub, renderer=renderer if tokenizes_here else None) as client:
        stub.requests.clear()
        assert torch.equal(client.score(PROMPTS, RESPONSES), expected)
        assert len(stub.requests) >= 7


def test_a_request_that_is_still_too_large_is_halved(stub, renderer, expected):
    with connected(stub, renderer=renderer) as client:
        stub.max_items = 6  # less than was announced
        assert torch.equal(client.score(PROMPTS, RESPONSES), expected)


def test_no_more_requests_are_open_than_allowed(renderer, expected):
    stub = StubServer(renderer, max_items=2)
    stub.pause = 0.01
    with connected(stub, renderer=renderer, concurrency=3) as client:
        answers = [torch.empty(0)] * 3

        def score(place: int) -> None:
            answers[place] = client.score(PROMPTS, RESPONSES)

        threads = [threading.Thread(target=score, args=(place,)) for place in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert stub.most_open == 3
    assert all(torch.equal(answer, expected) for answer in answers)


@pytest.mark.parametrize("new", ["new", "old"], ids=["another name", "the same name"])
def test_a_call_never_mixes_two_models(renderer, expected, new):
    stub = StubServer(renderer, max_items=4)
    with connected(stub, renderer=renderer, concurrency=1) as client:
        names, revisions = iter(["old", "old", "old"]), iter([1, 1, 1])
        stub.version, stub.revision = lambda: next(names, new), lambda: next(revisions, 2)
        asked = len(stub.requests)
        scored = client.score_versioned(PROMPTS, RESPONSES)
        assert scored.weights == (new, 2)
        assert torch.equal(torch.tensor(scored.rewards), expected)
        assert len(stub.requests) - asked == 5 + 3  # the three of the old version once more


@pytest.mark.parametrize(
    ("squash", "what"),
    [
        (lambda reward, wanted: sigmoid(sigmoid(reward)) if wanted else reward, "squashed twice"),
        (lambda reward, wanted: reward, "never squashed"),
        (lambda reward, wanted: sigmoid(reward), "always squashed"),
    ],
)
def test_a_server_with_another_sigmoid_is_refused(stub, renderer, squash, what):
    stub.squash = squash
    with pytest.raises(HandshakeFailed, match="the sigmoid of the raw rewards"):
        connected(stub, renderer=renderer)


def test_weights_that_change_between_the_requests_of_many_probes_fail_no_handshake(stub, renderer):
    served = 0

    def revision() -> int:
        nonlocal served
        now, served = served, min(served + 1, 16)
        return now

    stub.revision = revision
    stub.squash = lambda reward, wanted: sigmoid(reward + served) if wanted else reward + served
    connected(stub, renderer=renderer).close()
    assert served == 16
    stub.revision = lambda: len(stub.requests)
    with pytest.raises(RewardServerUnavailable, match="changed between the two requests of every probe"):
        connected(stub, renderer=renderer, timeout_seconds=0.3)


def test_another_template_is_refused(stub, renderer):
    stub.template_hash = "0" * 16
    with pytest.raises(HandshakeFailed, match="take the tokenizer of the served checkpoint"):
        connected(stub, renderer=renderer)


def test_another_tokenizer_under_the_same_hash_is_refused(stub):
    mine = ConversationRenderer(decoder_tokenizer(), 128, render_fn=lambda messages, response: f"? {response}")
    stub.template_hash = mine.template_hash
    with pytest.raises(HandshakeFailed, match="for conversations, got"):
        connected(stub, renderer=mine)


def test_a_longer_memory_than_the_servers_is_refused(stub):
    with pytest.raises(HandshakeFailed, match="keeps 4096 tokens"):
        connected(stub, renderer=ConversationRenderer(decoder_tokenizer(), 4096))


def test_a_plain_vllm_is_sent_token_ids(stub, renderer, expected):
    stub.is_ours = False
    with connected(stub, renderer=renderer) as client:
        assert torch.equal(client.score(PROMPTS, RESPONSES), expected)
        assert client.version == "plain"
        assert all("input" in body and body["model"] == "plain" for path, body in stub.requests if path == "/classify")


def test_a_plain_vllm_of_a_regression_model_is_taken(stub, renderer, expected):
    stub.is_ours = False
    stub.squash = lambda reward, wanted: reward
    with connected(stub, renderer=renderer) as client:
        assert torch.equal(client.score(PROMPTS, RESPONSES), expected)


def test_a_plain_vllm_that_ignores_the_field_is_refused(stub, renderer):
    stub.is_ours = False
    stub.squash = lambda reward, wanted: sigmoid(reward)
    with pytest.raises(HandshakeFailed, match="ignore the field"):
        connected(stub, renderer=renderer)


def test_a_plain_vllm_with_another_tokenizer_is_refused(stub, renderer):
    stub.is_ours, stub.shift = False, 1
    with pytest.raises(HandshakeFailed, match="tokenizes unlike this client"):
        connected(stub, renderer=renderer)


def test_a_plain_vllm_needs_a_renderer(stub):
    stub.is_ours = False
    with pytest.raises(HandshakeFailed, match="pass the served model's renderer"):
        connected(stub)


@pytest.mark.parametrize(
    "body",
    [b"no json", b'{"rewards": []}', b'{"rewards": [[null]]}', b'{"rewards": [[NaN]]}', b'{"data": 3}'],
)
def test_an_answer_without_rewards_raises(stub, body):
    with connected(stub) as client:
        stub.faults = [httpx.Response(200, content=body)]
        with pytest.raises(WrongAnswer):
            client.score(["Hi"], ["Hello."])


def test_prompts_and_responses_must_be_as_many(stub, renderer):
    with connected(stub, renderer=renderer) as client, pytest.raises(ValueError, match="2 prompts and 1 responses"):
        client.score(["a", "b"], ["c"])


def test_the_text_of_a_row_never_has_more_tokens_than_its_size(renderer):
    prompt = (Message("system", "Sei höflich."), Message("user", "日本語で"))
    for conversation in [("Hi", "Hello."), (prompt, "こんにちは 👋🏽"), *CONVERSATIONS]:
        assert CONVERSATION_FORM.size(conversation) >= len(renderer.encode(*conversation).ids)


def test_the_asynchronous_client_gives_the_same(stub, renderer, expected):
    async def main() -> torch.Tensor:
        transport = httpx.MockTransport(stub)
        async with AsyncRewardClient("http://stub", renderer=renderer, transport=transport) as client:
            parts = await asyncio.gather(
                client.score(PROMPTS[:9], RESPONSES[:9]), client.score(PROMPTS[9:], RESPONSES[9:])
            )
            return torch.cat(parts)

    assert torch.equal(asyncio.run(main()), expected)


def test_a_client_scores_as_the_model_it_is_served(tmp_path):
    model = exported("llama", tmp_path / "export")
    engine = lambda: InProcessEngine(options_of(tmp_path / "export", tmp_path / "tokenizer"))  # noqa: E731
    prompts, responses = ["Hi", "Hi", (Message("user", "Name a colour."),)], ["Hello.", "Go away.", "Blue."]
    expected = model.score(prompts, responses)
    with engine_running(engine, api_key="secret") as server:
        with pytest.raises(RewardServerRefused, match="Authorization"):
            RewardClient(server.url)
        for renderer in (None, model.renderer):
            with RewardClient(server.url, renderer=renderer, api_key="secret") as client:
                assert torch.allclose(client.score(prompts, responses), expected, atol=1e-4, rtol=0)
                assert client.version == server.engine.version
                scored = client.score_versioned(prompts, responses)
                assert client.score_versioned(prompts, responses, expect_revision=scored.revision) == scored
                server.engine.worker.revision += 1  # another server's weights of the same name
                with pytest.raises(WrongVersion, match=f"of revision {scored.revision} from .*, got"):
                    client.score_versioned(prompts, responses, expect_revision=scored.revision)
                copy = pickle.loads(pickle.dumps(client))
                assert torch.allclose(copy.score(prompts, responses), expected, atol=1e-4, rtol=0)
                copy.close()
        alone = AsyncRewardClient(server.url, renderer=model.renderer, api_key="secret")
        assert asyncio.run(scored_once(pickle.loads(pickle.dumps(alone)))) == pytest.approx(expected[:1].tolist())


def test_a_publisher_asks_in_a_forked_process_and_after_pickling(tmp_path):
    exported("llama", tmp_path / "export")
    engine = lambda: InProcessEngine(options_of(tmp_path / "export", tmp_path / "tokenizer"))  # noqa: E731
    options = {"api_key": "update", "mode": "head_only", "timeout_seconds": 10}
    with engine_running(engine, update_key="update") as server, create_rm_publisher(server.url, **options) as publisher:
        expected = publisher.status()
        assert in_a_fork(lambda: publisher.status() == expected) == 0
        with pickle.loads(pickle.dumps(publisher)) as copy:
            assert (copy.status(), copy.mode, copy.timeout_seconds) == (expected, "head_only", 10)
        publisher.close()
        assert publisher.status() == expected


async def scored_once(client: AsyncRewardClient) -> list[float]:
    async with client:
        return (await client.score(["Hi"], ["Hello."])).tolist()


def in_a_fork(work: Callable[[], bool]) -> int:
    """Exit status of a child that does it; a child that hangs is killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads, as trainers have
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1]


def test_a_client_answers_in_a_forked_process_and_in_its_parent(stub, renderer, expected):
    with connected(stub, renderer=renderer) as client:
        assert in_a_fork(lambda: torch.equal(client.score(PROMPTS, RESPONSES), expected)) == 0
        assert torch.equal(client.score(PROMPTS, RESPONSES), expected)


def test_an_asynchronous_client_answers_on_every_loop_and_in_every_process(stub, renderer, expected):
    client = AsyncRewardClient("http://stub", renderer=renderer, transport=httpx.MockTransport(stub), concurrency=1)

    async def two() -> bool:
        parts = await asyncio.gather(*(client.score(PROMPTS, RESPONSES) for _ in range(2)))
        return all(torch.equal(part, expected) for part in parts)

    assert asyncio.run(two())
    assert asyncio.run(two())
    assert in_a_fork(lambda: asyncio.run(two())) == 0


def test_a_closed_client_connects_again(stub, renderer, expected):
    client = connected(stub, renderer=renderer)
    client.close()
    client.close()
    assert torch.equal(client.score(PROMPTS, RESPONSES), expected)
    client.close()
    alone = AsyncRewardClient("http://stub", renderer=renderer, transport=httpx.MockTransport(stub))

    async def twice() -> list[torch.Tensor]:
        answers = []
        for _ in range(2):
            answers.append(await alone.score(PROMPTS, RESPONSES))
            await alone.close()
        return answers

    assert all(torch.equal(answer, expected) for answer in asyncio.run(twice()))


def noted_sessions(monkeypatch) -> list[weakref.ref]:
    """Sessions that are opened from now on."""
    opened: list[weakref.ref] = []
    original = httpx.AsyncClient.__init__

    def noting(self: httpx.AsyncClient, **options: object) -> None:
        opened.append(weakref.ref(self))
        original(self, **options)

    monkeypatch.setattr(httpx.AsyncClient, "__init__", noting)
    return opened


def test_an_asynchronous_client_keeps_no_connections_of_loops_that_ended(stub, renderer, monkeypatch):
    client = AsyncRewardClient("http://stub", renderer=renderer, transport=httpx.MockTransport(stub))
    opened = noted_sessions(monkeypatch)
    for _ in range(4):
        asyncio.run(client.score(PROMPTS[:1], RESPONSES[:1]))
    gc.collect()
    assert len(opened) == 4
    assert sum(session() is not None for session in opened) == 1


def test_two_loops_that_take_turns_open_one_session_each(stub, renderer, monkeypatch):
    client = AsyncRewardClient("http://stub", renderer=renderer, transport=httpx.MockTransport(stub))
    opened = noted_sessions(monkeypatch)
    with asyncio.Runner() as first, asyncio.Runner() as second:
        for runner in (first, second, first, second):
            runner.run(client.score(PROMPTS[:1], RESPONSES[:1]))
    assert len(opened) == 2


def test_half_of_a_surrogate_pair_is_the_callers_mistake(stub):
    with connected(stub) as client, pytest.raises(DataError, match="half of a UTF-16 surrogate pair"):
        client.score(["Hi \ud800"], ["Hello."])


def test_a_call_is_not_waited_for_longer_than_its_time(stub, renderer, monkeypatch):
    monkeypatch.setattr("rm_optimizer.serving.client.client.SLACK_SECONDS", 0.1)
    with connected(stub, renderer=renderer, timeout_seconds=0.2) as client:
        stub.pause = 30.0
        monkeypatch.setattr("rm_optimizer.serving.client.connection.Deadline.timeout", lambda self: httpx.Timeout(60))
        with pytest.raises(RewardServerUnavailable, match=r"no answer within 0\.2 s"):
            client.score(PROMPTS, RESPONSES)


def test_retry_after_may_be_a_date():
    soon = formatdate(time.time() + 30, usegmt=True)
    assert 25 < (retry_after(failure(503, **{"retry-after": soon})) or 0) <= 30
    assert retry_after(failure(503, **{"retry-after": "soon"})) is None


def test_other_weights_than_expected_are_an_error(stub, renderer):
    with connected(stub, renderer=renderer) as client:
        assert client.score_versioned(PROMPTS, RESPONSES, expect_version="v1").version == "v1"
        with pytest.raises(WrongVersion, match="expected rewards of weights v2 from http://stub, got v1"):
            client.score_versioned(PROMPTS, RESPONSES, expect_version="v2")


@pytest.mark.parametrize("key", ["", " secret", "se cret", "clé", "secret\n"])
def test_a_key_that_no_header_carries_is_refused(stub, renderer, key):
    with pytest.raises(ConfigError, match="api_key must be ASCII characters without blanks"):
        connected(stub, renderer=renderer, api_key=key)


def test_trl_gets_rewards_of_texts_and_of_messages(stub, renderer, expected):
    with connected(stub, renderer=renderer) as client:
        reward = trl_reward(client, name="helpful")
        assert reward.__name__ == "helpful"
        assert reward(prompts=PROMPTS, completions=RESPONSES, completion_ids=[[1]], step=3) == expected.tolist()
        prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
        completions = [[{"role": "assistant", "content": text}] for text in RESPONSES]
        assert reward(prompts=prompts, completions=completions) == expected.tolist()
        turns = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
        longer = reward(prompts=prompts[:1], completions=[turns + completions[0]])
        before = (Message("user", PROMPTS[0]), Message("assistant", "a"), Message("user", "b"))
        assert longer == client.score([before], RESPONSES[:1]).tolist()
        with pytest.raises(ValueError, match="must end with a message of the assistant"):
            reward(prompts=prompts[:1], completions=[turns])


class Lengths:
    """A scorer that any process can make."""

    def score(self, prompts: object, responses: list[str]) -> torch.Tensor:
        return torch.tensor([float(len(text)) for text in responses])


def test_trls_reward_goes_to_another_process_with_its_name():
    copy = pickle.loads(pickle.dumps(trl_reward(Lengths(), name="helpful")))
    assert copy.__name__ == "helpful"
    assert copy(prompts=["a", "b"], completions=["c", "dd"]) == [1.0, 2.0]


@pytest.mark.parametrize("package", [core, landscape, serving, training])
def test_what_loads_on_first_use_is_not_hidden_by_a_module_of_its_name(package):
    names = set(package.__all__)
    assert not names & {module.name for module in pkgutil.iter_modules(package.__path__)}


@pytest.mark.slow
def test_a_difference_from_a_model_is_explained(tmp_path):
    templates = ("m.role + ': ' + m.content + '\\n'", "m.content + eos_token")
    written = [f"{{% for m in messages %}}{{{{ {turn} }}}}{{% endfor %}}" for turn in templates]
    model, other = (
        exported("llama", tmp_path / f"{i}", tokenizer=decoder_tokenizer(chat_template=text))
        for i, text in enumerate(written)
    )
    engine = lambda: InProcessEngine(options_of(tmp_path / "0", tmp_path / "tokenizer"))  # noqa: E731
    with engine_running(engine) as server:
        RewardClient(server.url, check=str(tmp_path / "0")).close()
        with RewardClient(server.url, check=model, renderer=model.renderer) as client:
            assert pickle.loads(pickle.dumps(client)).url == server.url
        message = (
            rf"{server.url}\) differ on \d+ of \d+ rewards .* Cause: other template \(role: content\)\. .* Remedy: "
        )
        for renderer in (None, other.renderer):
            with pytest.raises(HandshakeFailed, match=message):
                RewardClient(server.url, check=other, renderer=renderer)


class StubFleet:
    """Several stubs, each under a host of its own."""

    def __init__(self, renderer: ConversationRenderer, number: int) -> None:
        self.stubs = {f"stub{place}": StubServer(renderer) for place in range(number)}
        self.url = ",".join(f"http://{host}" for host in self.stubs)
        self.down: set[str] = set()
        self.hung: set[str] = set()
        self.broken: set[str] = set()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.host in self.down:
            raise httpx.ConnectError("refused")
        if request.url.host in self.hung:
            await asyncio.sleep(60)
        if request.url.host in self.broken:
            return httpx.Response(500, json={"error": {"message": "broken", "type": "server_error", "code": 500}})
        return await self.stubs[request.url.host](request)

    def asked(self) -> list[int]:
        return [sum(path in ("/classify", "/rm/score") for path, _ in stub.requests) for stub in self.stubs.values()]

    def client(self, **options: object) -> RewardClient:
        return RewardClient(self.url, transport=httpx.MockTransport(self), **options)  # type: ignore[arg-type]


def test_a_call_is_divided_over_several_servers_and_goes_on_without_one(renderer, expected):
    fleet = StubFleet(renderer, 4)
    prompts, responses = PROMPTS * 20, RESPONSES * 20
    with fleet.client(renderer=renderer) as client:
        before = fleet.asked()
        for _ in range(5):
            assert torch.equal(client.score(prompts, responses), expected.repeat(20))
        assert all(now > then for now, then in zip(fleet.asked(), before, strict=True))
        fleet.down = {"stub0", "stub2"}
        assert torch.equal(client.score(prompts, responses), expected.repeat(20))
        fleet.down = set(fleet.stubs)
    with pytest.raises(RewardServerUnavailable, match=r"no answer within 0.3 s"):
        fleet.client(renderer=renderer, timeout_seconds=0.3)


def test_a_server_that_hangs_costs_the_time_until_another_is_asked(renderer, expected):
    fleet = StubFleet(renderer, 2)
    fleet.hung = {"stub1"}
    with fleet.client(renderer=renderer, hedge_seconds=0.05, timeout_seconds=10.0) as client:
        started = time.perf_counter()
        for _ in range(5):
            assert torch.equal(client.score(PROMPTS, RESPONSES), expected)
        assert time.perf_counter() - started < 5.0


def test_several_servers_of_two_revisions_answer_with_the_newer_or_the_pinned_one(renderer, expected):
    fleet = StubFleet(renderer, 2)
    fleet.stubs["stub1"].version, fleet.stubs["stub1"].revision = lambda: "v2", lambda: 8
    prompts, responses = PROMPTS * 10, RESPONSES * 10
    with fleet.client(renderer=renderer) as client:
        assert client.score_versioned(prompts, responses).weights == ("v2", 8)
    for revision, version in ((7, "v1"), (8, "v2")):
        with fleet.client(renderer=renderer, revision=revision) as client:
            for _ in range(4):
                assert client.score_versioned(prompts, responses).weights == (version, revision)
    with (
        fleet.client(renderer=renderer, revision=9, timeout_seconds=0.3) as client,
        pytest.raises(RewardServerUnavailable, match="expected revision 9 from http://stub"),
    ):
        client.score(PROMPTS, RESPONSES)


def test_a_server_that_fails_or_was_started_again_with_older_weights_is_passed_over(renderer, expected):
    fleet = StubFleet(renderer, 2)
    fleet.broken = {"stub0"}
    with fleet.client(renderer=renderer) as client:
        for _ in range(10):
            assert torch.equal(client.score(PROMPTS, RESPONSES), expected)
    fleet.broken = set()
    for stub in fleet.stubs.values():
        stub.version, stub.revision = lambda: "v2", lambda: 8
    with fleet.client(renderer=renderer) as client:
        for _ in range(30):  # each server answers once at least
            client.score(PROMPTS, RESPONSES)
        fleet.stubs["stub1"].version, fleet.stubs["stub1"].revision = lambda: "v1", lambda: 7
        assert {client.score_versioned(PROMPTS, RESPONSES).weights for _ in range(10)} == {("v2", 8)}
        fleet.stubs["stub0"].version, fleet.stubs["stub0"].revision = lambda: "v1", lambda: 7
        assert client.score_versioned(PROMPTS, RESPONSES).weights == ("v1", 7)  # both were started again


def test_several_servers_that_hang_end_a_call_in_its_time(renderer):
    fleet = StubFleet(renderer, 3)
    with fleet.client(renderer=renderer, timeout_seconds=1.0) as client:
        fleet.hung, started = set(fleet.stubs), time.perf_counter()
        with pytest.raises(RewardServerUnavailable):
            client.score(PROMPTS, RESPONSES)
        assert time.perf_counter() - started < 1.5


def test_a_pinned_client_of_one_server_refuses_other_weights(stub, renderer):
    with connected(stub, renderer=renderer, revision=7) as client:
        client.score(PROMPTS, RESPONSES)
        stub.revision = lambda: 8
        with pytest.raises(WrongVersion, match="expected rewards of revision 7 from http://stub, got 8"):
            client.score(PROMPTS, RESPONSES)


def test_several_servers_with_other_templates_are_refused(renderer):
    fleet = StubFleet(renderer, 2)
    fleet.stubs["stub1"].template_hash = "0" * 16
    with fleet.client() as client, pytest.raises(HandshakeFailed, match="renders conversations unlike the others"):
        client.score(PROMPTS * 10, RESPONSES * 10)
