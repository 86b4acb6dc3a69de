"""Refusal of values that OmegaConf accepts but no option allows: infinite numbers, numbers for switches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from rm_optimizer.schema.checks import require
from rm_optimizer.schema.diagnose import walk_options


def require_finite(config: DictConfig) -> None:
    """Refuse NaN and infinity in any option; range checks accept NaN, since a comparison with it is false.

    Raises:
        ConfigError: naming the first such option.
    """
    for option, _, value in walk_options(config):
        if isinstance(value, float) and not math.isfinite(value):
            require(False, option, "be a finite number", value)


def require_switches(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse a number for an option that is true or false, which OmegaConf would take as true.

    Raises:
        ConfigError: naming the option.
    """
    for item in OverridesParser.create().parse_overrides(list(overrides)):
        value = item.value()
        parent, _, leaf = item.key_or_group.rpartition(".")
        owner = OmegaConf.get_type(OmegaConf.select(config, parent) if parent else config)
        if isinstance(value, int | float) and not isinstance(value, bool) and is_dataclass(owner):
            is_switch = get_type_hints(owner).get(leaf) is bool
            require(not is_switch, item.key_or_group, "be true or false", f"'{value}'")
