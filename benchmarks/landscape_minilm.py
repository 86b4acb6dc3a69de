"""The landscape benchmark on a pretrained encoder and real pairs: its top eigenvalues, and watching it in training."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
from landscape_subjects import load_pairs, trained
from torch import Tensor

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.evaluation.draws import CurvatureMeasurement, MeasureCurvature
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.solvers.lanczos import Progress
from rm_optimizer.landscape.training_curvature import measure_curvature
from rm_optimizer.schema import LossConfig, TrainConfig, compose, typed
from rm_optimizer.schema.landscape import SpectrumOptions
from rm_optimizer.training.callbacks.curvature import HessianCallback, MeasurementPlan, costs_in_steps
from rm_optimizer.training.run import run_training

LEARNING_RATE = 5e-5
EVERY = 50
"""Steps between two measurements that the share of training time is given for."""
WATCHED_STEPS = (500, 1_000, 10_000)
"""Lengths of runs that the share of default measurements is given for."""


def measure_minilm(args: argparse.Namespace) -> dict[str, float]:
    """The largest eigenvalues with their residuals after `--steps` steps of training, and the time they took."""
    model = BradleyTerryRM.from_pretrained(args.minilm, max_length=512, new_head=True)
    subject = trained(args, "minilm", model, load_pairs(args), learning_rate=LEARNING_RATE)
    began = time.process_time()

    def show(progress: Progress) -> None:
        done = f"{progress.num_converged} of {progress.num_wanted}"
        print(f"  {progress.num_products} products, {time.process_time() - began:.0f} s: {done}", flush=True)

    found = HessianAnalyzer(model).compute_spectrum(
        subject.batches, top_k=2 * args.top_k, options=SpectrumOptions(which="largest"), on_iteration=show
    )
    cpu_seconds = time.process_time() - began
    print(f"  {found.product_reason}")
    for number, (value, residual) in enumerate(zip(found.eigenvalues, found.residuals, strict=True), 1):
        print(f"  {number:2d}  {value:.5g}  residual {residual:.1e}")
    return {
        "products_top20": found.num_products,
        "converged_top20": sum(found.converged),
        "minutes_top20": found.wall_seconds / 60,
        "cpu_minutes_top20": cpu_seconds / 60,
    }


def measure_callback(args: argparse.Namespace) -> dict[str, float]:
    """Share of training time that curvature takes when it is measured every 50 steps.

    `--steps` steps are trained with a measurement before the first, one in the middle and one after the last; a
    measurement after the first is set against 50 of these steps, by seconds of the process.
    """
    measurements: list[tuple[float, CurvatureMeasurement]] = []
    fits: list[float] = []
    with tempfile.TemporaryDirectory() as folder, patch.object(pl.Trainer, "fit", _timed(pl.Trainer.fit, fits)):
        config = _training(args, Path(folder), **{"training.hessian.every": max(1, args.steps // 2)})
        run_training(config, callbacks=[HessianCallback(config.training.hessian, _watched(measurements))])
    first, *later = [seconds for seconds, _ in measurements]
    step = (fits[0] - first - sum(later)) / args.steps
    warm = fmean(later)
    return {
        "callback_share": warm / (warm + EVERY * step),
        "callback_seconds": warm,
        "callback_seconds_first": first,
        "callback_products": measurements[-1][1].num_products,
        "step_seconds": step,
        "measurement_in_steps": warm / step,
    }


def measure_watching(args: argparse.Namespace) -> dict[str, float]:
    """Share of training time of the default measurements by the clock, the preconditioned sharpness included.

    Runs of `--steps` steps without and with four evenly spaced measurements take turns, `--rounds` of each. The share
    is that of a run of `WATCHED_STEPS` steps, whose measurements `MeasurementPlan` spaces by their counted cost, at
    these seconds of a step and of each measurement.
    """
    seconds: dict[bool, list[float]] = {False: [], True: []}
    rounds: list[list[tuple[float, CurvatureMeasurement]]] = []
    for _ in range(args.rounds):
        for is_watched in seconds:
            measurements: list[tuple[float, CurvatureMeasurement]] = []
            fit = _timed(pl.Trainer.fit, seconds[is_watched])
            every = {"training.hessian.every": args.steps // 3} if is_watched else {}
            with tempfile.TemporaryDirectory() as folder, patch.object(pl.Trainer, "fit", fit):
                config = _training(args, Path(folder), **every)
                pairs_a_step = config.batching.batch_size
                callback = HessianCallback(config.training.hessian, _watched(measurements))
                run_training(config, callbacks=[callback] if is_watched else [])
            print(f"  {'with' if is_watched else 'without'}: {seconds[is_watched][-1]:.1f} s", flush=True)
        rounds.append(measurements)
    step = fmean(seconds[False]) / args.steps
    steps_of = [fmean(taken for taken, _ in column) / step for column in zip(*rounds, strict=True)]
    costs = [costs_in_steps(measurement, pairs_a_step) for _, measurement in rounds[0]]
    for number, (taken, (cost, _), (_, measurement)) in enumerate(zip(steps_of, costs, rounds[0], strict=True)):
        count = f"{cost:.1f}, {measurement.num_gradients:.1f} gradients of {measurement.num_tokens} tokens"
        print(f"  measurement {number}: {taken:.1f} steps, counted as {count}")
    shares = {f"watching_share_{steps}": _share_of(steps, steps_of, costs) for steps in WATCHED_STEPS}
    extra = fmean(w - o for o, w in zip(seconds[False], seconds[True], strict=True)) / step
    return shares | {
        "watching_step_seconds": step,
        "watching_steps_first": steps_of[0],
        "watching_steps_later": fmean(steps_of[2:]),
        "watching_counted_later": fmean(cost for cost, _ in costs[2:]),
        "watching_extra_steps_of_four": extra,
        "watching_steps_of_four": sum(steps_of),
    }


def _share_of(num_steps: int, steps_of: Sequence[float], costs: Sequence[tuple[float, float]]) -> float:
    """Share of a run's time, measured where `MeasurementPlan` says; the last measurement stands for further ones."""
    plan, taken, number = MeasurementPlan(0, num_steps), 0.0, 0
    while plan.due <= num_steps and number <= num_steps:
        which = min(number, len(costs) - 1)
        plan.taken(plan.due, *costs[which])
        taken, number = taken + steps_of[which], number + 1
    return taken / (taken + num_steps)


def _training(args: argparse.Namespace, folder: Path, **hessian: object) -> TrainConfig:
    """The preset of MiniLM, whose micro-token budget is the default one; evaluated on two pairs."""
    values: dict[str, Any] = {
        "model": "minilm",
        "model.path": args.minilm,
        "model.max_length": args.max_length,
        "data.train": args.pairs,
        "data.val_fraction": 0.01,
        "training.max_steps": args.steps,
        "training.evals_per_epoch": 1,
        "training.eval_at_start": "false",
        "batching.batch_size": args.batch_size,
        "training.hessian.num_pairs": args.num_pairs,
        "training.num_bootstrap": 100,
        "training.progress": "false",
        "hardware.accelerator": "cpu",
        "hardware.num_threads": args.threads,
        "hardware.precision": args.precision,
        "logger.tensorboard": "false",
        "output_dir": folder,
        **hessian,
    }
    return typed(compose([f"{name}={value}" for name, value in values.items() if value is not None]), TrainConfig)


def _watched(measurements: list[tuple[float, CurvatureMeasurement]]) -> Callable[..., MeasureCurvature]:
    """`measure_curvature`, whose measurements come to the list with their seconds."""

    def make(model: BradleyTerryRM, micro_batches: Sequence[AnyPairBatch], loss: LossConfig) -> MeasureCurvature:
        measure = measure_curvature(model, micro_batches, loss)

        def timed_measure(scales: Mapping[str, Tensor] | None = None) -> CurvatureMeasurement:
            began = time.process_time()
            measurement = measure(scales)
            measurements.append((time.process_time() - began, measurement))
            return measurement

        return timed_measure

    return make


def _timed(fit: Callable[..., None], spent: list[float]) -> Callable[..., None]:
    def measured(*args: Any, **kwargs: Any) -> None:
        began = time.process_time()
        fit(*args, **kwargs)
        spent.append(time.process_time() - began)

    return measured
