"""Proof that a stored model scores as it did in memory: conversations, their rewards, the largest difference."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.pairs.pair import Message, Prompt
from rm_optimizer.errors import CheckpointError
from rm_optimizer.records.codec import JsonRecord

_STORY = "The lighthouse keeper counted the ships that passed, and wrote each name in a book that nobody read. "
DEFAULT_PROBE: tuple[tuple[Prompt, str], ...] = (
    ("Hi", "Hello."),
    ("What is 2 + 2?", "4"),
    ("What is 2 + 2?", "It is five, because I say so."),
    ("How do I boil an egg?", "Put it into boiling water.\n\n1. Wait seven minutes.\n2. Cool it.\n\n\tEnjoy!"),
    ("Écris « bonjour » en japonais. 日本語で", "こんにちは 👋🏽 — ça veut dire « bonjour »."),
    ("Write a long story.", _STORY * 8),
    (f"Summarise this: {_STORY * 8}", "A keeper records ships."),
    (
        (Message("user", "Name a colour."), Message("assistant", "Blue."), Message("user", "Another one, please.")),
        "Green.",
    ),
    (
        (
            Message("user", "def f(x): return x"),
            Message("assistant", "That is the identity."),
            Message("user", "Make it double <b>x</b> & say why"),
            Message("assistant", "```python\ndef f(x):\n    return 2 * x\n```"),
            Message("user", "Thanks!"),
        ),
        "You are welcome.",
    ),
)
"""Conversations every export is checked on: short and long, several turns, code, and characters beyond ASCII."""

TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "float16": 2.0**-7, "bfloat16": 2.0**-4}
"""Largest difference allowed, in units of max(1, |reward|).

In float32 and float64 it leaves room for another order of summation. In half types it is 8 of the type's rounding
errors, since plain `transformers` also rounds the head's weights and its output to 11 or 8 bits, which this model does
not. That is a margin, not a bound: the rounding of a half-precision backbone grows with its depth and weights. Tiny
models of random bfloat16 weights lie 0.02 to 0.17 from their float64 rewards; padding alone moves them by up to 0.02.
"""
LOADED_TOLERANCE = {"float32": 1e-4, "float64": 1e-4}
"""Largest difference of a loaded model's rewards from the certified ones, in the same units."""
LOADED_HALF_TOLERANCE = 2.0**-2
"""The same difference with a half type: with 30M parameters 0.24 was measured (bfloat16), 0.05 on average."""
_CHECKED_TOKENS = 64


@dataclass(frozen=True)
class ProbeScore:
    """One probe conversation and its reward.

    Args:
        prompt: text, or the messages before the response.
        response: the response's text.
        input_ids: token ids that the model read, special tokens included.
        reward: reward in memory, before the export.
        reloaded: reward by the exported files through plain `transformers`.
    """

    prompt: Prompt
    response: str
    input_ids: tuple[int, ...]
    reward: float
    reloaded: float


@dataclass(frozen=True)
class ParityCertificate:
    """The comparison of a model in memory with its export, reloaded by plain `transformers`.

    Args:
        max_difference: largest |reward - reloaded| over the probe, in units of reward.
        relative_difference: largest |reward - reloaded| / max(1, |reward|).
        tolerance: the most that `relative_difference` may be.
        dtype: type of the exported backbone.
        device: kind of device on which both were computed.
        scores: the probe conversations and their rewards.
    """

    max_difference: float
    relative_difference: float
    tolerance: float
    dtype: str
    device: str
    scores: tuple[ProbeScore, ...]

    @property
    def is_passed(self) -> bool:
        """True if the export may be used in place of the model; a reward that is not finite fails."""
        return self.relative_difference <= self.tolerance

    def loaded_tolerance(self, dtype: str) -> float:
        """Largest relative difference allowed where the stored weights compute in a type, such as `bfloat16`."""
        exact = all(name in LOADED_TOLERANCE for name in (dtype, self.dtype))
        return max(self.tolerance, LOADED_TOLERANCE[dtype] if exact else LOADED_HALF_TOLERANCE)

    def shortest(self) -> tuple[ProbeScore, ...]:
        """The shortest conversations, at least one, with at most `_CHECKED_TOKENS` tokens, for a check of one pass."""
        scores = sorted(self.scores, key=lambda score: len(score.input_ids))
        totals = accumulate(len(score.input_ids) for score in scores)
        return tuple(score for score, total in zip(scores, totals, strict=True) if total <= _CHECKED_TOKENS) or (
            scores[0],
        )


def require_parity(
    certificate: ParityCertificate, rewards: Float[np.ndarray, " sequences"], dtype: str, source: object
) -> None:
    """Refuse a loaded model that does not give the rewards it was certified with.

    Args:
        certificate: stored with the model.
        rewards: rewards of its `shortest` conversations, in that order, as loaded.
        dtype: type of the model's matrix products, such as `bfloat16`.
        source: path or name of the model, for the message.

    Raises:
        CheckpointError: if a reward differs by more than rounding, or is not finite.
    """
    certified = np.array([score.reward for score in certificate.shortest()])
    difference = np.abs(rewards - certified)
    if not (difference <= certificate.loaded_tolerance(dtype) * np.maximum(np.abs(certified), 1.0)).all():
        raise CheckpointError(
            f"{source} does not give the rewards that its certificate states: they differ by {difference.max():.3g}, "
            "so its weights or config.json were changed after the export, or this version of transformers computes it "
            "otherwise; restore the folder, or, if the change is meant, delete its export.json and export the model "
            "again"
        )


def certify(scores: tuple[ProbeScore, ...], *, tolerance: float, dtype: str, device: str) -> ParityCertificate:
    """Compare two scorings of the probe.

    Args:
        scores: the probe conversations and their rewards.
        tolerance: largest difference allowed, in units of max(1, |reward|).
        dtype: type of the exported backbone, such as `bfloat16`.
        device: kind of device of both computations.
    """
    rewards, reloaded = np.array([(score.reward, score.reloaded) for score in scores]).T
    difference = np.abs(rewards - reloaded)
    relative = difference / np.maximum(np.abs(rewards), 1.0)
    return ParityCertificate(float(difference.max()), float(relative.max()), tolerance, dtype, device, scores)


@dataclass(frozen=True)
class TurnedOrders(JsonRecord):
    """Pairs whose better response is another one with weights of fewer bits than float32.

    Args:
        dtype: type of the weights.
        num_pairs: pairs that were scored in both types.
        num_turned: of these, pairs whose order is another one.
        at_most: upper end of the share of all such pairs whose order turns, with 95 % confidence if the pairs are
            independent (Clopper & Pearson, 1934).
        largest_change: largest change of a reward.
    """

    dtype: str
    num_pairs: int
    num_turned: int
    at_most: float
    largest_change: float

    @classmethod
    def of(cls, dtype: str, exact: Float[np.ndarray, "2 pairs"], rounded: Float[np.ndarray, "2 pairs"]) -> TurnedOrders:
        """Compare the rewards of both sides of pairs in float32 and in another type."""
        from scipy.special import betaincinv  # the server's HTTP process reads this file and does without

        num_turned = int((np.sign(exact[0] - exact[1]) != np.sign(rounded[0] - rounded[1])).sum())
        num_kept = exact.shape[1] - num_turned
        at_most = float(betaincinv(num_turned + 1, num_kept, 0.95)) if num_kept else 1.0
        return cls(dtype, exact.shape[1], num_turned, at_most, float(np.abs(rounded - exact).max()))

    def __str__(self) -> str:
        of_all = f"{self.num_turned:,} of {self.num_pairs:,} pairs, at most {self.at_most:.2g} of all"
        return f"{of_all}; largest change of a reward {self.largest_change:.2g}"
