"""Chapters 9 and 11 of the tutorial: training by one call, with pairs in memory, a loss and metrics of one's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from rm_optimizer import BradleyTerryRM
from rm_optimizer.core.model.losses import LOSSES, register_loss
from rm_optimizer.core.tokens.dataset import PreferenceDataset, TrainVal
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.records.run_folder import RunFolder, read_rows
from rm_optimizer.schema import compose, typed
from rm_optimizer.schema.config import TrainConfig
from rm_optimizer.training import RunResult, train_reward_model

ROWS = [{"prompt": f"Say {i % 20}", "chosen": f"{i} it is", "rejected": "no"} for i in range(60)]
SMALL: dict[str, object] = {
    "hardware": "cpu",
    "model.architecture.hidden_size": 32,
    "model.architecture.intermediate_size": 64,
    "model.architecture.num_attention_heads": 2,
    "model.architecture.num_key_value_heads": 2,
    "model.vocab_size": 400,
    "training.progress": False,
    "training.num_bootstrap": 100,
    "logger.tensorboard": False,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("trained")
    pd.DataFrame(ROWS).to_parquet(folder / "preferences.parquet")
    return train_reward_model(
        model_name="tiny",
        optimizer="muon",
        data_path=folder / "preferences.parquet",
        epochs=2,
        batch_size=16,
        output_dir=folder / "run",
        options=SMALL,
    )


def test_a_result_is_the_path_of_its_model(trained: RunResult):
    best = Path(trained.run_dir) / "best"
    assert f"Saved to {trained}" == f"Saved to {best}"
    assert "model.safetensors" in os.listdir(trained)
    assert BradleyTerryRM.from_pretrained(trained).score("Say 1", ["1 it is", "no"]).shape == (2,)


def test_a_result_shows_itself_in_a_few_lines(trained: RunResult):
    lines = repr(trained).splitlines()
    assert lines[0] == "RunResult: tiny, muon, seed 0, finished after step 8"
    assert f"accuracy {trained.metrics.accuracy}" in lines[1]
    assert len(lines) <= 12
    assert max(map(len, lines[:-1])) <= 100


@pytest.mark.parametrize(
    "form", [pd.DataFrame, list, lambda rows: TrainVal(*PreferenceDataset.from_pairs(rows).split_by_prompt(0.1, 0))]
)
def test_pairs_in_memory_train_as_those_of_a_file(form: Any, trained: RunResult, tmp_path: Path):
    options = {**SMALL, "data.split_seed": 0}
    again = train_reward_model("tiny", "muon", form(ROWS), 2, 16, output_dir=tmp_path, options=options)
    assert again.metrics == trained.metrics
    assert again.data.val_fingerprint == trained.data.val_fingerprint


def test_composed_options_train_the_same(trained: RunResult, tmp_path: Path):
    given = RunFolder(Path(trained.run_dir)).options
    lines = [f"{name}={str(value).lower()}" for name, value in SMALL.items()]
    lines += ["optimizer=muon", "training.epochs=2", "batching.batch_size=16", f"output_dir={tmp_path}"]
    config = typed(compose([*lines, f"data.train={given['data']['train']}"]), TrainConfig)
    assert train_reward_model(config).metrics == trained.metrics


def test_validation_pairs_are_given_in_any_form(tmp_path: Path):
    val = [{**row, "prompt": f"Tell {row['prompt']}"} for row in ROWS[:12]]
    pd.DataFrame(val).to_json(tmp_path / "val.jsonl", orient="records", lines=True)
    found = [
        train_reward_model(data_path=ROWS, val=each, batch_size=30, output_dir=tmp_path / str(number), options=SMALL)
        for number, each in enumerate((val, tmp_path / "val.jsonl"))
    ]
    assert found[0].metrics == found[1].metrics
    assert found[0].data.val_pairs == 12


def hinge(chosen: Tensor, rejected: Tensor, *, margin: Tensor, label: Tensor) -> Tensor:
    return torch.relu(1 + margin - (2 * label - 1) * (chosen - rejected))


def test_a_loss_and_metrics_of_ones_own(tmp_path: Path):
    metrics = {"median_margin": lambda chosen, rejected: float(np.median(chosen - rejected))}
    result = train_reward_model(
        data_path=ROWS, batch_size=27, loss=hinge, metrics=metrics, output_dir=tmp_path, options=SMALL
    )
    rows = read_rows(tmp_path / "metrics.csv")
    rewards = RunFolder(tmp_path).pair_rewards()
    median = float(np.median([pair.chosen - pair.rejected for pair in rewards]))
    assert result.own_metrics == {"median_margin": pytest.approx(median)}
    assert float(rows[-1]["eval_median_margin"]) == pytest.approx(median)
    means = np.mean([max(0.0, 1 - pair.chosen + pair.rejected) for pair in rewards])
    assert float(rows[-1]["eval_loss"]) == pytest.approx(means, rel=1e-5)
    assert RunFolder(tmp_path).options["loss"]["name"] == "hinge"
    assert RunResult.from_json(result.to_json()).own_metrics == result.own_metrics


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda c, r, margin, label: (c - r).mean(), "one number a pair, of shape"),
        (lambda c, r, margin, label: (c - r) - (c - r).mean(), "must not depend on the other pairs"),
        (lambda c, r, margin, label: -torch.log(torch.sigmoid(c - r)), "finite at margins of 10,000"),
        (lambda c, r, margin, label: torch.nn.functional.softplus(r - c.detach()), "differentiable in both"),
    ],
)
def test_a_loss_that_would_train_wrongly_is_refused(bad: Any, message: str):
    with pytest.raises(ConfigError, match=f"the loss 'bad' .*{message}"):
        register_loss("bad")(bad)
    assert "bad" not in LOSSES


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"epoch": 3}, TypeError, "unknown argument of train_reward_model 'epoch'; did you mean 'epochs'"),
        ({"optimizer": "moun"}, ConfigError, "unknown optimizer 'moun'; did you mean 'muon'"),
        ({"options": {"optimizer.lrr": 1.0}}, ConfigError, "did you mean 'optimizer.lr'"),
        ({"data_path": "prefs.parquet"}, DataError, "prefs.parquet: no such file"),
        ({"data_path": 7}, TypeError, "must be a list, tuple, generator, array or column, got int"),
        ({"val": ROWS}, ConfigError, "data_path must give the training pairs, got None"),
        ({"model_name": 3}, TypeError, "model_name must be a preset, a hub id or a path, got int"),
        ({"loss": "hinch"}, ConfigError, "unknown loss 'hinch'"),
        ({"metrics": {"accuracy": len}}, ConfigError, "metrics need new names .* got 'accuracy'"),
        ({"loss": hinge, "options": {"loss.label_smoothing": 0.1}}, ConfigError, "only while loss.name is null"),
        ({"options": {"hardware.devices": 2}}, ConfigError, "needs output_dir=FOLDER"),
    ],
)
def test_a_wrong_call_is_one_sentence(
    given: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        train_reward_model(**given)


def test_runs_without_a_folder_get_one_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    options = {**SMALL, "training.max_steps": 1}
    folders = {train_reward_model(data_path=ROWS, batch_size=54, options=options).run_dir for _ in range(2)}
    assert len(folders) == 2
    assert all(folder.startswith("outputs/train/") for folder in folders)
