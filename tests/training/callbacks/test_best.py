"""The best weights by a metric: its own direction, never a value that is not finite, patience as elsewhere."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.errors import ConfigError
from rm_optimizer.records.run_folder import read_rows
from rm_optimizer.schema import TrainConfig
from rm_optimizer.schema.monitors import Mode
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.callbacks.evaluation_plan import BestSoFar, require_monitored

Build = Callable[..., TrainConfig]


def fed(best: BestSoFar, values: list[float]) -> BestSoFar:
    for step, value in enumerate(values):
        best.update(value, step)
    return best


@pytest.mark.parametrize(("mode", "step"), [(Mode.min, 1), (Mode.max, 2)])
def test_the_best_value_follows_the_mode(mode: Mode, step: int):
    assert fed(BestSoFar(mode, 0.0), [0.5, 0.4, 0.6, 0.5]).step == step


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", list(Mode))
def test_a_value_that_is_not_finite_is_never_best(mode: Mode, wrong: float):
    best = fed(BestSoFar(mode, 0.0), [wrong, wrong, 0.5, wrong])
    assert (best.value, best.step) == (0.5, 2)


def test_without_any_finite_value_the_last_weights_are_kept():
    best = fed(BestSoFar(Mode.min, 0.0), [math.nan, math.nan])
    assert (best.value, best.step) == (None, 1)


def test_small_steady_gains_add_up_to_one_that_counts():
    best = BestSoFar(Mode.min, 0.01)
    stale = [fed(best, [0.6 - 0.006 * k]).stale for k in range(12)]
    assert stale == [0, 1] * 6  # the reference moves on a counted gain alone, so no gain is lost


def test_the_best_weights_are_kept_below_min_delta_too():
    best = fed(BestSoFar(Mode.min, 0.01), [0.6, 0.595])
    assert (best.value, best.reference, best.stale) == (0.595, 0.6, 1)


def groups(*names: str) -> PreferenceDataset:
    return PreferenceDataset(PreferencePair("p", "a", "b", metadata={"source": name}) for name in names)


def test_a_group_that_validation_lacks_is_refused_by_name():
    require_monitored("val/source/hh/accuracy", groups("hh", "code"))
    with pytest.raises(ConfigError, match=r"unknown training\.monitor 'val/source/hx/.*did you mean 'val/source/hh/"):
        require_monitored("val/source/hx/accuracy", groups("hh", "code"))
    with pytest.raises(ConfigError, match="the one value 'hh'"):
        require_monitored("val/source/hh/accuracy", groups("hh", "hh"))


def test_accuracy_exports_its_largest_value(small_config: Build, tmp_path: Path):
    result = train_reward_model(small_config(tmp_path, "training.monitor=val/accuracy", "optimizer.lr=3e-2"))
    rows = {int(row["step"]): float(row["eval_acc"]) for row in read_rows(tmp_path / "metrics.csv") if row["eval_acc"]}
    assert rows[result.best_step] == max(rows.values()) > rows[0]


def test_a_metric_without_a_finite_value_is_said(
    small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from rm_optimizer.core.metrics.pairwise import PairwiseMetrics

    flat = PairwiseMetrics.flat
    monkeypatch.setattr(
        PairwiseMetrics, "flat", lambda self: {k: v for k, v in flat(self).items() if k != "temperature"}
    )
    caplog.set_level(logging.WARNING, logger="rm_optimizer")
    options = ["training.monitor=val/temperature", "training.mode=min", "training.max_steps=1"]
    result = train_reward_model(small_config(tmp_path, *options))
    assert result.best_step == 1
    assert "val/temperature had no finite value" in caplog.text
