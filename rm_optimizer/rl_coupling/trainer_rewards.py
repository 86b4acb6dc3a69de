"""Rewards for a trainer, on a scale saved with the model or from a server that has its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.rows.natural import Prompts, Texts
from rm_optimizer.core.storage.model_files import read_record
from rm_optimizer.errors import CheckpointError, ConfigError, did_you_mean
from rm_optimizer.serving.client.client import RewardClient


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
        record = read_record(Path(export))
        statistics = record.get("reward_statistics") or {}
        beta = record.get("identity", {}).get("beta", statistics.get("beta"))
        self.shift, self.factor = 0.0, 1.0
        if scale == RewardScale.logit and beta is not None:
            self.factor = float(beta)
        elif scale == RewardScale.standard and statistics.get("std"):
            self.shift, self.factor = float(statistics["mean"]), 1.0 / float(statistics["std"])
        elif scale != RewardScale.raw:
            raise CheckpointError(
                f"{export} records no numbers for scale={scale}; give the best/ folder of a run of rm-opt train, or "
                "scale=raw"
            )

    def score(self, prompts: Prompts, responses: Texts) -> Float[Tensor, "*sequences"]:
        """Scaled rewards of the responses, in the order given; one number for a text."""
        return (self.scorer.score(prompts, responses) - self.shift) * self.factor


CONTACT_SECONDS = 3.0
"""Seconds in which a reward server must answer before the first prompt."""
PROBE_TOLERANCE = 0.02
"""Largest difference of a served reward from the model's own that counts as rounding, relative to rewards above 1."""


@contextmanager
def serving(server: str, model: BradleyTerryRM, checkpoint: str, *, option: str) -> Iterator[RewardClient]:
    """Open a client of a server, after a check of one reward that it serves the model.

    Args:
        server: address, such as http://127.0.0.1:8000.
        model: the model in this process.
        checkpoint: path or name of the model, for error messages.
        option: name of the server's option, for error messages.

    Raises:
        ConfigError: if the server has other weights.
        RewardServerUnavailable: if it does not answer.
    """
    RewardClient(server, renderer=model.renderer, timeout_seconds=CONTACT_SECONDS).close()
    with RewardClient(server, renderer=model.renderer) as client:
        served, own = (float(scorer.score(["Hi."], ["Hello."])[0]) for scorer in (client, model))
        if not abs(served - own) <= PROBE_TOLERANCE * max(1.0, abs(own)):
            raise ConfigError(
                f"{option} {server} has other weights than {checkpoint}: it gives {served:.4f} where that gives "
                f"{own:.4f}; serve {checkpoint}, or name the model that is served"
            )
        yield client
