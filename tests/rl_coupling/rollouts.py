"""Rollouts as an RL framework has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Turn:
    index: int
    prev_obs: str
    action: str
    reward: float = 0.0


@dataclass
class Episode:
    id: str
    steps: list[Turn]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def total_reward(self) -> float:
        return sum(step.reward for step in self.steps)


def episode(name: str, *turns: tuple[str, str], rewards: tuple[float, ...] = (), **meta: Any) -> Episode:
    own = rewards or (0.0,) * len(turns)
    return Episode(name, [Turn(i, *turn, own[i]) for i, turn in enumerate(turns)], meta)
