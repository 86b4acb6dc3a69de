"""Acquisition functions by name."""

from __future__ import annotations

from collections.abc import Callable

from rm_optimizer.data_efficiency.acquisition.diverse import BADGE, Coreset
from rm_optimizer.data_efficiency.acquisition.functions import (
    BALD,
    AcquisitionFunction,
    EntropySampling,
    LargeGap,
    LengthStratified,
    MarginSampling,
    RandomSampling,
    StochasticBALD,
    UncertaintySampling,
)
from rm_optimizer.data_efficiency.acquisition.optimal_design import BoundaryOptimal, DOptimal, VOptimal
from rm_optimizer.errors import ConfigError, did_you_mean

RULES: dict[str, Callable[[], AcquisitionFunction]] = {
    rule.name: rule
    for rule in (
        BoundaryOptimal,
        VOptimal,
        DOptimal,
        Coreset,
        BADGE,
        BALD,
        StochasticBALD,
        UncertaintySampling,
        EntropySampling,
        MarginSampling,
        LargeGap,
        LengthStratified,
        RandomSampling,
    )
}
"""Rules, the default first."""


def acquisition_function(name: str) -> AcquisitionFunction:
    """The rule of this name, with its defaults.

    Raises:
        ConfigError: if there is none.
    """
    if name not in RULES:
        raise ConfigError(did_you_mean("rule", name, RULES))
    return RULES[name]()
