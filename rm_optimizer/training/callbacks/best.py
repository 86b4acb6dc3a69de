"""The best evaluation so far, by the monitored metric."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from rm_optimizer.core.pairs.dataset import PreferenceDataset
from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.schema.monitors import Mode, monitored_group

log = logging.getLogger("rm_optimizer")


@dataclass
class BestSoFar:
    """The best value of the monitored metric and the evaluations since the last improvement that counts.

    A value that is not finite is never the best while there is a finite one.

    Args:
        mode: direction of improvement, smaller or larger.
        min_delta: least improvement on `reference` that counts.
        value: the best finite value; None before there is one.
        step: optimizer steps done when it was reached.
        reference: value at the last improvement that counted, which the next is measured from.
        stale: evaluations since that improvement.
    """

    mode: Mode
    min_delta: float
    value: float | None = None
    step: int = 0
    reference: float | None = None
    stale: int = 0

    def update(self, value: float, step: int) -> bool:
        """Record a new value, and return True if its weights are the best so far."""
        if not math.isfinite(value):
            self.step = step if self.value is None else self.step
            return self.value is None
        counts = self.reference is None or self._gain(value, self.reference) > self.min_delta
        self.reference, self.stale = (value, 0) if counts else (self.reference, self.stale + 1)
        if self.value is not None and self._gain(value, self.value) <= 0:
            return False
        self.value, self.step = value, step
        return True

    def forget(self) -> bool:
        """Drop the best value, whose weights are lost, and return True if there was one. Patience is not reset."""
        had_one, self.value = self.value is not None, None
        return had_one

    def _gain(self, value: float, before: float) -> float:
        return before - value if self.mode == Mode.min else value - before


def require_monitored(monitor: str, val: PreferenceDataset) -> None:
    """Refuse to monitor the accuracy of a group that validation does not have.

    Args:
        monitor: `training.monitor`.
        val: the validation pairs.

    Raises:
        ConfigError: naming the groups there are.
    """
    if (wanted := monitored_group(monitor)) is None:
        return
    column, group = wanted
    groups = {str(pair.metadata.get(column, "")) for pair in val.pairs}
    if len(groups) == 1:
        raise ConfigError(
            f"training.monitor={monitor} needs validation pairs of several values of '{column}', "
            f"got the one value '{min(groups)}'; set training.monitor=val/accuracy"
        )
    if group not in groups:
        raise ConfigError(did_you_mean("training.monitor", monitor, (f"val/{column}/{x}/accuracy" for x in groups)))


def warn_of_unmeasured(monitor: str, best: BestSoFar) -> None:
    """Warn if the monitored metric had no finite value at any evaluation, so that no weights were selected."""
    if best.value is None:
        log.warning(
            "training.monitor=%s had no finite value at any evaluation; the weights of the last one, after step %d, "
            "are exported",
            monitor,
            best.step,
        )
