"""States of the random generators of every process, so that a resumed run draws the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import distributed

from rm_optimizer.records.randomness import random_state, set_random_state


def random_states() -> list[dict[str, Any]]:
    """Return the `random_state` of each rank, in their order; every rank must take part."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [random_state()]
    states: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(states, random_state())
    return states


def set_random_states(states: Sequence[Mapping[str, Any]]) -> None:
    """Restore this rank's generators to their state in `random_states`."""
    is_alone = not (distributed.is_available() and distributed.is_initialized())
    set_random_state(states[0 if is_alone else distributed.get_rank()])
