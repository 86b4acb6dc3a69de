"""Scale of the rewards for an RL trainer: raw, or a named scale that was saved with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.pairs.pair import Prompt, Scorer
from rm_optimizer.core.storage.model_files import read_record
from rm_optimizer.errors import CheckpointError, ConfigError, did_you_mean


class RewardScale(StrEnum):
    """Transformation of raw rewards r.

    `raw` is r, `logit` is `beta r` (a difference of 1 is one unit of log-odds of the preference), and `standard` is
    `(r - mean) / std` with mean and std from the model's validation data. The order of rewards does not change. The
    effect of an RL trainer's KL penalty depends on the scale.
    """

    raw = "raw"
    logit = "logit"
    standard = "standard"


class ScaledScorer(Scorer):
    """Scorer with rewards on a saved scale.

    Args:
        scorer: scorer of raw rewards: the model, or a client of its server.
        scale: `raw`, `logit` or `standard`.
        export: the model's exported folder, which holds the scale's numbers.

    Raises:
        ConfigError: if the scale is unknown.
        CheckpointError: if the folder does not hold the scale's numbers.
    """

    def __init__(self, scorer: Scorer, scale: str, export: str | Path) -> None:
        if scale not in list(RewardScale):
            raise ConfigError(did_you_mean("scale", scale, RewardScale))
        self.scorer = scorer
        self.shift, self.factor = _numbers(RewardScale(scale), read_record(Path(export)), export)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Float[Tensor, " sequences"]:
        """Scaled rewards of the responses, in the order given."""
        return (self.scorer.score(prompts, responses) - self.shift) * self.factor


def _numbers(scale: RewardScale, record: Mapping[str, Any], export: str | Path) -> tuple[float, float]:
    """Shift and factor of the scale."""
    statistics = record.get("reward_statistics") or {}
    beta = record.get("identity", {}).get("beta", statistics.get("beta"))
    if scale == RewardScale.raw:
        return 0.0, 1.0
    if scale == RewardScale.logit and beta is not None:
        return 0.0, float(beta)
    if scale == RewardScale.standard and statistics.get("std"):
        return float(statistics["mean"]), 1.0 / float(statistics["std"])
    raise CheckpointError(
        f"{export} records no numbers for scale={scale}; give the best/ folder of a run of rm-opt train, or scale=raw"
    )
