"""TensorBoard and offline W&B hold the numbers of `metrics.csv`, and the pictures and histograms."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.run_folder import read_rows
from rm_optimizer.schema import LoggerConfig, TrainConfig
from rm_optimizer.schema.config import WandbMode
from rm_optimizer.train import option_callbacks
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.loggers import MetricsCSV, log_figure, log_histogram, log_table, require_wandb_key
from tests.logged import wandb_history, wandb_records

Build = Callable[..., TrainConfig]
WATCHED = ["training.calibration.enabled=true", "profile_memory=true"]
NAMES = {"chosen_reward": "chosen", "rejected_reward": "rejected", "margin": "margin"}
"""Histograms by the loggers' names, and the same values in `reward_distributions.json`."""


def test_tensorboard_holds_the_losses(small_config: Build, tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_reward_model(small_config(tmp_path, "logger.tensorboard=true"))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("train/loss")}
    rows = [row for row in read_rows(tmp_path / "metrics.csv") if row["train_loss"]]
    assert logged == {int(row["step"]): pytest.approx(float(row["train_loss"]), rel=1e-6) for row in rows}


def test_wandb_online_without_a_key_is_refused_before_the_model(monkeypatch: pytest.MonkeyPatch):
    config = LoggerConfig(wandb=True, wandb_mode=WandbMode.online)
    monkeypatch.setenv("WANDB_API_KEY", "k")
    require_wandb_key(config)
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setattr("wandb.api", SimpleNamespace(api_key=None))
    with pytest.raises(ConfigError, match=r"wandb_mode=online needs .* wandb login.*wandb_mode=offline"):
        require_wandb_key(config)
    require_wandb_key(LoggerConfig(wandb=True))


def test_offline_wandb_files_hold_evaluations_pictures_and_histograms(small_config: Build, tmp_path: Path):
    named = ["logger.name=first", "logger.group=study-1", "logger.tags=[baseline,seed0]"]
    config = small_config(tmp_path, "logger=wandb", "logger.tensorboard=false", *named, *WATCHED)
    train_reward_model(config, callbacks=option_callbacks(config))
    run = wandb_records(tmp_path, "run")[0]
    assert (run.display_name, run.run_group, list(run.tags)) == ("first", "study-1", ["baseline", "seed0"])
    history = wandb_history(tmp_path)
    accuracies = [row["val/accuracy"] for row in history if "val/accuracy" in row]
    rows = [row for row in read_rows(tmp_path / "metrics.csv") if row["eval_acc"]]
    assert accuracies == pytest.approx([float(row["eval_acc"]) for row in rows])
    errors = [row["calibration/ece"] for row in history if "calibration/ece" in row]
    assert errors == pytest.approx([float(row["calibration_ece"]) for row in rows])

    pictures = [row for row in history if "calibration/reliability/filenames" in row]
    assert [row["trainer/global_step"] for row in pictures] == [int(row["step"]) for row in rows]
    [files] = tmp_path.glob("wandb/offline-run-*/files")
    for row in pictures:
        [name] = row["calibration/reliability/filenames"]
        figure = tmp_path / "figures" / f"reliability-step-{row['trainer/global_step']:08d}.png"
        assert (files / name).read_bytes() == figure.read_bytes()

    for name, values in NAMES.items():
        histograms = [row for row in history if f"val/{name}/values" in row]
        assert [sum(row[f"val/{name}/values"]) for row in histograms] == [33] * len(rows)
        last = stored_distribution(tmp_path, int(rows[-1]["step"]))[values]["quantiles"]
        bins = histograms[-1][f"val/{name}/bins"]
        assert (bins[0], bins[-1]) == pytest.approx((last["0.0"], last["1.0"]))

    result = json.loads((tmp_path / "run.json").read_text())
    settings = {
        each.key: json.loads(each.value_json) for part in wandb_records(tmp_path, "config") for each in part.update
    }
    assert settings["optimizer"] == result["config"]["optimizer"]
    summary = {
        each.key: json.loads(each.value_json) for part in wandb_records(tmp_path, "summary") for each in part.update
    }
    accuracy = result["metrics"]["accuracy"]
    assert [summary[f"best/accuracy{end}"] for end in ("", "_low", "_high")] == [
        accuracy[name] for name in ("value", "low", "high")
    ]
    [artifact] = [each for each in wandb_records(tmp_path, "artifact") if each.type == "model"]
    stored = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert artifact.name == f"model-{result['run_id']}"
    assert stored["model.safetensors"].samefile(tmp_path / "best" / "model.safetensors")
    [table] = [row["best/by_subset/path"] for row in history if "best/by_subset/path" in row]
    rows_by_subset = {line[0]: line[2] for line in json.loads((files / table).read_text())["data"]}
    groups = result["metrics"]["groups"]["subset"]
    assert rows_by_subset == {name: group["accuracy"]["value"] for name, group in groups.items()}

    profiled = [row["perf/tokens_per_second"] for row in history if "perf/tokens_per_second" in row]
    assert profiled == [float(row["tokens_per_second"]) for row in read_rows(tmp_path / "profile.csv")]


def test_tensorboard_holds_pictures_and_histograms(small_config: Build, tmp_path: Path):
    from matplotlib.image import imread
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = small_config(tmp_path, "logger.tensorboard=true", *WATCHED)
    train_reward_model(config, callbacks=option_callbacks(config))
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0, "histograms": 0})
    events.Reload()
    steps = [int(row["step"]) for row in read_rows(tmp_path / "metrics.csv") if row["eval_acc"]]
    images = events.Images("calibration/reliability")
    assert [image.step for image in images] == steps
    shown = imread(BytesIO(images[-1].encoded_image_string), format="png")
    figure = imread(tmp_path / "figures" / f"reliability-step-{steps[-1]:08d}.png")
    assert np.abs(shown - figure[..., :3]).max() <= 1 / 255
    for name, values in NAMES.items():
        histograms = events.Histograms(f"val/{name}")
        assert [(item.step, item.histogram_value.num) for item in histograms] == [(step, 33) for step in steps]
        last = stored_distribution(tmp_path, steps[-1])[values]
        assert histograms[-1].histogram_value.sum == pytest.approx(33 * last["mean"])
    assert len(events.Scalars("perf/tokens_per_second")) == 6


def test_loggers_of_numbers_alone_are_passed_over(tmp_path: Path):
    recorder = MetricsCSV(tmp_path)
    log_figure([recorder], "a/figure", tmp_path / "none.png", 1)
    log_histogram([recorder], "a/values", np.zeros(2), 1)
    log_table([recorder], "a/table", [{"name": "one row", "value": 1}], 1)
    recorder.finalize("success")
    assert not recorder.path.exists()


def stored_distribution(run_dir: Path, step: int) -> dict[str, Any]:
    path = run_dir / "evaluations" / f"step-{step:08d}" / "reward_distributions.json"
    stored: dict[str, Any] = json.loads(path.read_text())
    return stored
