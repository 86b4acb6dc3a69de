"""Public address of the base class of reward models. Names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rm_optimizer.lazy import export_lazily

if TYPE_CHECKING:
    from rm_optimizer.core.pairs.pair import BaseRewardModel as BaseRewardModel
    from rm_optimizer.core.pairs.pair import PreferencePair as PreferencePair
    from rm_optimizer.core.pairs.pair import Scorer as Scorer

export_lazily(globals())
