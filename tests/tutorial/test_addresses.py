"""Modules that the tutorial names for the core hold the classes of the package."""

from __future__ import annotations

import rm_optimizer
from rm_optimizer.core.base import BaseRewardModel, PreferencePair
from rm_optimizer.core.reward_model import BradleyTerryRM


def test_the_tutorials_modules_hold_the_packages_classes():
    found = (BaseRewardModel, PreferencePair, BradleyTerryRM)
    assert found == tuple(getattr(rm_optimizer, each.__name__) for each in found)
