"""Curvature is measured on fixed pairs at the weights that evaluation sees, and changes nothing of the run."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rm_optimizer import analyze as entry
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.model.losses import bradley_terry_pair_losses
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.errors import ConfigError
from rm_optimizer.evaluation.draws import CurvatureMeasurement, MeasureCurvature
from rm_optimizer.interfaces.command_line import checked
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.measured_loss import load_measured_loss
from rm_optimizer.optim import algorithms
from rm_optimizer.records.run_folder import read_rows
from rm_optimizer.schema import LossConfig, TrainConfig
from rm_optimizer.schema.landscape import AnalyzeConfig
from rm_optimizer.train import option_callbacks
from rm_optimizer.training import lightning_module, train_reward_model
from rm_optimizer.training.callbacks import checkpoints
from rm_optimizer.training.callbacks import curvature as training_curvature
from rm_optimizer.training.callbacks import evaluation as callbacks
from rm_optimizer.training.callbacks.curvature import (
    VECTOR_TOKENS,
    HessianCallback,
    MeasurementPlan,
    costs_in_steps,
    undisturbed,
)

Build = Callable[..., TrainConfig]
WATCHED = [
    "training.hessian.every=2",
    "training.hessian.num_pairs=8",
    "model.attn_implementation=eager",
    "training.max_steps=4",
]


class PowerIteration:
    """Five Hessian-vector products by double backward; draws, sets modes and leaves gradients as a careless one would.

    Keeps what it was shown: pairs, weights and whether the model trained.
    """

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.pairs: list[list[int]] = []
        self.trained: list[bool] = []

    def __call__(self, model: BradleyTerryRM, batches: Sequence[AnyPairBatch], loss: LossConfig) -> MeasureCurvature:
        return lambda scales=None: self.measured(model, batches, loss)

    def measured(
        self, model: BradleyTerryRM, batches: Sequence[AnyPairBatch], loss: LossConfig
    ) -> CurvatureMeasurement:
        parameters = [p for p in model.parameters() if p.requires_grad]
        assert all(p.grad is None for p in parameters)
        self.weights.append(torch.cat([p.detach().flatten().clone() for p in parameters]))
        self.pairs.append(sorted(int(i) for batch in batches for i in batch.pair_index))
        self.trained.append(model.training)
        gradient = flat(torch.autograd.grad(mean_loss(model, batches, loss), parameters, create_graph=True))
        v = torch.ones_like(gradient) / len(gradient) ** 0.5
        for _ in range(5):
            product = flat(torch.autograd.grad(gradient @ v, parameters, retain_graph=True)).detach()
            eigenvalue, v = float(product @ v), product / product.norm()
        torch.randn(3), random.random(), np.random.rand()  # noqa: NPY002 (the generator of libraries)
        model.train()
        for p in parameters:
            p.grad = torch.ones_like(p)
        count = len(self.pairs[-1])
        return CurvatureMeasurement(eigenvalue, 0.1, Estimate(2 * eigenvalue, None, 3), 5, count, 1000, 6.0, 6.0)


def flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def mean_loss(model: BradleyTerryRM, batches: Sequence[AnyPairBatch], loss: LossConfig) -> Tensor:
    sums = [
        bradley_terry_pair_losses(
            *batch.split(model.rewards_of(batch)), beta=loss.beta, label_smoothing=loss.label_smoothing
        ).sum()
        for batch in batches
    ]
    return torch.stack(sums).sum() / sum(batch.num_pairs for batch in batches)


class NoisySGD(torch.optim.SGD):
    """Draws from the global generator at every step, as stochastic rounding or Langevin dynamics do."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p), alpha=1e-3)
        return loss


def other_columns(folder: Path) -> list[dict[str, str]]:
    rows = [row for row in read_rows(folder / "metrics.csv") if row["train_loss"]]
    return [{name: value for name, value in row.items() if not name.startswith("curvature")} for row in rows]


def assert_measuring_changes_nothing(small_config: Build, tmp_path: Path, options: Sequence[str]) -> PowerIteration:
    measure = PowerIteration()
    watched = small_config(tmp_path / "watched", *WATCHED, *options)
    train_reward_model(watched, callbacks=[HessianCallback(watched.training.hessian, measure)])
    train_reward_model(small_config(tmp_path / "plain", *WATCHED[2:], *options))
    assert len(measure.pairs) == 3
    assert other_columns(tmp_path / "watched") == other_columns(tmp_path / "plain")
    left, right = (tmp_path / run / "best" / "model.safetensors" for run in ("watched", "plain"))
    assert left.read_bytes() == right.read_bytes()
    return measure


def test_a_run_with_dropout_takes_the_same_steps(small_config: Build, tmp_path: Path):
    dropout = ["model.dropout=true", "+model.architecture.attention_dropout=0.1"]
    measure = assert_measuring_changes_nothing(
        small_config, tmp_path, [*dropout, "adapter=lora_r8", "adapter.dropout=0.1", "training.eval_at_start=false"]
    )
    assert measure.trained == [False] * 3
    assert all(pairs == measure.pairs[0] for pairs in measure.pairs)
    assert len(set(measure.pairs[0])) == 8


def test_an_optimizer_that_draws_takes_the_same_steps(
    small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        lightning_module, "build_optimizer", lambda model, *args, **kwargs: NoisySGD(model.parameters(), lr=0.1)
    )
    assert_measuring_changes_nothing(small_config, tmp_path, [])


def test_schedule_free_is_measured_at_its_averages(
    small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    evaluated: list[Tensor] = []
    score = callbacks.PreferenceDataModule.score_validation

    def kept(datamodule: callbacks.PreferenceDataModule, model: BradleyTerryRM, **options: Any) -> object:
        evaluated.append(flat([p.detach().clone() for p in model.parameters() if p.requires_grad]))
        return score(datamodule, model, **options)

    monkeypatch.setattr(callbacks.PreferenceDataModule, "score_validation", kept)
    options = ["optimizer=schedulefree", "schedule=constant", "training.evals_per_epoch=3"]
    measure = assert_measuring_changes_nothing(small_config, tmp_path, options)
    for seen, shown in zip(measure.weights, evaluated, strict=False):
        assert torch.equal(seen, shown)


def test_the_numbers_reach_metrics_csv_at_their_steps(small_config: Build, tmp_path: Path):
    config = small_config(tmp_path, *WATCHED)
    callback, started = HessianCallback(config.training.hessian, PowerIteration()), time.perf_counter()
    train_reward_model(config, callbacks=[callback])
    assert 0 < callback.seconds < time.perf_counter() - started
    rows = {row["step"]: row for row in read_rows(tmp_path / "metrics.csv")}
    assert [step for step, row in rows.items() if row["curvature_trace"]] == ["0", "2", "4"]
    first = rows["0"]
    assert float(first["curvature_trace"]) == 2 * float(first["curvature_top_eigenvalue"])
    assert (first["curvature_num_products"], first["curvature_trace_standard_error"]) == ("5", "nan")


@pytest.mark.parametrize(
    ("num_steps", "start", "share", "num_measurements"),
    [
        (1000, 0, (0.08, 0.09), 13),  # 12.3 and 14.7 gradients, then 6 at every 83 steps
        (10_000, 0, (0.089, 0.09), 162),
        (1000, 500, (0.065, 0.09), 5),
        (400, 0, (0.065, 0.09), 4),
        (100, 0, (0.2, 0.24), 2),  # the first and the last, more than the share
        (1, 0, (0.9, 1.0), 2),
    ],
)
def test_measurements_are_spaced_to_keep_to_a_tenth(
    num_steps: int, start: int, share: tuple[float, float], num_measurements: int
):
    plan, taken = MeasurementPlan(start, num_steps, due=start + 1), list[int]()
    for step in range(start + (start > 0), num_steps + 1):
        if step == plan.due or step == 0:
            cost = (12 + 1 / 3, 14 + 2 / 3)[len(taken)] if len(taken) < 2 else 6.0
            plan.taken(step, cost, 6.0 if taken else 4 + 2 / 3)
            taken.append(step)
    assert share[0] <= plan.spent / (plan.spent + num_steps - start) <= share[1]
    assert len(taken) == num_measurements
    assert taken[-1] == num_steps
    gaps = np.diff(taken[2:])
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_a_gradient_of_few_tokens_counts_more_for_the_work_on_vectors_beside_it():
    """With as many pairs as a step has, a measurement of 6 gradients over `VECTOR_TOKENS` tokens takes 12 steps."""
    measurement = CurvatureMeasurement(1.0, 0.1, Estimate(2.0, None, 3), 2, 32, VECTOR_TOKENS, 6.0, 4.5)
    assert costs_in_steps(measurement, 32) == (12.0, 9.0)
    assert costs_in_steps(measurement, 64) == (6.0, 4.5)
    assert costs_in_steps(replace(measurement, num_tokens=100 * VECTOR_TOKENS), 32)[0] == pytest.approx(6.06)


def test_measurements_of_a_run_without_a_number_of_steps_are_at_its_ends(small_config: Build, tmp_path: Path):
    config = small_config(tmp_path, "training.hessian.enabled=true", *WATCHED[1:])
    train_reward_model(config, callbacks=[HessianCallback(config.training.hessian, PowerIteration())])
    rows = read_rows(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows if row["curvature_trace"]] == ["0", "4"]


@pytest.mark.parametrize(("seconds", "spent", "is_said"), [(3.0, 10.0, True), (3.0, 20.0, False), (1.0, 10.0, False)])
def test_measurements_that_take_long_by_the_clock_name_the_spacing_that_does_not(
    small_config: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch, seconds, spent, is_said
):
    """100 steps in 10 s, and 4 measurements that took 30 % of it, of which a short run's first are no surprise."""
    callback = HessianCallback(small_config(tmp_path).training.hessian, PowerIteration())
    callback._plan, callback.seconds, callback.num_measured = MeasurementPlan(0, 100, spent=spent), seconds, 4
    monkeypatch.setattr(training_curvature.time, "perf_counter", lambda: callback._started + 10.0)
    caplog.set_level("INFO", logger="rm_optimizer")
    callback.on_train_end(SimpleNamespace(global_step=100), None)
    assert f"4 measurements on 0 pairs took {seconds} s, {10 * seconds:.1f} %" in caplog.text
    assert ("training.hessian.every=97 keeps to it" in caplog.text) == is_said


def test_a_resumed_run_takes_the_same_steps_and_its_measurement_begins_anew(
    small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = [*WATCHED, "model.attn_implementation=sdpa", "training.checkpoint_every=1", "model.dropout=true"]
    whole, cut = (small_config(tmp_path / run, *options) for run in ("whole", "cut"))
    train_reward_model(whole, callbacks=option_callbacks(whole))

    def dies(run_dir: Path, keep: int) -> None:
        if (run_dir / "checkpoints" / "step-00000002.ckpt").exists():
            raise MemoryError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "prune", dies)
        with pytest.raises(MemoryError):
            train_reward_model(cut, callbacks=option_callbacks(cut))
    train_reward_model(small_config(tmp_path / "cut", *options, "resume=auto"), callbacks=option_callbacks(cut))
    assert other_columns(tmp_path / "whole") == other_columns(tmp_path / "cut")
    left, right = (tmp_path / run / "best" / "model.safetensors" for run in ("whole", "cut"))
    assert left.read_bytes() == right.read_bytes()
    products = [
        {
            row["step"]: int(row["curvature_num_products"])
            for row in read_rows(folder / "metrics.csv")
            if row["curvature_trace"]
        }
        for folder in (tmp_path / "whole", tmp_path / "cut")
    ]
    assert [list(each) for each in products] == [["0", "2", "4"]] * 2
    assert products[0]["2"] == products[1]["2"]
    assert 2 <= products[0]["4"] < products[1]["4"]


def test_the_run_the_analysis_and_the_analyzer_draw_the_same_pairs(small_config: Build, tmp_path: Path):
    pairs = [PreferencePair(f"Number {i}?", f"Yes, {i}.", f"No {'no ' * (i % 5)}{i}.") for i in range(21)]
    pairs[3] = PreferencePair("Cut?", "so " * 300 + "yes", "so " * 300 + "no")  # equal after truncation
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair.to_dict()) + "\n" for pair in pairs))
    measure, data = PowerIteration(), [f"data.train={file}", f"data.val={file}", "data.allow_prompt_overlap=true"]
    config = small_config(tmp_path / "run", *WATCHED, *data, "training.max_steps=1")
    train_reward_model(config, callbacks=[HessianCallback(config.training.hessian, measure)])
    arguments = [f"checkpoint={tmp_path / 'run'}", "split=train", "landscape.num_pairs=8"]
    measured = load_measured_loss(checked(entry.read(arguments).overrides, AnalyzeConfig, name="analyze"))
    assert sorted(int(i) for batch in measured.sample.batches for i in batch.pair_index) == measure.pairs[0]
    assert any(index > 3 for index in measure.pairs[0])
    analyzer = HessianAnalyzer(measured.model, loss=measured.loss, params="head", seed=measured.sample.seed)
    with measured.measuring() as objective:
        assert analyzer.compute_spectrum(pairs, num_pairs=8, top_k=1).loss == pytest.approx(objective.value(), rel=1e-6)


@pytest.mark.parametrize("watching", [True, False])
def test_schedule_free_weights_come_back_when_looking_at_them_fails(
    small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watching: bool
):
    modes: list[bool] = []

    def fails(*args: object, **options: object) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(algorithms, "set_train_mode", lambda optimizer, mode: modes.append(mode))
    if not watching:
        monkeypatch.setattr(callbacks.PreferenceDataModule, "score_validation", fails)
    config = small_config(tmp_path, *(WATCHED if watching else WATCHED[2:]))
    seen = [HessianCallback(config.training.hessian, lambda *args: fails)] if watching else []
    with pytest.raises(MemoryError):
        train_reward_model(config, callbacks=seen)
    assert False in modes
    assert modes[-1] is True


def test_without_its_callback_the_option_is_refused(small_config: Build, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"training\.hessian needs a callback .*option_callbacks"):
        train_reward_model(small_config(tmp_path, *WATCHED))


@pytest.mark.parametrize("option", ["hardware.compile=true", "hardware.strategy=fsdp"])
def test_runs_whose_weights_cannot_be_copied_are_refused(small_config: Build, tmp_path: Path, option: str):
    config = small_config(tmp_path, *WATCHED, option)
    with pytest.raises(ConfigError, match=rf"training\.hessian cannot be combined with {option}"):
        train_reward_model(config, callbacks=option_callbacks(config))


def test_generators_gradients_and_modes_come_back_also_after_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    gradient = torch.ones(2, 2)
    model[0].weight.grad = gradient
    expected = [state() for state in (random.getstate, torch.get_rng_state)]

    def disturb_and_fail() -> None:
        with undisturbed(model):
            torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
            assert model.eval()[0].weight.grad is None
            model[0].bias.grad = torch.ones(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        disturb_and_fail()
    assert model[0].weight.grad is gradient
    assert model[0].bias.grad is None
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert random.getstate() == expected[0]
    assert torch.equal(torch.get_rng_state(), expected[1])


@pytest.mark.parametrize(
    "options",
    [pytest.param([], marks=pytest.mark.slow), ["model.dropout=true", "optimizer=schedulefree", "schedule=constant"]],
)
def test_the_command_s_own_measurement_changes_nothing_either(small_config: Build, tmp_path: Path, options: list[str]):
    watched = small_config(tmp_path / "watched", *WATCHED, "model.attn_implementation=sdpa", *options)
    train_reward_model(watched, callbacks=option_callbacks(watched))
    train_reward_model(small_config(tmp_path / "plain", "model.attn_implementation=sdpa", *WATCHED[3:], *options))
    assert other_columns(tmp_path / "watched") == other_columns(tmp_path / "plain")
    left, right = (tmp_path / run / "best" / "model.safetensors" for run in ("watched", "plain"))
    assert left.read_bytes() == right.read_bytes()
    measured = [row for row in read_rows(tmp_path / "watched" / "metrics.csv") if row["curvature_trace"]]
    assert [row["step"] for row in measured] == ["0", "2", "4"]
    assert all(math.isfinite(float(row["curvature_top_eigenvalue"])) for row in measured)
    preconditioned = [float(row["curvature_preconditioned_sharpness"]) for row in measured]
    assert [math.isfinite(sharpness) for sharpness in preconditioned] == [False, True, True]
