"""Weights published to `rm-opt serve`: the server then scores as the trainer's model does, whole and under its name."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import threading
import time

import httpx
import pytest
import torch

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.certificate import DEFAULT_PROBE
from rm_optimizer.core.storage.export import save_adapter
from rm_optimizer.errors import ConfigError, PublishFailed, RMOptimizerError
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from rm_optimizer.serving.client.client import RewardClient
from rm_optimizer.serving.update_protocol import OutcomeStatus
from rm_optimizer.serving.weights.publisher import RMPublisherAdapter, create_rm_publisher
from tests.builders import FAMILIES
from tests.serving.engines import InProcessEngine, exported, options_of
from tests.serving.running import engine_running, serve_process
from tests.serving.trained import moved

SHORT = [*DEFAULT_PROBE[:3], ("Hi", "Go away."), ("Name a colour.", "Blue."), ("Why?", "Because."), ("Hi", "Hello!")]
PROMPTS, RESPONSES = (list(column) for column in zip(*SHORT, strict=True))
LORA = AdapterConfig(kind=AdapterKind.lora, rank=4, alpha=8.0, dropout=0.0)
PARITY = 1e-4
names = (f"v{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A server process, and a model like the one it serves."""
    folder = tmp_path_factory.mktemp("plain")
    model = exported("llama", folder / "export")
    (folder / "root").mkdir()
    with serve_process(folder / "export", "--weights-root", str(folder / "root")) as server:
        server.model, server.checkpoint, server.root = model, folder / "export", folder / "root"
        with RewardClient(server.url, renderer=model.renderer) as client:
            server.client = client
            yield server


def assert_same(scored, before) -> None:
    """The same weights; a kept start may round otherwise."""
    assert (scored.weights, scored.rewards) == (before.weights, pytest.approx(before.rewards, abs=1e-5))


def served_difference(server, model: BradleyTerryRM, version: str) -> float:
    scored = server.client.score_versioned(PROMPTS, RESPONSES)
    assert scored.version == version
    return float((torch.tensor(scored.rewards) - model.score(PROMPTS, RESPONSES)).abs().max())


@pytest.mark.parametrize("transport", ["inline", "path", "gloo"])
@pytest.mark.parametrize("mode", ["full", "head_only"])
def test_the_server_scores_as_the_published_model(plain, mode, transport):
    version, before = next(names), plain.model.score(PROMPTS, RESPONSES)
    model = moved(plain.model, 1, head_only=mode == "head_only")
    with create_rm_publisher(plain.url, mode=mode, transport=transport, timeout_seconds=60) as publisher:
        outcome = publisher.publish(model, version)
    assert (outcome.status, outcome.version) == (OutcomeStatus.committed, version)
    assert served_difference(plain, model, version) <= PARITY
    assert float((model.score(PROMPTS, RESPONSES) - before).abs().max()) > 100 * PARITY
    assert os.listdir(plain.root) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mode_reaches_every_family(family, tmp_path):
    base = exported(family, tmp_path / "base")
    model = BradleyTerryRM.from_pretrained(tmp_path / "base")
    add_adapter(model.model, LORA, seed=0)
    save_adapter(model, tmp_path / "adapter")
    for checkpoint, modes in (("base", ("full", "head_only")), ("adapter", ("lora",))):
        engine = lambda name=checkpoint: InProcessEngine(options_of(tmp_path / name, tmp_path / "tokenizer"))  # noqa: E731
        with engine_running(engine) as server, RewardClient(server.url) as server.client:
            for number, mode in enumerate([*modes, *modes]):
                trained = moved(model if mode == "lora" else base, number, head_only=mode == "head_only")
                version = f"{mode}-{number}"
                with create_rm_publisher(server.url, mode=mode) as publisher:
                    publisher.publish(trained, version)
                assert served_difference(server, trained, version) <= PARITY


def test_a_server_in_float32_takes_weights_that_were_trained_in_bfloat16(tmp_path):
    exported("llama", tmp_path / "base")
    half = moved(BradleyTerryRM.from_pretrained(tmp_path / "base", dtype="bfloat16"), 1, head_only=False)
    engine = lambda: InProcessEngine(options_of(tmp_path / "base", tmp_path / "tokenizer"))  # noqa: E731
    with engine_running(engine) as server, RewardClient(server.url) as server.client:
        with create_rm_publisher(server.url, mode="full") as publisher:
            publisher.publish(half, "half")
        half.save_pretrained(tmp_path / "half")
        exact = BradleyTerryRM.from_pretrained(tmp_path / "half")
        assert served_difference(server, exact, "half") <= PARITY


def test_an_adapter_is_merged_for_a_server_of_the_whole_model(plain):
    model = BradleyTerryRM.from_pretrained(plain.checkpoint)
    add_adapter(model.model, LORA, seed=0)
    version = next(names)
    with create_rm_publisher(plain.url, mode="full") as publisher:
        publisher.publish(moved(model, 3), version)
    assert served_difference(plain, model, version) <= PARITY


def test_a_name_means_one_model_and_may_be_sent_again(plain):
    first, other = (moved(BradleyTerryRM.from_pretrained(plain.checkpoint), seed) for seed in (11, 12))
    version = next(names)
    with create_rm_publisher(plain.url) as publisher:
        revision = publisher.publish(first, version).revision
        again = publisher.publish(first, version)
        assert (again.status, again.version) == (OutcomeStatus.committed, version)
        assert again.revision > revision
        with pytest.raises(PublishFailed, match=f"version {version} has served other weights here"):
            publisher.publish(other, version)
    scored = plain.client.score_versioned(PROMPTS, RESPONSES)
    answer = httpx.post(f"{plain.url}/classify", json={"input": "Hi"})
    assert answer.headers["x-rm-revision"] == str(answer.json()["rm_revision"]) == str(again.revision)
    assert scored.weights == (version, again.revision)
    assert served_difference(plain, first, version) <= PARITY


def test_two_trainers_that_alternate_are_told_of_each_other(plain, caplog):
    first, second = (create_rm_publisher(plain.url) for _ in range(2))
    with first, second:
        first.publish(plain.model, next(names))
        mine = next(names)
        first.publish(plain.model, mine)
        assert "another trainer" not in caplog.text
        other = next(names)
        second.publish(plain.model, other)
        first.publish(plain.model, next(names))
    assert f"serves weights {other} where {mine} were published" in caplog.text


def test_a_mode_that_does_not_fit_is_refused_and_says_why(plain):
    before = plain.client.score_versioned(PROMPTS, RESPONSES)
    adapted = BradleyTerryRM.from_pretrained(plain.checkpoint)
    add_adapter(adapted.model, LORA, seed=0)
    for mode, model, error, message in (
        ("lora", adapted, PublishFailed, "mode lora has no tensors in the served model"),
        ("lora", plain.model, ConfigError, "the model has none"),
        ("head_only", adapted, ConfigError, "leaves out the adapter"),
    ):
        with create_rm_publisher(plain.url, mode=mode) as publisher, pytest.raises(error, match=message):
            publisher.publish(model, "refused")
    with create_rm_publisher(plain.url) as publisher:
        with pytest.raises(ConfigError, match="version is not valid"):
            publisher.publish(plain.model, "no spaces")
        with pytest.raises(PublishFailed, match="lacks 20 tensors"):
            publisher.publish({"score.weight": torch.zeros(1, 32)}, "refused")
        broken = dict(plain.model.model.state_dict()) | {"score.weight": torch.full((1, 32), torch.nan)}
        with pytest.raises(PublishFailed, match=r"score\.weight: holds values that are not finite"):
            publisher.publish(broken, "refused")
    assert_same(plain.client.score_versioned(PROMPTS, RESPONSES), before)


def test_a_head_over_another_backbone_is_taken_back(plain):
    before = plain.client.score_versioned(PROMPTS, RESPONSES)
    other = moved(BradleyTerryRM.from_pretrained(plain.checkpoint), 99)
    with create_rm_publisher(plain.url, mode="head_only") as publisher, pytest.raises(PublishFailed, match="probe"):
        publisher.publish(other, "refused")
    assert_same(plain.client.score_versioned(PROMPTS, RESPONSES), before)


def test_a_sender_that_is_killed_in_the_middle_changes_nothing(plain, python):
    before = plain.client.score_versioned(PROMPTS, RESPONSES)
    command = [python, "-m", "tests.serving.half_sender", plain.url, str(plain.checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as sender:
        assert sender.stdout.readline() == b"sent\n"
        sender.kill()
    assert httpx.get(f"{plain.url}/rm/weights/status").json()["active"] == "half"
    hasty = create_rm_publisher(plain.url, timeout_seconds=1)
    with hasty, pytest.raises(PublishFailed, match="half is in progress"):
        hasty.publish(plain.model, "hasty")
    assert_same(plain.client.score_versioned(PROMPTS, RESPONSES), before)
    version = next(names)
    with create_rm_publisher(plain.url) as publisher:
        publisher.publish(plain.model, version)  # waits for the dead trainer's time to pass
    assert served_difference(plain, plain.model, version) <= PARITY
    status = httpx.get(f"{plain.url}/rm/weights/status", params={"batch_id": "half"}).json()
    assert (status["active"], status["outcome"]["status"]) == (None, "aborted")
    version = next(names)
    with create_rm_publisher(plain.url, mode="full", transport="gloo") as publisher:
        publisher.publish(plain.model, version)
    assert served_difference(plain, plain.model, version) <= PARITY


def test_flips_under_load_lose_and_mix_nothing_and_label_right(plain):
    models = [moved(BradleyTerryRM.from_pretrained(plain.checkpoint), seed) for seed in (5, 6)]
    expected = [model.score(PROMPTS, RESPONSES) for model in models]
    publishers = [create_rm_publisher(plain.url, transport=transport) for transport in ("inline", "path")]
    publishers[0].publish(models[0], "flip-0")
    wrong: list[str] = []
    seen: set[str] = set()
    done = threading.Event()

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        with RewardClient(plain.url) as client:
            while not done.is_set():
                chosen = draw.sample(range(len(PROMPTS)), 4)
                scored = client.score_versioned([PROMPTS[i] for i in chosen], [RESPONSES[i] for i in chosen])
                of_version = expected[int(scored.version.removeprefix("flip-")) % 2][chosen]
                if float((torch.tensor(scored.rewards) - of_version).abs().max()) > PARITY:
                    wrong.append(scored.version)
                seen.add(scored.version)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1, 11):
        publishers[number % 2].publish(models[number % 2], f"flip-{number}")
    done.set()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []
    assert len(seen) >= 5
    for publisher in publishers:
        publisher.close()


def test_a_lost_answer_is_asked_for_again_and_the_update_is_one(plain):
    version, lost = next(names), []

    def losing(request: httpx.Request) -> None:
        if request.url.path.endswith(("begin", "commit")) and request.url.path not in lost:
            lost.append(request.url.path)
            again = httpx.Request(request.method, request.url, headers=request.headers, content=request.read())
            with httpx.Client() as other:
                other.send(again)  # it arrives, but its answer does not
            raise httpx.ReadError("connection reset")

    with create_rm_publisher(plain.url) as publisher:
        publisher._session.event_hooks["request"].append(losing)
        outcome = publisher.publish(plain.model, version)
    assert len(lost) == 2
    assert (outcome.status, outcome.version) == (OutcomeStatus.committed, version)


def answering(publisher: RMPublisherAdapter, route: str, answer: httpx.Response | Exception) -> list[str]:
    """Let the server's answers of a route be lost on the way, with this in their place; the routes asked so far."""
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path.split("/")[3])
        with httpx.Client() as other:
            passed_on = httpx.Request(request.method, request.url, headers=request.headers, stream=request.stream)
            response = other.send(passed_on)
        if asked[-1] != route:
            return response
        if isinstance(answer, Exception):
            raise answer
        return answer

    publisher._session_options["transport"] = httpx.MockTransport(handle)
    return asked


def test_a_commit_whose_answer_never_came_is_known_by_asking_again(plain):
    version = next(names)
    with create_rm_publisher(plain.url) as publisher:
        answering(publisher, "commit", httpx.ReadTimeout("silence"))
        outcome = publisher.publish(plain.model, version)
    assert (outcome.status, outcome.version) == (OutcomeStatus.committed, version)
    assert served_difference(plain, plain.model, version) <= PARITY


@pytest.mark.parametrize("status", [502, 504])
def test_a_proxys_refusal_of_an_update_is_not_retried_and_its_status_is_named(plain, status):
    before = plain.client.score_versioned(PROMPTS, RESPONSES)
    with create_rm_publisher(plain.url) as publisher:
        asked = answering(publisher, "begin", httpx.Response(status, text="no upstream"))
        with pytest.raises(PublishFailed, match=f"do not serve at .*: {status} no upstream"):
            publisher.publish(plain.model, "refused")
    assert asked == ["status", "begin", "abort"]
    assert_same(plain.client.score_versioned(PROMPTS, RESPONSES), before)


@pytest.mark.slow
def test_a_server_that_is_not_there_is_an_error_in_time():
    with create_rm_publisher("http://127.0.0.1:9", timeout_seconds=0.5) as publisher:
        started = time.monotonic()
        with pytest.raises(RMOptimizerError, match="gave no answer within"):
            publisher.publish({"score.weight": torch.zeros(1, 32)}, "v")
        assert time.monotonic() - started < 60


def test_unknown_words_are_named():
    with pytest.raises(ConfigError, match="unknown mode 'ful'; did you mean 'full'"):
        create_rm_publisher("http://127.0.0.1:9", mode="ful")
    with pytest.raises(ConfigError, match="unknown transport 'goo'; did you mean 'gloo'"):
        create_rm_publisher("http://127.0.0.1:9", transport="goo")
