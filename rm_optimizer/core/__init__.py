"""Rewards from preferences: pairs, tokens, losses, metrics and the model itself. Names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rm_optimizer.lazy import export_lazily

if TYPE_CHECKING:
    from rm_optimizer.core.base import BaseRewardModel as BaseRewardModel
    from rm_optimizer.core.base import Scorer as Scorer
    from rm_optimizer.core.model.reward_model import BradleyTerryRM as BradleyTerryRM
    from rm_optimizer.core.pairs.pair import Message as Message
    from rm_optimizer.core.pairs.pair import PreferencePair as PreferencePair

export_lazily(globals())
