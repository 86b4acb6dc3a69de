"""Parity of the served rewards: with the model's certificate before `/ready`, and with the sender of new weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rm_optimizer.core.storage.certificate import ParityCertificate
from rm_optimizer.errors import WeightsRefused
from rm_optimizer.records.codec import JsonRecord, from_values
from rm_optimizer.serving.engine import Engine
from rm_optimizer.serving.service.inputs import InputReader
from rm_optimizer.serving.update_protocol import WeightProbe

HALF_TOLERANCE = 2.0**-2
"""Least tolerance of a weight probe in half types, in units of max(1, |reward|): the sender may compute in float32."""


@dataclass(frozen=True)
class ParityReport(JsonRecord):
    """Comparison of served rewards with those certified at export.

    Args:
        max_difference: largest |served - certified|.
        relative_difference: largest |served - certified| / max(1, |certified|).
        tolerance: largest accepted `relative_difference`.
        num_conversations: number of compared conversations.
        same_tokens: True if the server renders the conversations to the certified token ids.
        flipped_pairs: pairs, of `num_pairs`, that the served rewards order differently.
        num_pairs: pairs with different certified rewards.
        version: version of the compared weights.
    """

    max_difference: float
    relative_difference: float
    tolerance: float
    num_conversations: int
    same_tokens: bool
    flipped_pairs: int
    num_pairs: int
    version: str

    @property
    def is_passed(self) -> bool:
        """True if the server may answer; a reward that is not finite fails."""
        return self.same_tokens and self.relative_difference <= self.tolerance

    def entries(self) -> dict[str, Any]:
        """The fields, and whether the server may answer."""
        return super().entries() | {"is_passed": self.is_passed}


async def check_parity(engine: Engine, reader: InputReader, export: Mapping[str, Any]) -> ParityReport | None:
    """Score the certificate's conversations; None if the checkpoint has no certificate.

    Args:
        engine: engine with the checkpoint's own weights.
        reader: renderer of the conversations.
        export: the checkpoint's `export.json`.
    """
    if "certificate" not in export:
        return None
    certificate = from_values(ParityCertificate, export["certificate"])
    scores = certificate.scores
    encoded = reader.renderer.encode_batch([score.prompt for score in scores], [score.response for score in scores])
    fitting = [score for score in scores if len(score.input_ids) <= reader.max_length]
    served = await engine.score([score.input_ids for score in fitting])
    certified = [score.reward for score in fitting]
    differences = [abs(got - expected) for got, expected in zip(served.rewards, certified, strict=True)]
    relative = [difference / max(1.0, abs(value)) for difference, value in zip(differences, certified, strict=True)]
    pairs = [(i, j) for i in range(len(certified)) for j in range(i) if certified[i] != certified[j]]
    same = all(
        encoding.ids == score.input_ids or len(encoding.ids) > reader.max_length
        for encoding, score in zip(encoded, scores, strict=True)
    )
    return ParityReport(
        max_difference=_largest(differences),
        relative_difference=_largest(relative),
        tolerance=certificate.loaded_tolerance(engine.description.dtype),
        num_conversations=len(fitting),
        same_tokens=same,
        flipped_pairs=sum((certified[i] > certified[j]) != (served.rewards[i] > served.rewards[j]) for i, j in pairs),
        num_pairs=len(pairs),
        version=served.version,
    )


def _largest(values: list[float]) -> float:
    """The largest value; NaN counts as infinity."""
    return max((float("inf") if value != value else value for value in values), default=0.0)


def probe_sequences(probe: WeightProbe | None, max_length: int) -> list[list[int]]:
    """Token ids of the probe; without a probe, a few ids of every vocabulary."""
    return probe.input_ids if probe else [list(range(min(8, max_length)))]


def check_rewards(rewards: Sequence[float], probe: WeightProbe | None, dtype: str) -> None:
    """Compare the new weights' rewards of `probe_sequences` with the sender's.

    Args:
        rewards: rewards of the new weights.
        probe: probe of the sender, or None.
        dtype: type that the served backbone computes in.

    Raises:
        WeightsRefused: if a reward is not finite, or differs from the sender's.
    """
    if not all(map(math.isfinite, rewards)):
        raise WeightsRefused(f"the new weights give a reward that is not finite: {list(rewards)}")
    if probe is None:
        return
    least = HALF_TOLERANCE if dtype in ("bfloat16", "float16") else 0.0
    for number, (got, expected) in enumerate(zip(rewards, probe.rewards, strict=True)):
        if abs(got - expected) > max(probe.tolerance, least) * max(1.0, abs(expected)):
            raise WeightsRefused(
                f"probe[{number}]: the new weights give {got:.6g} where their sender has {expected:.6g}"
            )
