"""Trial of a comparison: training of an arm with one seed, and scoring of its last weights."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.dataset import PreferenceDataset
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.evaluation.pair_rewards import PairRewards, metrics_of, score_pairs
from rm_optimizer.experiments.optimizer_comparison.frozen import Frozen, pairs_file
from rm_optimizer.experiments.optimizer_comparison.recorder import ArmRecorder, LearningCurve
from rm_optimizer.experiments.study import PlannedTrial, planned_trial
from rm_optimizer.experiments.training_trials import RUN, config_of, logged_in_study
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.solve import SpectrumOptions
from rm_optimizer.optim.registry import OPTIMIZERS
from rm_optimizer.records.files import replacing, write_text
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.records.run_options import FREE, flat, is_among, options_of
from rm_optimizer.schema import DataConfig, TrainConfig
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.folder.checkpoints import checkpoint_path

TASK = "rm_optimizer.experiments.optimizer_comparison.arm_trial:train_and_judge"
TUNE, FINAL = "tune", "final"
MARGINS_FILE, CURVE_FILE = "margins.npz", "curve.json"
"""Files in a trial's work folder: margins on the validation and test pairs, and the learning curve."""
CURVATURE = SpectrumOptions(which="largest", tolerance=0.02, max_products=30, trace_products=16)
"""Tolerance of the top eigenvalue, and number of products for the trace."""
_SCORES = ("accuracy", "nll", "brier", "ece", "mean_margin", "longer_wins", "over_length")
_SPREADS = ("margin_std", "tie_rate", "reward_mean", "reward_std", "ece_noise_floor")


def arm_trial(
    frozen: Frozen, folder: Path, stage: str, arm: str, rate: float, seed: int, *, beside: float | None
) -> PlannedTrial:
    """A trial of a comparison; its name depends on the contents of files, not on their paths.

    Args:
        frozen: the comparison's setting.
        folder: the comparison's folder.
        stage: `TUNE` or `FINAL`.
        arm: the optimizer.
        rate: its learning rate.
        seed: seed of head, data order and dropout.
        beside: learning rate of the AdamW part of an optimizer that has one; None means the preset's.
    """
    shared = frozen.options.config(arm)
    train, val = (str(pairs_file(folder.resolve(), part)) for part in ("train", "val"))
    half: dict[str, Any] = {} if beside is None else {"adamw_lr": beside}
    training = replace(
        shared.training,
        max_steps=frozen.steps,
        checkpoint_every=frozen.steps,
        keep_checkpoints=1,
        evals_per_epoch=1 if stage == TUNE else shared.training.evals_per_epoch,
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
    known = {name: value for name, value in flat(options) if not is_among(name, (*FREE, "data"))}
    curvature = frozen.options.curvature_pairs if stage == FINAL else 0
    identity = {"frozen": frozen.digest, "stage": stage, "options": known, "curvature_pairs": curvature}
    files = {part: str(pairs_file(folder.resolve(), part)) for part in ("val", "test")[: 2 if stage == FINAL else 1]}
    spec = {"arm": arm, "stage": stage, "rate": rate, "options": options, "scored": files, "curvature_pairs": curvature}
    return planned_trial(f"{stage} {arm}, lr {rate:g}, seed {seed}", spec, identity)


def takes_adamw_rate(arm: str) -> bool:
    """True for an optimizer with an AdamW part, which gets the learning rate that tuning chose for AdamW."""
    return OPTIMIZERS[arm].name == "muon"


def train_and_judge(spec: Mapping[str, Any], folder: Path) -> dict[str, float | int | str | None]:
    """Train from the start, score the last weights, and remove them; files of an earlier attempt are not used.

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
    result = train_reward_model(replace(config, output_dir=str(run_dir), logger=logger), callbacks=[recorder])
    write_text(folder / CURVE_FILE, LearningCurve(points=tuple(recorder.points)).to_json() + "\n")
    model = BradleyTerryRM.from_pretrained(
        checkpoint_path(run_dir, result.steps),
        max_length=config.model.max_length,
        attn_implementation=config.model.attn_implementation.value,
    )
    model.to("cuda" if torch.cuda.is_available() else "cpu")
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
        data = PreferenceDataset.load(path)
        rewards = scored(config, model, data)
        margins[name] = config.loss.beta * rewards.margin
        found |= {f"{name}_{score}": value for score, value in _scores(config, rewards, data).items()}
    if spec["curvature_pairs"]:
        found |= _curvature(config, model, spec["curvature_pairs"])
    with replacing(folder / MARGINS_FILE) as temporary, temporary.open("wb") as file:
        np.savez(file, **margins)  # type: ignore[arg-type]
    for kept in ("checkpoints", BEST_FOLDER):
        shutil.rmtree(run_dir / kept)
    return found


def scored(config: TrainConfig, model: BradleyTerryRM, data: PreferenceDataset) -> PairRewards:
    """Rewards of all pairs, computed in the run's precision."""
    half = config.hardware.precision == "bf16-mixed"
    with torch.autocast(model.device.type, torch.bfloat16) if half else contextlib.nullcontext():
        tokens = tokenize_pairs(data.pairs, model.renderer, None)
        return score_pairs(model, tokens, data, token_budget=config.batching.eval_token_budget, prefix_sharing=False)


def _scores(config: TrainConfig, rewards: PairRewards, data: PreferenceDataset) -> dict[str, float | None]:
    metrics = metrics_of(rewards, data, beta=config.loss.beta, num_bootstrap=0, seed=0)
    values = {name: getattr(metrics, name).value for name in _SCORES}
    return (
        values | {name: getattr(metrics, name) for name in _SPREADS} | {"temperature": metrics.temperature.temperature}
    )


def _curvature(config: TrainConfig, model: BradleyTerryRM, num_pairs: int) -> dict[str, float | int | None]:
    """Top eigenvalue and trace of the Hessian at the weights, on training pairs that are the same for every arm."""
    data = PreferenceDataset.load(config.data.train)
    analyzer = HessianAnalyzer(model, loss=config.loss, token_budget=config.batching.micro_token_budget, seed=0)
    spectrum = analyzer.compute_spectrum(data.pairs, top_k=1, num_pairs=num_pairs, options=CURVATURE)
    assert spectrum.trace is not None, "it was asked for"
    return {
        "top_eigenvalue": spectrum.eigenvalues[0],
        "top_eigenvalue_residual": spectrum.residuals[0],
        "trace": spectrum.trace.value,
        "trace_standard_error": spectrum.trace.standard_error,
        "curvature_pairs": spectrum.num_pairs,
    }
