"""Protocols of rollouts for the scorer and the credit assigner; classes of RL frameworks fit without changes."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias

StepKey: TypeAlias = tuple[str, int]
"""Id of a rollout and index of one of its steps."""


class Step(Protocol):
    """One turn: an observation and the policy's action."""

    @property
    def index(self) -> int:
        """Position in the rollout, from 0."""

    @property
    def prev_obs(self) -> str:
        """Text that the policy read."""

    @property
    def action(self) -> str:
        """Text that the policy wrote."""

    @property
    def reward(self) -> float:
        """Reward of the environment."""


class Rollout(Protocol):
    """An episode of a policy. Its attribute `metadata` or `meta` is a mutable mapping."""

    @property
    def id(self) -> str:
        """Unique name of the rollout."""

    @property
    def steps(self) -> Sequence[Step]:
        """The turns, first to last."""

    @property
    def total_reward(self) -> float:
        """Sum of the environment's rewards."""


class CreditAssigner(Protocol):
    """Object that gives each step of rollouts a weight."""

    def compute(self, rollouts: Sequence[Any]) -> Mapping[StepKey, float]:
        """Weights of the steps of all rollouts."""
        ...


def metadata_of(rollout: Rollout) -> MutableMapping[str, Any]:
    """The rollout's metadata.

    Raises:
        ValueError: if it has none.
    """
    found = getattr(rollout, "metadata", None)
    found = getattr(rollout, "meta", None) if found is None else found
    if not isinstance(found, MutableMapping):
        raise ValueError(f"rollout {rollout.id} has no metadata to hold a score; give it a dict as metadata or meta")
    return found
