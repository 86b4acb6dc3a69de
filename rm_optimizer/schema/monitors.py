"""Validation metrics that select the best checkpoint, and the direction in which each is better. Imports no torch."""

from __future__ import annotations

import re
from enum import StrEnum

from rm_optimizer.errors import ConfigError, did_you_mean


class Mode(StrEnum):
    """Direction of improvement of a metric: smaller or larger."""

    min = "min"
    max = "max"


DIRECTIONS = {
    "val/nll": Mode.min,
    "val/loss": Mode.min,
    "val/brier": Mode.min,
    "val/ece": Mode.min,
    "val/ece_mass": Mode.min,
    "val/negative_margin_rate": Mode.min,
    "val/tie_rate": Mode.min,
    "val/accuracy": Mode.max,
    "val/mean_margin": Mode.max,
    "val/score_mse": Mode.min,
    "val/score_spearman": Mode.max,
}
"""Direction in which each metric is better."""
UNDIRECTED = ("val/margin_std", "val/reward_mean", "val/reward_std", "val/temperature")
"""Metrics without a better direction; `training.mode` must set it."""
_OF_ALL = {"val/loss", "val/score_mse", "val/score_spearman"}
_OF_GROUPS = "|".join(name.removeprefix("val/") for name in (*DIRECTIONS, *UNDIRECTED) if name not in _OF_ALL)
OF_A_GROUP = re.compile(rf"val/(?P<column>source|subset)/(?P<group>.+)/(?P<metric>{_OF_GROUPS})")
"""A metric of one group of the validation pairs."""


def better_mode(monitor: str, mode: Mode | None) -> Mode:
    """Direction in which a monitored metric is better.

    Args:
        monitor: `training.monitor`.
        mode: `training.mode`; None takes the metric's own direction.

    Raises:
        ConfigError: if the metric is unknown, contradicts the mode, or has no direction and none is given.

    Example:
        >>> better_mode("val/accuracy", None)
        <Mode.max: 'max'>
    """
    found = OF_A_GROUP.fullmatch(monitor)
    metric = f"val/{found['metric']}" if found else monitor
    own = DIRECTIONS.get(metric)
    if own is None and metric not in UNDIRECTED:
        known = [*DIRECTIONS, *UNDIRECTED]
        raise ConfigError(
            did_you_mean("training.monitor", monitor, known) + ", and val/source/NAME/METRIC of one source"
        )
    direction = own or mode
    if direction is None:
        raise ConfigError(
            f"training.mode must be min or max for training.monitor={monitor}, which has no better direction of "
            "its own, got null"
        )
    if own is not None and mode not in (None, own):
        size = "smaller" if own == Mode.min else "larger"
        raise ConfigError(
            f"training.mode must be {own} (or null) for training.monitor={monitor}, of which a {size} value is better, "
            f"got {mode}"
        )
    return direction


def monitored_group(monitor: str) -> tuple[str, str] | None:
    """Grouping column and group of a monitored metric; None for a metric of all validation pairs.

    Example:
        >>> monitored_group("val/source/hh/accuracy")
        ('source', 'hh')
    """
    found = OF_A_GROUP.fullmatch(monitor)
    return None if found is None else (found["column"], found["group"])
