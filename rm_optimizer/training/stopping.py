"""Early ends of a run: a signal of the user, and a number that is not finite.

Ctrl-C and SIGTERM end a run within seconds and leave a checkpoint; a second one ends it at once.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.errors import TrainingDiverged
from rm_optimizer.evaluation.pair_rewards import PairRewards
from rm_optimizer.records.run_folder import RunFolder

log = logging.getLogger("rm_optimizer")

SHOWN = 8
"""Pairs that the message names."""


class StopNow(BaseException):
    """The second signal. It is not an `Exception`, so that no handler on the way catches it.

    It is not a `KeyboardInterrupt` either, since Lightning would exit with code 1 and without a message.
    """


class StopSignal:
    """Context in which the first SIGINT or SIGTERM only sets `requested`, and the second raises `StopNow`.

    Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}
        self._raised = False

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            self.arm()
        return self

    def arm(self) -> None:
        """Install the handlers, also if a library has replaced them."""
        for number in self._before:
            signal.signal(number, self._on_signal)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._raised:
            return  # the run is ending already; files are being completed
        if self.requested:
            self._raised = True
            raise StopNow
        self.requested = True
        log.warning(
            "stopping after this step or batch of an evaluation, and saving a checkpoint; "
            "press Ctrl-C again to stop at once"
        )


def stopped_at_once(run_dir: Path) -> str:
    """Message of a run that a second signal ended."""
    newest = list(RunFolder(run_dir).checkpoints.values())
    saved = f"the newest checkpoint is {newest[-1]}; resume=auto continues there" if newest else "nothing was saved yet"
    return f"stopped at once, without a checkpoint of this step; {saved}"


def last_good_checkpoint(run_dir: Path, before: int) -> Path | None:
    """The newest periodic checkpoint of fewer than `before` steps, else the best one, else None."""
    run = RunFolder(run_dir)
    older, best = [path for step, path in run.checkpoints.items() if step < before], run.best_checkpoint
    return older[-1] if older else best if best.exists() else None


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
