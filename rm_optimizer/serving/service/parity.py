"""Parity of the served rewards with the certificate of the model, before `/ready`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rm_optimizer.core.storage.certificate import ParityCertificate
from rm_optimizer.records.codec import JsonRecord, from_values
from rm_optimizer.serving.engine import Engine
from rm_optimizer.serving.service.inputs import InputReader


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
