"""The engine with its real process: a start takes seconds, so one process serves a whole scenario."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from rm_optimizer.errors import CheckpointError, EngineFailed, EngineUnavailable, WeightsRefused
from rm_optimizer.schema.publish import RewardModelTrainingMode
from rm_optimizer.serving.embedded.engine import WorkerEngine, WorkerLimits
from rm_optimizer.serving.engine import StagedWeights
from rm_optimizer.serving.options import WorkerOptions
from rm_optimizer.serving.weights.live_weights import tensor_specs
from tests.builders import tiny_reward_model
from tests.fork_server import forked_by
from tests.serving.engines import exported, fake_description

FULL = RewardModelTrainingMode.full
SEQUENCES = [list(range(5, 60)), [7, 8, 9], [*range(5, 58), 9]]
PARITY = 1e-4
LIMITS = WorkerLimits(silence=4.0, stop=2.0, tick=0.2)


def rewards_of(model):
    ids = [torch.tensor([row]) for row in SEQUENCES]
    return [model(row, torch.ones_like(row)).item() for row in ids]


def close(rewards, expected):
    return rewards == pytest.approx(expected, abs=PARITY)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_killed_worker_comes_back_with_its_last_good_weights_and_loses_no_request(tmp_path):
    first = rewards_of(exported("llama", tmp_path / "model"))
    other = tiny_reward_model("llama", seed=1)
    second = rewards_of(other)
    state = {name: tensor.contiguous() for name, tensor in other.model.state_dict().items()}
    for name in ("good", "again"):
        save_file(state, tmp_path / f"{name}.safetensors")
    save_file(state | {"score.weight": torch.full((1, 32), torch.nan)}, tmp_path / "nan.safetensors")

    async def scenario():
        engine = WorkerEngine(WorkerOptions(str(tmp_path / "model"), threads=1, token_budget=256), LIMITS)
        await engine.start()
        await engine.restore()
        try:
            started = await engine.score(SEQUENCES)
            assert close(started.rewards, first)
            assert started.version == engine.version == engine.description.version

            await engine.stage(weights("v1", "good"))
            assert (await engine.score(SEQUENCES)).version == started.version  # staged is not serving
            await engine.commit(1)
            with pytest.raises(WeightsRefused, match=r"score.weight: holds values that are not finite"):
                await engine.stage(weights("v2", "nan"))
            synced = await engine.score(SEQUENCES)
            assert close(synced.rewards, second)
            assert synced.version == engine.version == "v1"

            assert not (tmp_path / "good.safetensors").exists()  # it is the engine's now
            waiting = [asyncio.create_task(engine.score(SEQUENCES)) for _ in range(4)]
            await asyncio.sleep(0)
            os.kill(forked_by(engine._replicas[0].link.process.pid), signal.SIGKILL)
            noticed = time.perf_counter()
            while engine.is_up:
                await asyncio.sleep(0.001)
            noticed = time.perf_counter() - noticed
            answers = [*await asyncio.gather(*waiting), await engine.score(SEQUENCES)]
            assert noticed < LIMITS.silence
            assert all(close(answer.rewards, second) and answer.version == "v1" for answer in answers)
            assert engine.num_restarts == 1
            with pytest.raises(WeightsRefused, match="begin the update again"):
                await engine.commit(3)

            await engine.stage(weights("v4", "again"))
            os.kill(forked_by(engine._replicas[0].link.process.pid), signal.SIGSTOP)
            stopped = time.perf_counter()
            scoring = asyncio.create_task(engine.score(SEQUENCES))
            await engine.commit(4)  # decided once it is recorded: the next worker has it
            assert time.perf_counter() - stopped < 60
            scored = await scoring
            assert close(scored.rewards, second)
            assert scored.weights == ("v4", 4)
            assert engine.num_restarts == 2

            [kept] = (engine._folder / "history").glob("*.safetensors")
            kept.write_bytes(b"torn")
            os.kill(forked_by(engine._replicas[0].link.process.pid), signal.SIGKILL)
            while engine.version == "v4":
                await asyncio.sleep(0.01)
            back = await engine.score(SEQUENCES)
            assert close(back.rewards, first)
            assert back.weights == started.weights
            os.kill(forked_by(engine._replicas[0].link.process.pid), signal.SIGSTOP)
            stopped = time.perf_counter()
        finally:
            await engine.stop()
        assert time.perf_counter() - stopped < 60
        with pytest.raises(EngineUnavailable, match="has stopped"):
            await engine.score(SEQUENCES)
        return engine

    def weights(version, name):
        return StagedWeights(
            version, int(version[1:]), FULL, tmp_path / f"{name}.safetensors", tensor_specs(other.model, FULL)
        )

    engine = asyncio.run(scenario())
    assert not engine._folder.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_checkpoint_that_is_not_there_is_told_in_one_sentence(tmp_path):
    async def scenario():
        engine = WorkerEngine(WorkerOptions(str(tmp_path / "nothing")))
        try:
            await engine.start()
        finally:
            await engine.stop()

    with pytest.raises(CheckpointError, match="no model at"):
        asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("change", ["weights", "max_length"])
def test_a_checkpoint_replaced_while_it_is_served_ends_the_engine_at_the_next_restart(tmp_path, change):
    exported("llama", tmp_path / "model")

    async def scenario():
        engine = WorkerEngine(WorkerOptions(str(tmp_path / "model"), threads=1, token_budget=256), LIMITS)
        await engine.start()
        await engine.restore()
        try:
            shutil.rmtree(tmp_path / "model")
            exported("llama", tmp_path / "model", **({"seed": 1} if change == "weights" else {"max_length": 60}))
            os.kill(forked_by(engine._replicas[0].link.process.pid), signal.SIGKILL)
            while engine.failure is None:
                await asyncio.sleep(0.01)
            with pytest.raises(EngineFailed, match="replaced while it was served, so start the server again"):
                await engine.score(SEQUENCES)
            assert not engine.is_up
        finally:
            await engine.stop()

    asyncio.run(scenario())


def test_batches_with_one_start_go_to_one_of_the_replicas_of_vllm_that_are_about_as_busy(tmp_path):
    async def scene(kind: str) -> list[set[int]]:
        engine = WorkerEngine(WorkerOptions(str(tmp_path), replicas=3))
        engine._description = replace(fake_description(token_budget=64), engine=kind)
        for replica in engine._replicas:
            replica.is_up, replica.link = True, SimpleNamespace(ended=asyncio.Event())
        found = []
        for loads in ((0, 0, 0), (10, 40, 70), (0, 64, 64), (10, 10, 200)):
            for replica, tokens in zip(engine._replicas, loads, strict=True):
                replica.tokens = tokens
            chosen = [(await engine._chosen((start, 7)))[0].number for start in (*range(50), *range(50))]
            assert chosen[:50] == chosen[50:]
            found.append(set(chosen))
        shutil.rmtree(engine._folder)
        return found

    assert asyncio.run(scene("vllm")) == [{0, 1, 2}, {0, 1, 2}, {0}, {0, 1}]
    assert asyncio.run(scene("transformers")) == [{0, 1, 2}, {0}, {0}, {0, 1}]
