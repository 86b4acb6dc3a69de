"""Parity of new weights with their sender, on the sequences of its probe."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rm_optimizer.errors import WeightsRefused
from rm_optimizer.serving.update_protocol import WeightProbe

HALF_TOLERANCE = 2.0**-2
"""Least tolerance of a weight probe in half types, in units of max(1, |reward|): the sender may compute in float32."""


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
