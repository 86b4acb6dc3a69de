"""Large bodies of the wrong kind, for every field of every route: refused at once, and in little memory."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import time
from contextlib import suppress
from typing import Any

import pytest

from rm_optimizer.schema.publish import RewardModelTrainingMode
from rm_optimizer.serving.http.gate import too_complex
from rm_optimizer.serving.protocol import ErrorBody
from tests.serving.engines import FakeEngine, client_of, served_without_reader

CPU_SECONDS = 5.0
MEMORY_BYTES = 100 * 2**20


def repeated(entry: str, size: int) -> str:
    return "[" + ",".join([entry] * (size // (len(entry) + 1))) + "]"


def wrong_kinds(size: int) -> dict[str, str]:
    """JSON of so many bytes, by name."""
    return {
        "floats": repeated("1.5", size),
        "ids": repeated("1", size),
        "texts": repeated('""', size),
        "ids, then a text": repeated("1", size)[:-1] + ',"a"]',
        "lists of floats": repeated("[0.5]", size),
        "lists of ids": repeated("[1]", size),
        "objects": repeated("{}", size),
        "messages with an unknown field": repeated('{"role":"user","content":"a","x":1}', size),
        "items": repeated('{"prompt":"a","responses":["b"]}', size),
        "tensors": repeated('{"name":"a","shape":[1],"dtype":"float32"}', size),
        "many fields": "{" + ",".join(f'"{number}":1' for number in range(size // 11)) + "}",
        "a long field": json.dumps({"x" * size: 1}),
        "text": json.dumps("x" * size),
        "brackets in a text": json.dumps('["' * (size // 3)),
        "a text without an end": '"' + '\\"[' * (size // 3),
        "half a surrogate pair": '"' + "\\ud800" * (size // 6) + '"',
        "digits": "9" * size,
        "depth": "[" * (size // 2) + "]" * (size // 2),
    }


HERE = "@"
"""Where the wrong kind goes."""
BEGIN: dict[str, Any] = {
    "batch_id": "b",
    "mode": RewardModelTrainingMode.full.value,
    "version": "v1",
    "tensors": [{"name": "a", "shape": [1], "dtype": "float32"}],
    "transport": "inline",
}
PLACES: dict[str, list[Any]] = {
    "/classify": [
        HERE,
        *({field: HERE} for field in ("input", "messages", "model", "use_activation", "unknown")),
        {"input": [HERE]},
        {"input": [1, HERE]},
        {"input": ["a", HERE]},
        {"input": [[1], HERE]},
        {"input": [[1, HERE]]},
        {"messages": [HERE]},
        {"messages": [{"role": HERE, "content": "a"}]},
        {"messages": [{"role": "user", "content": HERE}]},
        {"messages": [{"role": "user", "content": [HERE]}]},
    ],
    "/rm/score": [
        HERE,
        {"items": HERE},
        {"items": [HERE]},
        {"items": [{"prompt": HERE, "responses": ["a"]}]},
        {"items": [{"prompt": [HERE], "responses": ["a"]}]},
        {"items": [{"prompt": "a", "responses": HERE}]},
        {"items": [{"prompt": "a", "responses": [HERE]}]},
    ],
    "/get_reward": [HERE, {"query": HERE}, {"query": [HERE]}, {"query": 1, "prompts": HERE, "labels": HERE}],
    "/rm/weights/begin": [
        HERE,
        *(
            BEGIN | {field: HERE}
            for field in (*BEGIN, "base_version", "path", "rendezvous", "timeout_seconds", "probe")
        ),
        BEGIN | {"tensors": [HERE]},
        BEGIN | {"tensors": [BEGIN["tensors"][0] | {"shape": HERE}]},
        BEGIN | {"tensors": [BEGIN["tensors"][0] | {"name": HERE}]},
        BEGIN | {"tensors": [BEGIN["tensors"][0] | {"sha256": HERE}]},
        BEGIN | {"probe": {"input_ids": HERE, "rewards": [1.0]}},
        BEGIN | {"probe": {"input_ids": [[1]], "rewards": HERE}},
    ],
    "/rm/weights/commit": [HERE, {"batch_id": HERE}],
    "/rm/weights/abort": [HERE, {"batch_id": HERE}, {"batch_id": "b", "reason": HERE}],
}


FULL_SIZE = {"/classify": {"input": HERE}, "/rm/score": {"items": HERE}, "/get_reward": {"query": HERE},
             "/rm/weights/begin": BEGIN | {"tensors": HERE}}  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [b"[" * 70_000 + b'"' * 7_000_000, b"[" * 70_000 + b'\\"' * 3_500_000, b'["' + b"\\" * 7_000_000 + b"[" * 70_000,
     b"{" + b",".join(b'"k%d":1' % number for number in range(600_000)) + b"}", b"[" + b"1.5," * 2_000_000 + b"1]",
     b"[" + b'"",' * 2_600_000 + b'""]', b"[" + b"1," * 4_000_000 + b"1]", b'["' + b",:[{" * 2_000_000 + b'"]'],
)  # fmt: skip
def test_a_large_body_is_counted_in_little_time(body):
    started = time.process_time()
    refusal = too_complex(body)
    assert time.process_time() - started < 0.2
    started = time.process_time()
    if refusal is None:
        with suppress(ValueError):
            json.loads(body)
    assert time.process_time() - started < 0.2


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def refusals(path: str, places: list[Any], size: int) -> list[tuple[float, int, str, str]]:
    """CPU seconds, status, place and kind of each answer."""
    app = served_without_reader(FakeEngine())
    seen = []
    kinds = wrong_kinds(size)
    async with client_of(app) as client:
        for place, (kind, text) in itertools.product(places, kinds.items()):
            body = json.dumps(place).replace(f'"{HERE}"', text).encode()
            taken = []
            while (
                len(taken) < 3 and min(taken, default=CPU_SECONDS) >= CPU_SECONDS
            ):  # a pause of the collector is not ours
                started = time.process_time()
                answer = await client.post(path, content=body, headers={"content-type": "application/json"})
                taken.append(time.process_time() - started)
            seconds = min(taken)
            ErrorBody.model_validate(answer.json())
            assert len(answer.content) < 5000, (place, kind)
            seen.append((seconds, answer.status_code, str(place)[:80], kind))
    return seen


@pytest.mark.parametrize(
    ("path", "places", "size"),
    [*((path, [place], 2**20) for path, place in FULL_SIZE.items()), *((*item, 2**15) for item in PLACES.items())],
)
def test_a_body_of_the_wrong_kind_is_refused_at_once_and_in_little_memory(path, places, size):
    peak = peak_bytes()
    seen = asyncio.run(refusals(path, places, size))
    assert peak_bytes() - peak < MEMORY_BYTES
    assert max(seen)[0] < CPU_SECONDS
    assert {status for _, status, *_ in seen} <= {400, 404, 413, 503}, [row for row in seen if row[1] == 500]
