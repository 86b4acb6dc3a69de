"""The direction of a monitored metric is its own; unknown metrics and contradictions are refused early."""

from __future__ import annotations

import pytest

from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.command_line import checked
from rm_optimizer.schema import TrainConfig
from rm_optimizer.schema.monitors import DIRECTIONS, UNDIRECTED, Mode, better_mode


@pytest.mark.parametrize(
    "monitor", ["val/accuracy", "val/mean_margin", "val/source/hh/accuracy", "val/subset/a/b/accuracy"]
)
def test_larger_is_better(monitor: str):
    assert better_mode(monitor, None) == better_mode(monitor, Mode.max) == Mode.max
    with pytest.raises(ConfigError, match=r"training\.mode must be max .*larger value is better, got min"):
        better_mode(monitor, Mode.min)


@pytest.mark.parametrize("monitor", ["val/nll", "val/loss", "val/brier", "val/ece", "val/source/hh/nll"])
def test_smaller_is_better(monitor: str):
    assert better_mode(monitor, None) == Mode.min
    with pytest.raises(ConfigError, match=r"training\.mode must be min .*smaller value is better, got max"):
        better_mode(monitor, Mode.max)


@pytest.mark.parametrize("monitor", [*UNDIRECTED, "val/source/hh/reward_mean"])
def test_a_metric_without_a_direction_needs_the_mode(monitor: str):
    assert better_mode(monitor, Mode.max) == Mode.max
    with pytest.raises(ConfigError, match=r"training\.mode must be min or max"):
        better_mode(monitor, None)


@pytest.mark.parametrize("monitor", ["val/f1", "accuracy", "train/loss", "val/num_pairs", "val/source/hh/loss", ""])
def test_an_unknown_metric_is_refused_before_anything_is_loaded(monitor: str):
    with pytest.raises(ConfigError, match=r"unknown training\.monitor"):
        checked([f"training.monitor='{monitor}'"], TrainConfig, writable=False)


def test_every_known_metric_is_logged():
    import numpy as np

    from rm_optimizer.core.metrics.pairwise import evaluate_pairs
    from rm_optimizer.training.callbacks.evaluation import SCORE_METRICS

    rng = np.random.default_rng(0)
    metrics = evaluate_pairs(
        rng.normal(1, 1, 64), rng.normal(0, 1, 64), beta=1.0, label=np.ones(64), weight=np.ones(64),
        prompt_ids=[str(i) for i in range(64)], groups={}, num_bootstrap=0, seed=0,
    )  # fmt: skip
    logged = {f"val/{name}" for name in (*metrics.flat(), *SCORE_METRICS)} | {"val/loss"}
    assert {*DIRECTIONS, *UNDIRECTED} <= logged
