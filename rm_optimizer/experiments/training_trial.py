"""Trial that trains a reward model, and keeps its margins on files of pairs but not its weights."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.dataset import PreferenceDataset
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.evaluation.pair_rewards import score_pairs
from rm_optimizer.experiments.study.plan import PlannedTrial
from rm_optimizer.experiments.study.tasks import RUN, config_of, logged_in_study, require_contents, training_trial
from rm_optimizer.experiments.study.trial import WORK, Trial
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.folder.checkpoints import checkpoint_path

TASK = "rm_optimizer.experiments.training_trial:train_and_score"
TOKEN_BUDGET = 16384
"""Most tokens of one scoring pass, padding included."""
_MARGINS_FILE = "margins.npz"


def scored_trial(label: str, config: TrainConfig, scored: Mapping[str, Path]) -> PlannedTrial:
    """A trial that trains with these options and scores the files of pairs.

    Args:
        label: short text that distinguishes it from the other trials.
        config: options of the run; its `output_dir` is not used.
        scored: files of pairs by the names that `margins_of` uses.
    """
    trial = training_trial(label, config)
    return replace(trial, spec=trial.spec | {"scored": {name: str(path) for name, path in scored.items()}})


def train_and_score(spec: Mapping[str, Any], folder: Path) -> dict[str, float | int | str | None]:
    """Train from the start, score the files of pairs, and remove the weights; files of an earlier attempt are removed.

    With early stopping the best weights are scored, else the last ones. The latter need a `training.checkpoint_every`
    that divides the run's steps.

    Args:
        spec: `options` of the run, and the files of pairs that are `scored`.
        folder: folder of the trial's work; the run folder is its `run/`.

    Returns:
        Seed, steps of the run and of the scored weights, parameters, and CPU seconds of training and scoring.
    """
    started, run_dir = time.process_time(), folder / RUN.name
    shutil.rmtree(run_dir, ignore_errors=True)
    config = config_of(spec["options"])
    require_contents(config, spec["contents"])
    logger = replace(logged_in_study(config.logger, folder), log_model=False)  # its weights are removed
    result = train_reward_model(replace(config, output_dir=str(run_dir), logger=logger))
    best = config.training.early_stopping.enabled
    weights = Path(result.export) if best else checkpoint_path(run_dir, result.steps)
    model = BradleyTerryRM.from_pretrained(weights, max_length=config.model.max_length)
    margins = {name: _margins(config, model, pairs) for name, pairs in spec["scored"].items()}
    np.savez(folder / _MARGINS_FILE, **margins)  # type: ignore[arg-type]
    for kept in ("checkpoints", BEST_FOLDER):
        shutil.rmtree(run_dir / kept)
    return {
        "seed": result.seed,
        "steps": result.steps,
        "scored_step": result.best_step if best else result.steps,
        "all_steps": config.training.max_steps,
        "parameters": result.parameters,
        "cpu_seconds": time.process_time() - started,
    }


def margins_of(trials: Sequence[Trial], name: str) -> Float[np.ndarray, "trials pairs"]:
    """Margins that `train_and_score` saved for the file with this name, in the file's order."""
    return np.stack([np.load(trial.folder / WORK / _MARGINS_FILE)[name] for trial in trials])


def _margins(config: TrainConfig, model: BradleyTerryRM, pairs: str) -> np.ndarray:
    """Margins of all pairs of a file, in order; 0 where both conversations are equal after truncation."""
    data = PreferenceDataset.load(pairs)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    half = config.hardware.precision == "bf16-mixed"
    with torch.autocast(device, torch.bfloat16) if half else contextlib.nullcontext():
        tokens = tokenize_pairs(data.pairs, model.renderer, None)
        rewards = score_pairs(model, tokens, data, token_budget=TOKEN_BUDGET, prefix_sharing=False)
    margins = np.zeros(len(data))
    margins[rewards.pair_index] = rewards.margin
    return margins
