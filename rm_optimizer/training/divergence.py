"""The error of a run whose numbers stopped being finite, with the checkpoint to go back to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.errors import TrainingDiverged
from rm_optimizer.evaluation.pair_rewards import PairRewards
from rm_optimizer.training.folder.checkpoints import last_good_checkpoint

SHOWN = 8
"""Pairs that the message names."""


def diverged(what: str, ids: Sequence[str], run_dir: Path, *, weights_of: int) -> TrainingDiverged:
    """The error for a number that is not finite.

    Args:
        what: the number, its value and the place where it occurred.
        ids: the pairs on which it occurred.
        run_dir: the run folder, whose checkpoints are searched.
        weights_of: first step whose weights are known to be bad; older checkpoints are good.
    """
    named = ", ".join(ids[:SHOWN]) + (f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else "")
    good = last_good_checkpoint(run_dir, weights_of)
    saved = f"is {good}" if good else "does not exist"
    return TrainingDiverged(
        f"{what} on pairs {named}; the last good checkpoint {saved}; lower optimizer.lr or look at these pairs"
    )


def require_finite(rewards: PairRewards, data: PreferenceDataset, run_dir: Path, step: int) -> None:
    """Raise an error if validation gave a reward that is not finite.

    Args:
        rewards: rewards of the validation pairs.
        data: the validation pairs.
        run_dir: the run folder.
        step: optimizer steps that the weights had taken.

    Raises:
        TrainingDiverged: naming the step, the pairs and the last good checkpoint.
    """
    bad = ~(np.isfinite(rewards.chosen) & np.isfinite(rewards.rejected))
    if bad.any():
        both = np.concatenate([rewards.chosen, rewards.rejected])
        what = f"the reward became {both[~np.isfinite(both)][0]} in the evaluation after step {step}"
        ids = [data[int(index)].pair_id for index in rewards.pair_index[bad]]
        raise diverged(what, ids, run_dir, weights_of=step)
