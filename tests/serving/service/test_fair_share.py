from __future__ import annotations

import asyncio

import httpx
import pytest

from rm_optimizer.serving.service.batcher import CLIENT, FairShare
from tests.serving.engines import InProcessEngine, client_of, exported, options_of, served


@pytest.mark.parametrize("size", [1, 50, 100])
def test_a_client_that_fills_the_capacity_is_refused_and_another_is_not(size):
    share = FairShare(1000)
    CLIENT.set("a")
    for key in range(1000 // size):
        assert share.excess(size) == 0
        share.hold(key, size)
    assert share.excess(size) == share.total == 1000
    CLIENT.set("b")
    for key in range(500 // size):
        assert share.excess(size) == 0, key
        share.hold(("b", key), size)
    assert share.excess(size) >= 1000  # each has as much
    for key in range(1000 // size):
        share.release(key)
    share.release("never held")
    assert (share.excess(size), share.total) == (0, 500)
    CLIENT.set("")


def test_many_open_requests_of_one_host_shut_out_no_other_host(tmp_path):
    exported("llama", tmp_path / "export")

    async def main() -> tuple[list[int], int, int]:
        engine = InProcessEngine(options_of(tmp_path / "export", tmp_path / "tokenizer"))
        app = await served(engine, max_queued_tokens=500)
        engine.gate.clear()
        async with client_of(app, timeout=None) as busy, from_host(app, "10.0.0.2") as other:
            first = [asyncio.create_task(busy.post("/classify", json={"input": [7] * 50})) for _ in range(20)]
            while sum(task.done() for task in first) < 10:
                await asyncio.sleep(0.01)
            one = asyncio.create_task(other.post("/classify", json={"input": [7] * 50}))
            await asyncio.sleep(0.1)
            refused = (await busy.post("/classify", json={"input": [7] * 50})).status_code
            engine.gate.set()
            return [answer.status_code for answer in await asyncio.gather(*first)], refused, (await one).status_code

    statuses, refused, one = asyncio.run(main())
    assert sorted(statuses) == [200] * 10 + [503] * 10
    assert (refused, one) == (503, 200)


def test_a_long_prompt_counts_once_however_many_responses_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr("rm_optimizer.serving.service.service.MAX_WAITING_CHARACTERS", 100_000)
    exported("llama", tmp_path / "export")

    async def main() -> list[str]:
        app = await served(InProcessEngine(options_of(tmp_path / "export", tmp_path / "tokenizer")))
        messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "a word"} for i in range(1001)]
        body = {"items": [{"prompt": messages, "responses": ["x"] * 4096}]}
        async with client_of(app, timeout=None) as client:
            answers = await asyncio.gather(*(client.post("/rm/score", json=body) for _ in range(3)))
        return [answer.json()["error"]["type"] for answer in answers]

    assert asyncio.run(main()) == ["TooLong"] * 3  # not Overloaded


def from_host(app, host: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False, client=(host, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://server", timeout=None)
