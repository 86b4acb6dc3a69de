"""Calibration is logged from the evaluations that are made anyway, with a picture of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.errors import ConfigError
from rm_optimizer.records.run_folder import read_rows
from rm_optimizer.schema import TrainConfig
from rm_optimizer.train import option_callbacks
from rm_optimizer.training import RunResult, train_reward_model
from rm_optimizer.training.callbacks.evaluation import calibration_values
from rm_optimizer.training.data import in_memory

Build = Callable[..., TrainConfig]


def evaluated(run_dir: Path, step: str) -> PairwiseMetrics:
    return PairwiseMetrics.from_json((run_dir / "evaluations" / f"step-{int(step):08d}" / "metrics.json").read_text())


def test_the_numbers_are_those_of_the_evaluations_and_nothing_is_scored_again(
    small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scored: list[int] = []
    score = in_memory.score_pairs
    monkeypatch.setattr(in_memory, "score_pairs", lambda *a, **k: (scored.append(1), score(*a, **k))[1])
    config = small_config(tmp_path, "training.calibration.enabled=true")
    train_reward_model(config, callbacks=option_callbacks(config))
    rows = {row["step"]: row for row in read_rows(tmp_path / "metrics.csv") if row["calibration_ece"]}
    assert list(rows) == ["0", "3", "6"]
    assert len(scored) == len(rows) + 1  # and the final evaluation of the best weights
    for step, row in rows.items():
        values = calibration_values(evaluated(tmp_path, step))
        logged = {f"calibration/{name[12:]}": value for name, value in row.items() if name.startswith("calibration_")}
        assert {name: float(value) for name, value in logged.items() if value} == values
        assert row["calibration_ece"] == row["eval_ece"]
    assert [path.name for path in sorted((tmp_path / "figures").iterdir())] == [
        f"reliability-step-{int(step):08d}.png" for step in rows
    ]


def test_every_other_evaluation_means_the_first_every_second_and_the_last(small_config: Build, tmp_path: Path):
    options = ["training.calibration.enabled=true", "training.calibration.every=2", "training.evals_per_epoch=6"]
    config = small_config(tmp_path, *options, "training.max_steps=5")
    train_reward_model(config, callbacks=option_callbacks(config))
    taken = [row["step"] for row in read_rows(tmp_path / "metrics.csv") if row["calibration_ece"]]
    assert taken == ["0", "2", "4", "5"]


def test_weights_are_those_of_a_run_that_is_not_watched(small_config: Build, tmp_path: Path, finished_run: RunResult):
    config = small_config(tmp_path, "training.calibration.enabled=true")
    train_reward_model(config, callbacks=option_callbacks(config))
    name = "best/model.safetensors"
    assert (tmp_path / name).read_bytes() == (Path(finished_run.run_dir) / name).read_bytes()


def test_without_its_callback_the_option_is_refused(small_config: Build, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"training\.calibration\.enabled needs a callback .*option_callbacks"):
        train_reward_model(small_config(tmp_path, "training.calibration.enabled=true"))


def test_a_temperature_that_does_not_exist_is_left_out(finished_run: RunResult):
    values = calibration_values(finished_run.metrics)
    fit = finished_run.metrics.temperature
    assert ("calibration/temperature" in values) == (fit.temperature is not None)
    assert all(math.isfinite(value) for value in values.values())
