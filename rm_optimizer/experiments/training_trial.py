"""A trial that trains a reward model and keeps its margins on files of pairs, not its weights."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping
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
from rm_optimizer.experiments.trials import Trial
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.folder.checkpoints import checkpoint_path

TOKEN_BUDGET = 16384
"""Tokens with padding of one pass of scoring."""
_MARGINS_FILE = "margins.npz"


def train_and_score(config: TrainConfig, scored: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """Train, score the files of pairs, and remove the weights.

    Scored are the best weights under early stopping, else the last, for which `training.checkpoint_every` must divide
    the run's steps.

    Args:
        config: options of the run; its `output_dir` is not used.
        scored: files of pairs by name, for `margins_of`.
        folder: folder of the trial; the run stands in its `run/`.

    Returns:
        Steps of the run and of the scored weights, parameters, and CPU seconds of training and scoring.
    """
    started = time.process_time()
    result = train_reward_model(replace(config, output_dir=str(folder / "run")))
    best = config.training.early_stopping.enabled
    weights = Path(result.export) if best else checkpoint_path(folder / "run", result.steps)
    model = BradleyTerryRM.from_pretrained(weights, max_length=config.model.max_length)
    margins = {name: _margins(config, model, pairs) for name, pairs in scored.items()}
    np.savez(folder / _MARGINS_FILE, **margins)  # type: ignore[arg-type]
    for kept in ("checkpoints", BEST_FOLDER):
        shutil.rmtree(folder / "run" / kept)
    return {
        "steps": result.steps,
        "scored_step": result.best_step if best else result.steps,
        "all_steps": config.training.max_steps,
        "parameters": result.parameters,
        "cpu_seconds": time.process_time() - started,
    }


def margins_of(trials: list[Trial], name: str) -> Float[np.ndarray, "trials pairs"]:
    """Margins that `train_and_score` kept of the file of that name, in the file's order."""
    return np.stack([np.load(trial.folder / _MARGINS_FILE)[name] for trial in trials])


def _margins(config: TrainConfig, model: BradleyTerryRM, pairs: Path) -> np.ndarray:
    """Margins of all pairs of a file, in order; 0 where both conversations are equal after truncation."""
    data = PreferenceDataset.load(str(pairs))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    half = config.hardware.precision == "bf16-mixed"
    with torch.autocast(device, torch.bfloat16) if half else contextlib.nullcontext():
        tokens = tokenize_pairs(data.pairs, model.renderer, None)
        rewards = score_pairs(model, tokens, data, token_budget=TOKEN_BUDGET, prefix_sharing=False)
    margins = np.zeros(len(data))
    margins[rewards.pair_index] = rewards.margin
    return margins
