from __future__ import annotations

import asyncio

import pytest

from rm_optimizer.errors import EngineUnavailable
from rm_optimizer.serving.service.api_errors import Overloaded
from rm_optimizer.serving.service.batcher import LEAST_BATCH_TOKENS, Batcher
from rm_optimizer.serving.service.telemetry import ServerMetrics
from tests.serving.engines import FakeEngine

ROW = LEAST_BATCH_TOKENS // 4


def row(first, tokens=ROW):
    return tuple(range(first, first + tokens))


def whole_batch(number):
    """Four sequences that nobody shares, as many tokens as a batch has."""
    return [row(10_000 * (number + 1) + 1000 * place) for place in range(4)]


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


def run(scenario, *, max_queued_tokens=100_000, **engine_options):
    async def main():
        engine = FakeEngine(**engine_options)
        batcher = Batcher(engine, max_queued_tokens=max_queued_tokens, metrics=ServerMetrics())
        batcher.start()
        try:
            return await asyncio.wait_for(scenario(engine, batcher), timeout=20)
        finally:
            await batcher.stop()

    return asyncio.run(main())


def test_every_request_gets_its_own_rewards_in_its_own_order():
    async def scenario(engine, batcher):
        requests = [[row(i * 7 + j, 3 + (i + j) % 5) for j in range(6)] for i in range(30)]
        answers = await asyncio.gather(*map(batcher.score, requests))
        return [
            (list(map(sum, request)), list(answer.rewards)) for request, answer in zip(requests, answers, strict=True)
        ]

    assert all(expected == got for expected, got in run(scenario))


def test_batches_hold_about_the_tokens_they_may():
    async def scenario(engine, batcher):
        await asyncio.gather(*(batcher.score([row(i)]) for i in range(40)))
        return [sum(map(len, batch)) for batch in engine.batches]

    sizes = run(scenario, shares_prompts=False)
    assert max(sizes) <= LEAST_BATCH_TOKENS
    assert sum(sizes) == 40 * ROW


def test_a_small_request_does_not_wait_for_all_of_a_large_one():
    async def scenario(engine, batcher):
        engine.gate.clear()
        large = asyncio.create_task(batcher.score([row(i) for i in range(60)]))
        await settled()
        small = asyncio.create_task(batcher.score([row(7000, 5)]))
        await settled()
        engine.gate.set()
        await asyncio.gather(small, large)
        return next(place for place, batch in enumerate(engine.batches) if row(7000, 5) in batch), len(engine.batches)

    place, batches = run(scenario, shares_prompts=False)
    assert batches == 15
    assert place <= 2  # after the two that were in flight


def test_requests_with_one_prompt_are_computed_together():
    prompt = row(0, 200)

    async def scenario(engine, batcher):
        engine.gate.clear()
        first = [asyncio.create_task(batcher.score(whole_batch(i))) for i in range(2)]  # both in flight
        await settled()
        mixed = [asyncio.create_task(batcher.score([(*prompt, i)])) for i in range(3)]
        mixed.insert(1, asyncio.create_task(batcher.score([row(5000)])))
        engine.batches.clear()
        engine.gate.set()
        await asyncio.gather(*first, *mixed)
        return [sequence[:200] == prompt for sequence in engine.batches[0]]

    assert run(scenario)[:3] == [True, True, True]


def test_a_full_queue_refuses_with_a_time_to_come_back():
    async def scenario(engine, batcher):
        engine.gate.clear()
        accepted = [asyncio.create_task(batcher.score([row(i, 100)])) for i in range(10)]
        await settled()
        with pytest.raises(Overloaded, match="1000 tokens wait to be computed before") as refused:
            await batcher.score([row(0, 100)])
        engine.gate.set()
        answers = await asyncio.gather(*accepted)
        return refused.value.headers, len(answers), batcher.queued_tokens

    headers, answered, queued = run(scenario, max_queued_tokens=1000)
    assert int(headers["Retry-After"]) == 1  # no batch was computed, so that the speed is unknown
    assert (answered, queued) == (10, 0)


@pytest.mark.parametrize("size", [1, 17, 400, 999])
def test_large_requests_do_not_shut_out_another(size):
    async def scenario(engine, batcher):
        engine.gate.clear()
        large = [asyncio.create_task(batcher.score([row(0, 990)]))]
        await settled()
        other = asyncio.create_task(batcher.score([row(5, size)]))
        await settled()
        assert not other.done()
        large += [asyncio.create_task(batcher.score([row(i, 1000)])) for i in range(20)]
        await settled()
        small = [asyncio.create_task(batcher.score([row(i, 3)])) for i in range(20)]
        await settled()
        engine.gate.set()
        await asyncio.gather(other, *small)
        return sum(isinstance(answer, Overloaded) for answer in await asyncio.gather(*large, return_exceptions=True))

    assert run(scenario, max_queued_tokens=1000) >= 19  # the queue stays bounded


def test_a_client_that_leaves_is_not_computed_and_leaves_nothing_behind():
    async def scenario(engine, batcher):
        engine.gate.clear()
        busy = [asyncio.create_task(batcher.score(whole_batch(i))) for i in range(2)]
        await settled()
        leaving = [asyncio.create_task(batcher.score([row(i, 50)])) for i in range(100)]
        staying = asyncio.create_task(batcher.score([row(7, 20)]))
        await settled()
        for task in leaving:
            task.cancel()
        await settled()
        waiting = len(batcher._queue)
        engine.gate.set()
        answer = await staying
        await asyncio.gather(*busy)
        return waiting, answer.rewards, batcher.queued_tokens, sum(len(batch) for batch in engine.batches)

    waiting, rewards, queued, computed = run(scenario)
    assert waiting == 1
    assert rewards == (sum(row(7, 20)),)
    assert (queued, computed) == (0, 9)


@pytest.mark.parametrize("name", ["v1", "v0"], ids=["another name", "the same name"])
def test_a_request_across_an_update_is_answered_by_the_new_weights_alone(name):
    async def scenario(engine, batcher):
        engine.gate.clear()
        answer = asyncio.create_task(batcher.score([row(i) for i in range(12)]))
        await settled()
        real = engine.score

        async def flipping(sequences):
            scored = await real(sequences)
            engine.version, engine.revision = name, 2
            return scored

        engine.score = flipping
        engine.gate.set()
        scored = await answer
        return scored, sum(len(batch) for batch in engine.batches)

    scored, computed = run(scenario, shares_prompts=False)
    assert scored.weights == (name, 2)
    assert scored.rewards == tuple(float(sum(row(i))) for i in range(12))
    assert computed > 12  # those that the old weights had computed were computed again


def test_an_engine_that_fails_fails_the_requests_of_its_batch_only():
    async def scenario(engine, batcher):
        engine.failure = "it stopped"
        with pytest.raises(EngineUnavailable, match="it stopped"):
            await batcher.score([row(0, 5)])
        engine.failure = None
        return (await batcher.score([row(0, 5)])).rewards

    assert run(scenario) == (10.0,)


def test_waiting_requests_are_told_when_the_server_stops():
    async def scenario(engine, batcher):
        engine.gate.clear()
        waiting = [asyncio.create_task(batcher.score(whole_batch(i))) for i in range(4)]
        await settled()
        await batcher.stop()
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert all(isinstance(answer, EngineUnavailable) for answer in run(scenario)[2:])
