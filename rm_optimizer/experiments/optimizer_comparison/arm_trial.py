"""Trial of a comparison: training of an arm with one seed, its record, and scoring of its last weights."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from rm_optimizer.core.model.identity import weights_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import MacroBatch
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.evaluation.pair_rewards import metrics_of, score_pairs
from rm_optimizer.experiments.cost import StepClock
from rm_optimizer.experiments.optimizer_comparison import setting
from rm_optimizer.experiments.study import PlannedTrial, planned_trial
from rm_optimizer.experiments.training_trials import RUN, config_of, logged_in_study
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.optim.mechanism import StartingPoint, check_mechanism, mechanism_state
from rm_optimizer.records.accelerator import fastest_device, memory_module
from rm_optimizer.records.files import replacing, write_text
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.records.run_options import decisive_options, options_of
from rm_optimizer.schema import DataConfig, TrainConfig
from rm_optimizer.schema.landscape import SpectrumOptions
from rm_optimizer.training.callbacks.checkpoints import checkpoint_path
from rm_optimizer.training.callbacks.evaluation import evaluation_of
from rm_optimizer.training.callbacks.memory_profile import rss_bytes
from rm_optimizer.training.lightning_module import RunModule
from rm_optimizer.training.run import run_training

TASK = "rm_optimizer.experiments.optimizer_comparison.arm_trial:train_and_judge"
CURVATURE = SpectrumOptions(which="largest", tolerance=0.02, max_products=30, num_probes=16)
"""Tolerance of the top eigenvalue, and number of products for the trace."""
_SCORES = ("accuracy", "nll", "brier", "ece", "mean_margin", "longer_wins", "over_length")
_SPREADS = ("margin_std", "tie_rate", "reward_mean", "reward_std", "ece_noise_floor")
WARM_UP = 2
"""Number of first steps that are not timed."""


class ArmRecorder(StepClock):
    """Callback that records a run without changing it, and refuses an optimizer whose first step breaks its rule.

    Args:
        optimizer: name of the optimizer in the registry.

    Attributes:
        initial: digest of the weights before the first step.
        points: evaluations in order.
    """

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self._optimizer, self.initial = optimizer, ""
        self._before: StartingPoint | None = None
        self.points: list[setting.CurvePoint] = []
        self._order = hashlib.sha256()
        self._tokens = self._peak = self._clipped = self._state_bytes = self._passes = 0

    @property
    def values(self) -> dict[str, float | int | str | None]:
        """Recorded numbers of the run."""
        timed = self.steps[WARM_UP:] or self.steps
        return {
            "initial": self.initial,
            "order": self._order.hexdigest()[:16],
            "tokens": self._tokens,
            "step_seconds": median(timed),
            "train_seconds": sum(self.steps),
            "passes_per_step": self._passes / len(self.steps),
            "clipped_share": self._clipped / len(self.steps),
            "state_bytes": self._state_bytes,
            "peak_memory_bytes": self._peak,
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compute the digest of the weights before training."""
        assert isinstance(pl_module, RunModule)
        self.initial = weights_digest(pl_module.model)
        module = memory_module(pl_module.device)
        if module is not None:
            module.reset_peak_memory_stats(pl_module.device)

    def on_train_batch_start(self, trainer: pl.Trainer, *given: Any) -> None:
        """Copy the weights before the first step, and start timing the step."""
        if not self.steps:
            self._before = mechanism_state(trainer.optimizers[0])
        super().on_train_batch_start(trainer, *given)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step, and the evaluation if there was one."""
        assert isinstance(pl_module, RunModule)
        assert isinstance(batch, MacroBatch)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        # A fixed byte order, so that runs on different machines have comparable digests.
        self._order.update(np.ascontiguousarray(batch.pair_index, dtype="<i8").tobytes())
        self._tokens += sum(micro.num_tokens for micro in batch.micro)
        limit = pl_module.gradient_clip_norm or float("inf")
        self._clipped += pl_module.step_metrics["train/grad_norm"] > limit
        self._passes = pl_module.passes_made
        # Without a GPU this is the present resident memory, of which the largest is kept.
        module = memory_module(pl_module.device)
        memory = rss_bytes()[0] if module is None else module.max_memory_allocated(pl_module.device)
        self._peak = max(self._peak, memory)
        if self._before is not None:
            check_mechanism(trainer.optimizers[0], self._optimizer, self._before, passes=self._passes)
            self._before = None
            tensors = (value for state in trainer.optimizers[0].state.values() for value in state.values())
            self._state_bytes = sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))
        step = trainer.global_step
        if (metrics := evaluation_of(trainer).metrics_at(step)) is not None:
            scores = {"nll": metrics.nll.value, "accuracy": metrics.accuracy.value}
            self.points.append(setting.CurvePoint(step=step, tokens=self._tokens, seconds=sum(self.steps), **scores))


def arm_trial(
    frozen: setting.Frozen, folder: Path, stage: str, arm: str, rate: float, seed: int, *, adamw_lr: float | None
) -> PlannedTrial:
    """A trial of a comparison.

    Its name depends on the contents of files, not on their paths.

    Args:
        frozen: the comparison's setting.
        folder: the comparison's folder.
        stage: `TUNE` or `FINAL`.
        arm: the optimizer.
        rate: its learning rate.
        seed: seed of head, data order and dropout.
        adamw_lr: learning rate of the AdamW part of an optimizer that has one; None means the preset's.
    """
    shared = frozen.options.config(arm)
    train, val = (str(setting.pairs_file(folder.resolve(), part)) for part in ("train", "val"))
    half: dict[str, Any] = {} if adamw_lr is None else {"adamw_lr": adamw_lr}
    training = replace(
        shared.training,
        max_steps=frozen.steps,
        checkpoint_every=frozen.steps,
        keep_checkpoints=1,
        evals_per_epoch=1 if stage == setting.TUNE else shared.training.evals_per_epoch,
        eval_at_start=False,
        num_bootstrap=100,
        progress=False,
    )
    config = replace(
        shared,
        seed=seed,
        data=DataConfig(train=train, val=val),
        optimizer=replace(shared.optimizer, lr=rate, **half),
        training=training,
        logger=replace(shared.logger, tensorboard=False, log_model=False),  # the weights are removed
    )
    options = options_of(config)
    known = decisive_options(options, "data")
    curvature = frozen.options.curvature_pairs if stage == setting.FINAL else 0
    identity = {"frozen": frozen.digest, "stage": stage, "options": known, "curvature_pairs": curvature}
    scored = ("val", "test") if stage == setting.FINAL else ("val",)
    files = {part: str(setting.pairs_file(folder.resolve(), part)) for part in scored}
    spec = {"arm": arm, "stage": stage, "rate": rate, "options": options, "scored": files, "curvature_pairs": curvature}
    return planned_trial(f"{stage} {arm}, lr {rate:g}, seed {seed}", spec, identity)


def train_and_judge(spec: Mapping[str, Any], folder: Path) -> dict[str, float | int | str | None]:
    """Train from the start, score the last weights, and remove them.

    Files of an earlier attempt are not used.

    Args:
        spec: `options` of the run, files of the pairs that are `scored`, and `curvature_pairs`.
        folder: folder of the trial's work; the run folder is its `run/`.

    Returns:
        Scores on each file of pairs; time, tokens, memory and passes of the training; and digests of the weights before
        the first step and of the order of the pairs.
    """
    run_dir, config = folder / RUN.name, config_of(spec["options"])
    recorder = ArmRecorder(config.optimizer.name)
    shutil.rmtree(run_dir, ignore_errors=True)
    logger = logged_in_study(config.logger, folder)
    result = run_training(replace(config, output_dir=str(run_dir), logger=logger), callbacks=[recorder])
    write_text(folder / setting.CURVE_FILE, setting.LearningCurve(points=tuple(recorder.points)).to_json() + "\n")
    model = BradleyTerryRM.from_pretrained(
        checkpoint_path(run_dir, result.steps),
        max_length=config.model.max_length,
        attn_implementation=config.model.attn_implementation.value,
    )
    model.to(fastest_device())
    found = recorder.values | {
        "arm": spec["arm"],
        "stage": spec["stage"],
        "rate": spec["rate"],
        "seed": result.seed,
        "steps": result.steps,
        "parameters": result.parameters,
        "train_fingerprint": result.data.train_fingerprint,
    }
    margins = {}
    for name, path in spec["scored"].items():
        data = PreferenceDataset(path)
        tokens, budget = tokenize_pairs(data.pairs, model.renderer, None), config.batching.eval_token_budget
        # In the run's precision.
        with torch.autocast(model.device.type, torch.bfloat16, enabled=config.hardware.precision == "bf16-mixed"):
            rewards = score_pairs(model, tokens, data, token_budget=budget, prefix_sharing=False)
        margins[name] = config.loss.beta * rewards.margin
        metrics = metrics_of(rewards, data, beta=config.loss.beta, num_bootstrap=0, seed=0)
        values = {score: getattr(metrics, score).value for score in _SCORES}
        values |= {score: getattr(metrics, score) for score in _SPREADS}
        values["temperature"] = metrics.temperature.temperature
        found |= {f"{name}_{score}": value for score, value in values.items()}
    if spec["curvature_pairs"]:
        found |= _curvature(config, model, spec["curvature_pairs"])
    with replacing(folder / setting.MARGINS_FILE) as temporary, temporary.open("wb") as file:
        np.savez(file, **margins)  # type: ignore[arg-type]
    for kept in ("checkpoints", BEST_FOLDER):
        shutil.rmtree(run_dir / kept)
    return found


def _curvature(config: TrainConfig, model: BradleyTerryRM, num_pairs: int) -> dict[str, float | int | None]:
    """Top eigenvalue and trace of the Hessian at the weights, on training pairs that are the same for every arm."""
    data = PreferenceDataset(config.data.train)
    analyzer = HessianAnalyzer(model, loss=config.loss, token_budget=config.batching.micro_token_budget, seed=0)
    spectrum = analyzer.compute_spectrum(data.pairs, top_k=1, num_pairs=num_pairs, options=CURVATURE, progress=False)
    assert spectrum.trace is not None, "it was asked for"
    return {
        "top_eigenvalue": spectrum.eigenvalues[0],
        "top_eigenvalue_residual": spectrum.residuals[0],
        "trace": spectrum.trace.value,
        "trace_standard_error": spectrum.trace.standard_error,
        "curvature_pairs": spectrum.num_pairs,
    }
