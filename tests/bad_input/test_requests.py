"""Bad requests: each is answered at once with its status and one sentence, and the server answers the next one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from rm_optimizer.serving.http.app import create_app
from rm_optimizer.serving.protocol import ErrorBody
from rm_optimizer.serving.service.service import RewardService
from rm_optimizer.serving.weights.receiver import WeightReceiver
from tests.serving.engines import InProcessEngine, client_of, exported, options_of, serve_options

SECONDS = 20.0
"""Processor time that an answer may take."""
JSON = {"content-type": "application/json"}
GOOD = {"items": [{"prompt": "Hi", "responses": ["Hello.", "No."]}]}
TENSOR = {"name": "score.weight", "shape": [1, 32], "dtype": "float32"}
BEGIN = {"batch_id": "b", "mode": "head_only", "version": "v1", "tensors": [TENSOR], "transport": "inline"}


def score(**changes: object) -> str:
    return json.dumps({**GOOD, **changes})


def item(**changes: object) -> str:
    return json.dumps({"items": [{**GOOD["items"][0], **changes}]})


def begin(**changes: object) -> str:
    return json.dumps({**BEGIN, **changes})


ROWS: list[tuple[str, str, str | bytes, int, str]] = [
    # bodies that are no JSON, or not the right kind
    ("POST", "/rm/score", "", 400, ""),
    ("POST", "/rm/score", "{", 400, "JSON"),
    ("POST", "/rm/score", "[]", 400, ""),
    ("POST", "/rm/score", "null", 400, ""),
    ("POST", "/rm/score", '"text"', 400, ""),
    ("POST", "/rm/score", b"\xff\xfe", 400, ""),
    ("POST", "/rm/score", "[" * 100_000, 413, "lists"),
    ("POST", "/rm/score", '{"items": NaN}', 400, "items"),
    ("POST", "/rm/score", "{}", 400, "items"),
    # fields
    ("POST", "/rm/score", '{"item": []}', 400, "did you mean 'items'"),
    ("POST", "/rm/score", score(items=[]), 400, "items"),
    ("POST", "/rm/score", score(items=None), 400, "items"),
    ("POST", "/rm/score", score(items={}), 400, "items"),
    ("POST", "/rm/score", score(items="Hi"), 400, "items"),
    ("POST", "/rm/score", score(items=[1]), 400, "items"),
    ("POST", "/rm/score", score(items=GOOD["items"] * 5_000), 413, "items"),
    ("POST", "/rm/score", score(model="other"), 404, "other"),
    ("POST", "/rm/score", score(model=7), 400, "model"),
    ("POST", "/rm/score", score(use_activation="yes"), 400, "use_activation"),
    ("POST", "/rm/score", score(activation=False), 400, "use_activation"),
    ("POST", "/rm/score", score(normalize=True), 400, "normalize"),
    ("POST", "/rm/score", item(prompt=None), 400, "prompt"),
    ("POST", "/rm/score", item(prompt=3), 400, "prompt"),
    ("POST", "/rm/score", item(prompt=[]), 400, "prompt"),
    ("POST", "/rm/score", item(prompt=["a"]), 400, "prompt"),
    ("POST", "/rm/score", item(prompt=[{"role": "user"}]), 400, "content"),
    ("POST", "/rm/score", item(prompt=[{"role": "", "content": "a"}]), 400, "role"),
    ("POST", "/rm/score", item(prompt=[{"role": "user", "content": 3}]), 400, "content"),
    ("POST", "/rm/score", item(prompt=[{"role": "user", "content": [{"type": "image", "url": "x"}]}]), 400, "type"),
    ("POST", "/rm/score", item(prompt=[{"role": "user", "content": "a", "images": ["b"]}]), 400, "images"),
    ("POST", "/rm/score", item(responses=[]), 400, "responses"),
    ("POST", "/rm/score", item(responses="text"), 400, "responses"),
    ("POST", "/rm/score", item(responses=[None]), 400, "responses"),
    ("POST", "/rm/score", item(responses=[1]), 400, "responses"),
    ("POST", "/rm/score", item(responses=["\ud800"]), 400, "items[0].responses[0]"),
    ("POST", "/rm/score", item(prompt="\ud800"), 400, "surrogate"),
    ("POST", "/rm/score", item(responses=["word " * 500]), 400, "items[0].responses[0]"),
    ("POST", "/rm/score", item(prompt="word " * 500), 400, "items[0]"),
    ("POST", "/rm/score", item(reponses=["x"]), 400, "responses"),
    (
        "POST",
        "/rm/score",
        score(items=[{"prompt": f"{i}", "responses": ["a b c d e f g"] * 60} for i in range(60)]),
        413,
        "",
    ),
    ("POST", "/classify", "{}", 400, "input"),
    ("POST", "/classify", '{"input": "a", "messages": []}', 400, "exactly one of input and messages"),
    ("POST", "/classify", '{"input": []}', 400, "input"),
    ("POST", "/classify", '{"input": [[]]}', 400, "input"),
    ("POST", "/classify", '{"input": 3}', 400, "input"),
    ("POST", "/classify", '{"input": true}', 400, "input"),
    ("POST", "/classify", '{"input": [1.5]}', 400, "input"),
    ("POST", "/classify", '{"input": ["a", 1]}', 400, "input"),
    ("POST", "/classify", '{"input": [[1], "a"]}', 400, "input"),
    ("POST", "/classify", '{"input": [-1]}', 400, "outside [0, 384)"),
    ("POST", "/classify", '{"input": [99999999]}', 400, "outside [0, 384)"),
    ("POST", "/classify", '{"input": [1' + "0" * 400 + "]}", 400, "input"),
    ("POST", "/classify", json.dumps({"input": [1] * 1_000}), 400, "input"),
    ("POST", "/classify", '{"messages": []}', 400, "messages"),
    ("POST", "/classify", '{"messages": [{"role": "user", "content": "a"}]}', 400, "assistant"),
    ("POST", "/classify", '{"input": "a", "softmax": true}', 400, "softmax"),
    ("POST", "/classify", '{"input": "a", "truncate_prompt_tokens": "all"}', 400, "truncate_prompt_tokens"),
    ("POST", "/classify", '{"input": "a", "truncate_prompt_tokens": -2}', 400, "truncate_prompt_tokens"),
    (
        "POST",
        "/classify",
        '{"input": [[1, 2], [1, 2, 3]], "truncate_prompt_tokens": 2}',
        400,
        "sequence 1 has 3 tokens",
    ),
    ("POST", "/get_reward", "{}", 400, "query"),
    ("POST", "/get_reward", '{"query": "text"}', 400, "query"),
    ("POST", "/get_reward", '{"query": [1]}', 400, "query"),
    ("POST", "/get_reward", '{"query": [null]}', 400, "query"),
    ("POST", "/get_reward", '{"query": ["\\ud800"]}', 400, "query[0]"),
    # routes and methods
    ("GET", "/rm/score", "", 405, ""),
    ("DELETE", "/classify", "", 405, ""),
    ("POST", "/health", "", 405, ""),
    ("GET", "/nowhere", "", 404, ""),
    ("POST", "/v1/chat/completions", "{}", 404, ""),
    ("GET", "/rm/weights/../../etc/passwd", "", 404, ""),
    # weight updates
    ("POST", "/rm/weights/begin", "{}", 400, "batch_id"),
    ("POST", "/rm/weights/begin", begin(batch_id=""), 400, "batch_id"),
    ("POST", "/rm/weights/begin", begin(version="步骤-1"), 400, "version"),
    ("POST", "/rm/weights/begin", begin(version="a b"), 400, "version"),
    ("POST", "/rm/weights/begin", begin(version="v\n"), 400, "version"),
    ("POST", "/rm/weights/begin", begin(mode="everything"), 400, "mode"),
    ("POST", "/rm/weights/begin", begin(transport="carrier pigeon"), 400, "transport"),
    ("POST", "/rm/weights/begin", begin(transport="path", path="/etc/passwd"), 400, ""),
    ("POST", "/rm/weights/begin", begin(transport="gloo", rendezvous="127.0.0.1:1"), 400, "gloo"),
    ("POST", "/rm/weights/begin", begin(tensors=[]), 400, "tensors"),
    ("POST", "/rm/weights/begin", begin(tensors=[TENSOR, TENSOR]), 400, "score.weight"),
    ("POST", "/rm/weights/begin", begin(tensors=[TENSOR, TENSOR | {"name": "nope"}]), 400, "nope"),
    ("POST", "/rm/weights/begin", begin(tensors=[TENSOR | {"shape": [2, 32]}]), 400, "score.weight"),
    ("POST", "/rm/weights/begin", begin(tensors=[TENSOR | {"shape": [-1, 32]}]), 400, "shape"),
    ("POST", "/rm/weights/begin", begin(tensors=[TENSOR | {"shape": 3}]), 400, "shape"),
    ("POST", "/rm/weights/begin", begin(tensors=[TENSOR | {"dtype": "int3"}]), 400, "int3"),
    ("POST", "/rm/weights/begin", begin(tensors=[TENSOR | {"sha256": "short"}]), 400, "sha256"),
    ("POST", "/rm/weights/begin", begin(timeout_seconds=1e-9), 400, "timeout_seconds"),
    ("POST", "/rm/weights/begin", begin(timeout_seconds=0), 400, "timeout_seconds"),
    ("POST", "/rm/weights/begin", begin(timeout_seconds="NaN"), 400, "timeout_seconds"),
    ("POST", "/rm/weights/begin", begin(base_version="v99"), 409, "v99"),
    ("POST", "/rm/weights/begin", begin(probe={"input_ids": [[1]], "rewards": []}), 400, "rewards"),
    ("POST", "/rm/weights/commit", '{"batch_id": "never begun"}', 404, "never begun"),
    ("POST", "/rm/weights/abort", '{"batch_id": "never begun"}', 404, "never begun"),
    ("POST", "/rm/weights/commit", '{"batch": "x"}', 400, "batch_id"),
    ("PUT", "/rm/weights/upload/nothing", b"123", 404, "nothing"),
    ("PUT", "/rm/weights/upload/" + "x" * 300, b"123", 400, ""),
]
Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Send a request to one server and return the answer."""
    root = tmp_path_factory.mktemp("served")
    exported("llama", root / "model")

    async def started() -> tuple[WeightReceiver, httpx.AsyncClient]:
        engine = InProcessEngine(options_of(root / "model", root / "tokenizer"))
        service = RewardService(engine, model_name="rm", max_queued_tokens=20_000)
        receiver = WeightReceiver(service, root=None)
        app = create_app(service, serve_options(), receiver)
        await service.start()
        return receiver, client_of(app)

    with asyncio.Runner() as runner:
        receiver, client = runner.run(started())
        yield lambda *request, **body: runner.run(asyncio.wait_for(client.request(*request, **body), timeout=30))
        runner.run(client.aclose())
        runner.run(receiver.close())


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"), ROWS, ids=[f"{m} {p} {str(b)[:60]!r}" for m, p, b, _, _ in ROWS]
)
def test_a_bad_request_is_one_sentence(ask: Ask, method: str, path: str, body: str | bytes, status: int, says: str):
    started = time.process_time()
    bad, good = ask(method, path, content=body, headers=JSON), ask("POST", "/rm/score", json=GOOD)
    taken = time.process_time() - started
    assert bad.status_code == status, bad.text[:300]
    sentence = ErrorBody.model_validate_json(bad.text).error
    assert says in f"{sentence.param} {sentence.message}", bad.text[:300]
    assert "\n" not in sentence.message
    assert len(bad.content) < 4_000
    assert good.status_code == 200
    assert taken < SECONDS
