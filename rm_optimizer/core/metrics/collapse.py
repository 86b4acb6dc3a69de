"""Detection of models that give every response the same reward and therefore have no accuracy.

The loss of such a model is log 2. Rounding, or the way ties are counted, turns its "accuracy" into anything from 0 to
1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

_NEAR_CHANCE = 0.02
"""Share of log 2 within which a loss counts as chance."""
_CONSTANT = 1e-5
"""Standard deviation of rewards, in units of max(1, |mean|), that float32 arithmetic alone explains."""
_TIED = 1e-6
"""Margin, in units of the larger reward of the pair, that float32 arithmetic alone explains."""


@dataclass(frozen=True)
class CollapseVerdict:
    """Test that the rewards distinguish responses at all.

    Args:
        collapsed: True if they do not.
        reason: one sentence that starts with "collapsed:", or empty.
    """

    collapsed: bool
    reason: str


def detect_collapse(
    chosen: Float[np.ndarray, " pairs"],
    rejected: Float[np.ndarray, " pairs"],
    weight: Float[np.ndarray, " pairs"],
    nll: float,
) -> CollapseVerdict:
    """Collapse: a loss within 2 % of log 2 together with constant rewards or mostly tied pairs.

    Args:
        chosen: rewards of the preferred responses.
        rejected: rewards of the others.
        weight: number of pairs that each counts for.
        nll: mean negative log-likelihood of the pairs, in nats.

    Example:
        >>> detect_collapse(*np.ones((3, 4)), nll=math.log(2)).collapsed
        True
    """
    if abs(nll - math.log(2)) > _NEAR_CHANCE * math.log(2):
        return CollapseVerdict(False, "")
    rewards = np.concatenate([chosen, rejected])
    spread = float(rewards.std())
    tied = np.abs(chosen - rejected) <= _TIED * np.maximum(np.abs(chosen), np.abs(rejected))
    share = float((weight * tied).sum() / weight.sum())
    if spread <= _CONSTANT * max(1.0, abs(float(rewards.mean()))):
        what = f"all {rewards.size:,} rewards are equal" + (f" but for noise of {spread:.1e}" if spread else "")
    elif share >= 0.5:
        what = f"{share:.0%} of pairs have tied rewards"
    else:
        return CollapseVerdict(False, "")
    return CollapseVerdict(True, f"collapsed: {what} and the loss is {nll:.4f} (chance is log 2 = 0.6931)")
