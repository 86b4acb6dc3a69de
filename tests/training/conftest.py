"""A small configuration that trains in a second, and one finished run of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training import RunResult, train_reward_model
from tests.builders import beside_world

SMALL = [
    "hardware=cpu",
    "hardware.num_threads=1",
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=64",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=2",
    "model.vocab_size=400",
    "model.max_length=96",
    "data.synthetic.num_train=96",
    "data.synthetic.num_val=33",
    "batching.batch_size=16",
    "batching.micro_token_budget=1024",
    "training.evals_per_epoch=2",
    "training.num_bootstrap=100",
    "training.progress=false",
    "logger.tensorboard=false",
]


@pytest.fixture(scope="session")
def small_overrides() -> list[str]:
    return list(SMALL)


@pytest.fixture(scope="session")
def small_config() -> Callable[..., TrainConfig]:
    def build(output_dir: Path, *overrides: str) -> TrainConfig:
        return typed(compose(beside_world(SMALL, [f"output_dir={output_dir}", *overrides])), TrainConfig)

    return build


@pytest.fixture(scope="session")
def finished_run(small_config: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train_reward_model(small_config(tmp_path_factory.mktemp("run") / "out"))
