"""Chapters 9 and 11 of the tutorial: training by one call, with pairs in memory, a loss and metrics of one's own."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor

from rm_optimizer import BaseRewardModel, BradleyTerryRM, create_dataloader, evaluate_checkpoint, evaluate_model
from rm_optimizer.core.model.losses import LOSSES, register_loss
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.core.tokens.splits import TrainVal
from rm_optimizer.errors import CheckpointError, ConfigError, DataError
from rm_optimizer.records.run_folder import RunFolder, read_rows
from rm_optimizer.schema import compose, typed
from rm_optimizer.schema.config import TrainConfig
from rm_optimizer.training import RewardModelLightning, RunResult, train_reward_model
from rm_optimizer.training.fitting import build_trainer, quiet_libraries
from tests.builders import prepared_run
from tests.training.conftest import small_config as small_config

pytestmark = pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning")
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
    assert lines[:3] == [
        "RunResult",
        "  run: tiny, muon, seed 0, finished after step 8",
        "  pairs: 54 to train, 6 to validate",
    ]
    assert f"  accuracy: {trained.metrics.accuracy}" in lines
    assert len(lines) <= 12


@pytest.mark.parametrize(
    "form", [pd.DataFrame, list, lambda rows: TrainVal(*PreferenceDataset(rows).split_by_prompt(0.1, 0))]
)
def test_pairs_in_memory_train_as_those_of_a_file(form: Any, trained: RunResult, tmp_path: Path):
    options = {**SMALL, "data.split_seed": 0}
    again = train_reward_model("tiny", "muon", form(ROWS), 2, 16, output_dir=tmp_path, options=options)
    assert again.metrics == trained.metrics
    assert again.data.val_fingerprint == trained.data.val_fingerprint


def test_a_saved_model_is_evaluated_on_pairs_in_any_form(trained: RunResult, tmp_path: Path):
    path = Path(trained.run_dir).parent / "preferences.parquet"
    found = [evaluate_checkpoint(trained, data) for data in (path, pd.DataFrame(ROWS), ROWS)]
    found.append(evaluate_model(BradleyTerryRM.from_pretrained(trained), str(path), output_dir=tmp_path))
    assert len({evaluation.metrics.nll for evaluation in found}) == 1
    assert found[0].trained_on is not None
    assert found[0].trained_on.num_pairs == 54
    assert found[-1].trained_on is None
    assert (tmp_path / "metrics.json").is_file()


def test_composed_options_train_the_same(trained: RunResult, tmp_path: Path):
    given = RunFolder(Path(trained.run_dir)).options
    lines = [f"{name}={str(value).lower()}" for name, value in SMALL.items()]
    lines += ["optimizer=muon", "training.epochs=2", "batching.batch_size=16", f"output_dir={tmp_path}"]
    config = typed(compose([*lines, f"data.train={given['data']['train']}"]), TrainConfig)
    assert train_reward_model(config).metrics == trained.metrics
    with pytest.raises(TypeError, match="the composed options hold every option"):
        train_reward_model(config, epochs=3)
    with pytest.raises(TypeError, match="unknown argument of train_reward_model 'data'; did you mean 'data_path'"):
        train_reward_model(config, data=ROWS)
    config.data.train, config.output_dir = None, str(tmp_path / "memory")
    assert train_reward_model(config, data_path=ROWS).metrics == trained.metrics


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


def margin_hinge(z: Tensor) -> Tensor:
    return torch.relu(1 - z)


@pytest.mark.parametrize("given", [hinge, "tests.tutorial.test_training:margin_hinge"])
def test_a_loss_and_metrics_of_ones_own(tmp_path: Path, given: Any):
    metrics = {"median_margin": lambda chosen, rejected: float(np.median(chosen - rejected))}
    result = train_reward_model(
        data_path=ROWS, batch_size=27, loss=given, metrics=metrics, output_dir=tmp_path, options=SMALL
    )
    rows = read_rows(tmp_path / "metrics.csv")
    rewards = RunFolder(tmp_path).pair_rewards()
    median = float(np.median([pair.chosen - pair.rejected for pair in rewards]))
    assert result.own_metrics == {"median_margin": pytest.approx(median)}
    assert float(rows[-1]["eval_median_margin"]) == pytest.approx(median)
    means = np.mean([max(0.0, 1 - pair.chosen + pair.rejected) for pair in rewards])
    assert float(rows[-1]["eval_loss"]) == pytest.approx(means, rel=1e-5)
    assert RunFolder(tmp_path).options["loss"]["name"] in ("hinge", given)
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
        (
            {"model_name": "tinny", "data_path": ROWS},
            CheckpointError,
            "tinny cannot .*; did you mean tiny, a",
        ),
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


def tensors_of(model: BradleyTerryRM, rows: list[dict[str, str]], **values: float) -> list[dict[str, Tensor]]:
    """Items of a data set as the tutorial makes them, all padded to one width."""
    items = []
    for row in rows:
        item = {}
        for side in ("chosen", "rejected"):
            tokens = model.tokenize(row["prompt"], row[side])
            for name, tensor in tokens.items():
                item[f"{side}_{name}"] = torch.nn.functional.pad(tensor[0], (0, 64 - tensor.shape[1]))
        items.append(item | {name: torch.tensor(value) for name, value in values.items()})
    return items


def plain_trainer(**options: Any) -> pl.Trainer:
    quiet_libraries()
    shared = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(**{"enable_checkpointing": False, **shared, **options})


# Micro-batches add up in another order. Muon iterates in bfloat16: six steps of up to 1.6e-3, by two units of 2**-8.
@pytest.mark.parametrize(
    ("optimizer", "rounding"), [("adamw", 2e-6), ("muon", 12 * 1.6e-3 * 2**-8), ("schedulefree", 2e-6)]
)
def test_a_plain_trainer_takes_the_steps_of_a_run(optimizer: str, rounding: float, small_config: Any, tmp_path: Path):
    run = prepared_run(small_config(tmp_path, f"optimizer={optimizer}", "optimizer.lr=1e-3"))
    mine = deepcopy(run.module.model)
    module = RewardModelLightning(mine, 1e-3, optimizer, schedule=run.module.schedule_config)
    module.optimizer_config = run.module.optimizer_config
    batches = torch.utils.data.DataLoader(list(run.datamodule.steps(0, 6)), batch_size=None)
    plain_trainer(max_epochs=1, gradient_clip_val=1.0).fit(module, batches)
    trainer = build_trainer(run.config.hardware, [], [], 6)
    trainer.fit(run.module, datamodule=run.datamodule)
    for ours, runs in zip(mine.parameters(), run.module.model.parameters(), strict=True):
        torch.testing.assert_close(ours, runs, rtol=0, atol=rounding)


@pytest.mark.parametrize("budget", [None, 200])
def test_loaders_of_the_package_train_as_plain_ones(budget: int | None, trained: RunResult):
    path, weights = Path(trained.run_dir).parent / "preferences.parquet", []
    for form in ("loader", "plain"):
        model = BradleyTerryRM.from_pretrained(trained)
        loader: Any = create_dataloader(path, model.tokenizer, 16, shuffle=False, micro_token_budget=budget)
        if form == "plain":
            data = PreferenceDataset(path, model.tokenizer, 64)
            loader = torch.utils.data.DataLoader(data, batch_size=16)
        trainer = plain_trainer(max_epochs=1, gradient_clip_val=1.0)
        trainer.fit(RewardModelLightning(model, 1e-3), loader, loader)
        weights.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*weights, rtol=0, atol=2e-6)


def test_lightnings_callbacks_follow_the_validation(trained: RunResult, tmp_path: Path):
    model = BradleyTerryRM.from_pretrained(trained)
    items = tensors_of(model, ROWS)
    loader = torch.utils.data.DataLoader(items[:48], batch_size=16, shuffle=True)
    val = torch.utils.data.DataLoader(items[48:], batch_size=5)
    saved = ModelCheckpoint(tmp_path / "best", monitor="val/accuracy", mode="max")
    callbacks = [saved, EarlyStopping("val/accuracy", patience=3, mode="max"), LearningRateMonitor()]
    options = {"gradient_clip_val": 1.0, "logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    trainer = plain_trainer(max_epochs=2, callbacks=callbacks, enable_checkpointing=True, **options)
    trainer.fit(RewardModelLightning(model, optimizer_name="adamw"), loader, val)
    prompts, chosen, rejected = ([row[name] for row in ROWS[48:]] for name in ("prompt", "chosen", "rejected"))
    margins = (model.score(prompts, chosen) - model.score(prompts, rejected)).double()
    logged = trainer.callback_metrics
    assert float(logged["val/accuracy"]) == float((margins > 0).double().mean())
    assert float(logged["val/mean_margin"]) == pytest.approx(float(margins.mean()), rel=1e-5)
    loss = float(torch.nn.functional.softplus(-margins).mean())
    assert float(logged["val/loss"]) == pytest.approx(loss, rel=1e-5)  # 12 pairs in batches of 5, 5 and 2
    assert {"train/loss", "train/accuracy"} <= logged.keys()
    rows = [row for row in read_rows(*tmp_path.rglob("metrics.csv")) if row["lr-AdamW/pg1"]]
    rates = [float(row["lr-AdamW/pg1"]) for row in rows]
    assert rates[1] == max(rates) == pytest.approx(1e-5), "the preset's warm-up takes one of six steps"
    assert rates[-1] < 1e-6
    assert model.training
    best = BradleyTerryRM.from_pretrained(saved.best_model_path)
    assert best.score(prompts, chosen).isfinite().all()


def test_labels_and_weights_of_a_batch_count(trained: RunResult):
    model = BradleyTerryRM.from_pretrained(trained)
    module = RewardModelLightning(model)
    items = tensors_of(model, ROWS[:2], label=0.8) + tensors_of(model, ROWS[2:3], label=0.5, weight=2.0)
    items[0]["weight"] = items[1]["weight"] = torch.tensor(1.0)
    loss, sums = module._measured(torch.utils.data.default_collate(items))
    scores = [model.score(row["prompt"], [row["chosen"], row["rejected"]]) for row in ROWS[:3]]
    margins, labels = torch.stack([good - bad for good, bad in scores]), torch.tensor([0.8, 0.8, 0.5])
    losses = torch.nn.functional.binary_cross_entropy_with_logits(margins, labels, reduction="none")
    assert loss.item() == pytest.approx(float((losses * torch.tensor([1.0, 1.0, 2.0])).sum() / 4), rel=1e-5)
    assert sums[[1, 4]].tolist() == [4.0, 2.0], "a tie decides nothing"


class Bag(BaseRewardModel):
    """A model of one's own: the mean of an embedding's rewards, trained by a hinge loss."""

    def __init__(self) -> None:
        super().__init__()
        self.rewards = torch.nn.Embedding(400, 1)
        self.passes = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.passes += 1
        return (self.rewards(input_ids)[..., 0] * attention_mask).sum(1) / attention_mask.sum(1)

    def compute_loss(self, chosen_ids: Tensor, chosen_mask: Tensor, rejected_ids: Tensor, rejected_mask: Tensor) -> Any:
        return torch.relu(4 - self(chosen_ids, chosen_mask) + self(rejected_ids, rejected_mask)).mean()

    def tokenize(self, prompt: str, response: str) -> dict[str, Tensor]:
        raise NotImplementedError

    def score(self, prompts: Any, responses: Any) -> Tensor:
        raise NotImplementedError


def test_a_model_of_ones_own_trains_by_its_loss(trained: RunResult):
    items = tensors_of(BradleyTerryRM.from_pretrained(trained), ROWS)
    loader = torch.utils.data.DataLoader(items, batch_size=20)
    torch.manual_seed(0)
    module = RewardModelLightning(Bag(), 0.1, "adam")
    trainer = plain_trainer(max_epochs=8)
    trainer.fit(module, loader, loader)
    whole = torch.utils.data.default_collate(items)
    own = module.model.compute_loss(
        *(whole[f"{side}_{n}"] for side in ("chosen", "rejected") for n in ("input_ids", "attention_mask"))
    )
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(own.item(), rel=1e-5)
    assert own.item() < 3.5, "it began at 4"
    assert float(trainer.callback_metrics["val/accuracy"]) == 1
    before = module.model.passes
    loss, sums = module._measured(whole)
    assert (loss.item(), sums[2].item()) == (pytest.approx(own.item()), len(items)), "loss and correctly ranked pairs"
    assert module.model.passes == before + 2, "one pass for each side"
    labeled = torch.utils.data.default_collate([item | {"label": torch.tensor(0.5)} for item in items])
    with pytest.raises(DataError, match="compute_loss reads no labels"):
        module.training_step(labeled, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16-true", "max_epochs": 1}, "precision must be 32-true or bf16-mixed"),
        ({"max_epochs": -1}, "give pl.Trainer max_epochs or max_steps"),
    ],
)
def test_a_trainer_with_wrong_numbers_is_refused(options: dict[str, Any], message: str, trained: RunResult):
    model = BradleyTerryRM.from_pretrained(trained)
    loader = torch.utils.data.DataLoader(tensors_of(model, ROWS[:4]), batch_size=2)
    with pytest.raises(ConfigError, match=message):
        plain_trainer(**options).fit(RewardModelLightning(model), loader)
    with pytest.raises(ConfigError, match="did you mean 'muon'"):
        RewardModelLightning(model, optimizer_name="moun")
    with pytest.raises(TypeError, match=r"model must be a BradleyTerryRM, .* got Linear"):
        RewardModelLightning(torch.nn.Linear(2, 1))  # type: ignore[arg-type]


def test_runs_without_a_folder_get_one_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    options = {**SMALL, "training.max_steps": 1}
    folders = {train_reward_model(data_path=ROWS, batch_size=54, options=options).run_dir for _ in range(2)}
    assert len(folders) == 2
    assert all(folder.startswith("outputs/train/") for folder in folders)
