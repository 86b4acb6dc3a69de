"""Finished runs that comparisons are made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training import train_reward_model
from tests.training.conftest import SMALL

RUNS = {
    "adamw/0": ["seed=0"],
    "adamw/1": ["seed=1"],
    "muon/0": ["seed=0", "optimizer=muon"],
    "muon/1": ["seed=1", "optimizer=muon"],
    "fewer": ["data.synthetic.num_val=20", "batching.batch_size=32"],
    "other": ["data.synthetic.seed=5"],
}
"""Overrides of each run by its folder."""


@pytest.fixture(scope="session")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs."""
    root = tmp_path_factory.mktemp("runs")
    for name, overrides in RUNS.items():
        options = [*SMALL, "training.evals_per_epoch=1", f"output_dir={root / name}", *overrides]
        train_reward_model(typed(compose(options), TrainConfig))
    return root
