"""The numbers of a step: precision of the update, labels, pair weights, and what happens when they end."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rm_optimizer import evaluate_checkpoint, train_reward_model
from rm_optimizer.core.data_loader import load_training_data
from rm_optimizer.errors import TrainingDiverged
from rm_optimizer.optim import OPTIMIZERS, build_optimizer, build_schedule, set_train_mode
from rm_optimizer.records.run_folder import RunFolder, read_rows
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.optimizers import OptimizerConfig
from rm_optimizer.training.callbacks.checkpoints import checkpoint_path
from rm_optimizer.training.fitting import build_trainer
from rm_optimizer.training.lightning_module import RunModule
from rm_optimizer.training.preparation import Run
from rm_optimizer.training.stopping import last_good_checkpoint
from tests.builders import prepared_run

Build = Callable[..., TrainConfig]
STEPS = 2


@pytest.fixture(scope="module")
def prepared(small_config: Build, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("mixed")
    return prepared_run(small_config(folder, "hardware.precision=bf16-mixed", "schedule=constant"))


def optimizer_options(name: str) -> OptimizerConfig:
    overrides = [f"optimizer={name}", "model.adamw_lr=1e-3", "schedule=constant", "output_dir=unused"]
    return typed(compose(overrides), TrainConfig).optimizer


def recorded_fit(run: Run, options: OptimizerConfig) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Weights after some steps under bf16-mixed, and the gradients of every call of the closure."""
    old = run.module
    module = RunModule(deepcopy(old.model), replace(run.config, optimizer=options), run.datamodule)
    module.num_steps = STEPS
    gradients: list[dict[str, Tensor]] = []
    clip = module._clip

    def keep() -> Tensor:
        norm = clip()
        gradients.append({n: p.grad.clone() for n, p in module.model.named_parameters() if p.grad is not None})
        return norm

    module._clip = keep  # type: ignore[method-assign]
    trainer = build_trainer(run.config.hardware, [], [], STEPS)
    trainer.fit(module, datamodule=run.datamodule)
    return [p.detach().clone() for p in module.model.parameters()], gradients


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_update_of_every_optimizer_is_made_in_float32_under_bf16_mixed(prepared: Run, name: str):
    if OPTIMIZERS[name].extra == "optimizers":
        pytest.importorskip("pytorch_optimizer", reason="the optimizers extra is not installed")
    options = optimizer_options(name)
    model = deepcopy(prepared.module.model)
    found, gradients = recorded_fit(prepared, options)
    replay = iter(gradients)

    def closure() -> float:
        for (_, p), g in zip(model.named_parameters(), next(replay).values(), strict=True):
            p.grad = g
        return 0.0

    optimizer = build_optimizer(model, options, head_names=model.head_parameter_names(), num_steps=STEPS)
    schedule = build_schedule(optimizer, prepared.config.schedule, STEPS)
    set_train_mode(optimizer, True)
    for _ in range(STEPS):
        optimizer.step(closure)
        schedule.step()
    assert next(replay, None) is None
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), found, strict=True))


def rows(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    base = [{"prompt": f"Say {i}", "chosen": f"{i} it is, surely", "rejected": f"no {i}"} for i in range(len(changes))]
    return [row | change for row, change in zip(base, changes, strict=True)]


def write(path: Path, content: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


@pytest.fixture
def first_step(small_config: Build, tmp_path: Path) -> Callable[..., dict[str, float]]:
    val = write(tmp_path / "val.jsonl", [{"prompt": f"Ask {i}", "chosen": "yes", "rejected": "no"} for i in range(4)])

    def metrics(content: list[dict[str, Any]], *options: str) -> dict[str, float]:
        train = write(tmp_path / "train.jsonl", content)
        data = [f"data.train={train}", f"data.val={val}", "training.eval_at_start=false", "training.max_steps=1"]
        config = small_config(tmp_path / "run", *data, *options)
        run = prepared_run(config)
        build_trainer(config.hardware, [], [], 1).fit(run.module, datamodule=run.datamodule)
        return run.module.step_metrics

    return metrics


def test_training_accuracy_reads_the_labels(first_step: Callable[..., dict[str, float]]):
    plain = first_step(rows(*[{}] * 8))
    flipped = first_step(rows(*[{"label": 0.0}] * 8))
    assert flipped["train/accuracy"] == pytest.approx(1 - plain["train/accuracy"])
    assert flipped["train/mean_margin"] == pytest.approx(-plain["train/mean_margin"])
    one, other, tied = (
        first_step(rows(*[{}] * 4, *[{"label": label}] * 4))["train/accuracy"] for label in (1.0, 0.0, 0.5)
    )
    assert tied == pytest.approx(one + other - 0.5)  # the first half alone


def test_a_pair_s_weight_counts_the_same_at_every_batch_size(small_config: Build, tmp_path: Path):
    train = write(tmp_path / "train.jsonl", rows(*[{"weight": 1.0 + 9.0 * (i % 4 == 0)} for i in range(12)]))
    found = {}
    for size in (1, 3, 12):
        config = small_config(tmp_path, f"data.train={train}", "data.val_fraction=0.3", f"batching.batch_size={size}")
        config.data.val = None
        run = prepared_run(config)
        shares: dict[int, float] = {}
        for batch in run.datamodule.steps(0, run.datamodule.steps_per_epoch):
            for micro in batch.micro:
                pairs = zip(micro.pair_index.tolist(), micro.weight.tolist(), strict=True)
                shares |= {pair: weight / batch.total_weight * len(batch.pair_index) for pair, weight in pairs}
        found[size] = shares
    for size in (1, 3):
        assert found[size] == pytest.approx(found[12])
    assert max(found[1].values()) == pytest.approx(10 * min(found[1].values()))


def test_weights_that_are_all_alike_change_nothing(first_step: Callable[..., dict[str, float]]):
    plain, heavy = first_step(rows(*[{}] * 8)), first_step(rows(*[{"weight": 4.0}] * 8))
    assert heavy == pytest.approx(plain)


@pytest.mark.parametrize("options", [[], ["optimizer=schedulefree", "schedule=constant"]])
def test_divergence_that_an_evaluation_meets_names_step_and_good_checkpoint(
    small_config: Build, tmp_path: Path, options: list[str]
):
    run = ["optimizer.lr=1e30", "training.gradient_clip_norm=0", "training.max_steps=1", *options]
    with pytest.raises(TrainingDiverged, match=r"in the evaluation after step 1 on pairs .*best\.ckpt; lower optimiz"):
        train_reward_model(small_config(tmp_path, *run))


def test_divergence_of_the_exported_weights_is_no_traceback(small_config: Build, tmp_path: Path):
    run = prepared_run(small_config(tmp_path, "training.max_steps=1"))
    rewards = run.datamodule.score_validation(run.module.model)
    from rm_optimizer.training.stopping import require_finite

    broken = dataclasses.replace(rewards, chosen=rewards.chosen * math.nan)
    with pytest.raises(TrainingDiverged, match=r"reward became nan .* after step 4 .* checkpoint does not exist"):
        require_finite(broken, run.datamodule.data.val, tmp_path, 4)


def test_a_checkpoint_of_the_weights_that_diverged_is_not_called_good(small_config: Build, tmp_path: Path):
    options = ["optimizer.lr=1e30", "training.gradient_clip_norm=0", "training.max_steps=9"]
    every = ["training.checkpoint_every=1", "training.evals_per_epoch=1", "data.synthetic.num_train=160"]
    with pytest.raises(TrainingDiverged) as caught:
        train_reward_model(small_config(tmp_path, *options, *every))
    assert (tmp_path / "checkpoints" / "step-00000001.ckpt").exists()
    assert "the last good checkpoint is" in str(caught.value)
    assert "best.ckpt" in str(caught.value)
    assert RunFolder(tmp_path).divergence == str(caught.value)
    train_reward_model(small_config(tmp_path, "training.max_steps=1", "resume=restart"))
    assert RunFolder(tmp_path).divergence is None


def test_the_last_good_checkpoint_is_older_than_the_bad_step(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    assert last_good_checkpoint(tmp_path, 9) is None
    for name in ("best", "step-00000002", "step-00000004"):
        (tmp_path / "checkpoints" / f"{name}.ckpt").touch()
    found = [last_good_checkpoint(tmp_path, step) for step in (5, 4, 2)]
    assert [path.stem for path in found if path] == ["step-00000004", "step-00000002", "best"]


def test_training_accuracy_of_ties_alone_is_written_as_none(small_config: Build, tmp_path: Path):
    train = write(tmp_path / "train.jsonl", rows(*[{"label": 0.5}] * 8))
    train_reward_model(small_config(tmp_path / "run", f"data.train={train}", "data.val_fraction=0.3"))
    cells = [row["train_acc"] for row in read_rows(tmp_path / "run" / "metrics.csv") if row["train_loss"]]
    assert set(cells) == {"nan"}


@pytest.mark.parametrize("options", [[], ["optimizer=schedulefree", "schedule=constant"]])
def test_a_periodic_checkpoint_scores_as_its_evaluation_logged(small_config: Build, tmp_path: Path, options: list[str]):
    config = small_config(tmp_path, "training.max_steps=6", *options)
    train_reward_model(config)
    logged = {int(row["step"]): row["eval_nll"] for row in read_rows(tmp_path / "metrics.csv") if row["eval_nll"]}
    val = load_training_data(config.data).val
    for step in (3, 6):
        found = evaluate_checkpoint(
            str(checkpoint_path(tmp_path, step)),
            val,
            output_dir=tmp_path / "again",
            token_budget=config.batching.eval_token_budget,
            num_bootstrap=0,
            seed=0,
        )
        assert found.metrics.nll.value == pytest.approx(float(logged[step]), abs=1e-6)
