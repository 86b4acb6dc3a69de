"""Public address of the Bradley-Terry reward model. Names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rm_optimizer.lazy import export_lazily

if TYPE_CHECKING:
    from rm_optimizer.core.model.reward_model import BradleyTerryRM as BradleyTerryRM

export_lazily(globals())
