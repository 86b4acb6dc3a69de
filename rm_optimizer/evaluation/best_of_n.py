"""Best-of-n accuracy: share of prompts whose highest reward belongs to one of the best of many responses.

Pair accuracy hides it, since most pairs of a long list are between two mediocre responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import cluster_bootstrap, cluster_totals, ratios, with_honest_width
from rm_optimizer.core.pairs.pair import PreferencePair

FEWEST_RESPONSES = 3
"""Least number of responses of a list; fewer are only a pair."""


@dataclass(frozen=True)
class BestOfN:
    """Selection of one response from each list of scored ones.

    Args:
        num_lists: number of lists with at least `FEWEST_RESPONSES` different responses.
        mean_responses: mean number of responses of a list.
        accuracy: share of lists whose highest reward belongs to one of the best responses. Of tied highest rewards, the
            share that belongs to best responses counts.
        random: accuracy of choosing a response at random.
        longest: accuracy of choosing the longest response.
        by_subset: the same for the lists of each subset; empty if there are fewer than two.
    """

    num_lists: int
    mean_responses: float
    accuracy: Estimate
    random: float
    longest: float
    by_subset: dict[str, BestOfN] = field(default_factory=dict)


def best_of_n(
    pairs: Sequence[PreferencePair],
    chosen: Float[np.ndarray, " pairs"],
    rejected: Float[np.ndarray, " pairs"],
    *,
    num_bootstrap: int,
    seed: int,
) -> BestOfN | None:
    """Best-of-n selection on the pairs that come from lists of responses, or None if there are no such lists.

    The best responses of a list are those that are not the worse one in any of its pairs.

    Args:
        pairs: the pairs; pairs of one list have the same `metadata["group"]`.
        chosen: rewards of the pairs' chosen responses.
        rejected: rewards of the pairs' rejected responses.
        num_bootstrap: number of resamples of prompts for the interval.
        seed: seed of the resamples.
    """
    lists: dict[tuple[str, str], _List] = {}
    subsets: dict[tuple[str, str], str] = {}
    for pair, *rewards in zip(pairs, chosen.tolist(), rejected.tolist(), strict=True):
        if "group" in pair.metadata and pair.label != 0.5:
            key = (pair.prompt_id, f"{pair.metadata.get('source')} {pair.metadata['group']}")
            lists.setdefault(key, _List({}, set())).add(pair, rewards)
            subsets[key] = str(pair.metadata.get("subset", ""))
    long = {key: item for key, item in lists.items() if len(item.rewards) >= FEWEST_RESPONSES}
    if not long:
        return None
    names = sorted({subsets[key] for key in long})
    parts = {name: {key: item for key, item in long.items() if subsets[key] == name} for name in names}
    found = {name: _of_lists(part, num_bootstrap, seed) for name, part in parts.items()} if len(names) > 1 else {}
    return replace(_of_lists(long, num_bootstrap, seed), by_subset=found)


def _of_lists(long: Mapping[tuple[str, str], _List], num_bootstrap: int, seed: int) -> BestOfN:
    rows = np.array([[*item.shares(), 1.0] for item in long.values()])
    sums = cluster_totals(rows, [prompt for prompt, _ in long])
    found = cluster_bootstrap(sums[:, [0, -1]], ratios, num_bootstrap=num_bootstrap, seed=seed)
    return BestOfN(
        num_lists=len(long),
        mean_responses=float(np.mean([len(item.rewards) for item in long.values()])),
        accuracy=with_honest_width(found[0], sums[:, -1], bounds=(0.0, 1.0)),
        random=float(rows[:, 1].mean()),
        longest=float(rows[:, 2].mean()),
    )


@dataclass
class _List:
    """A list's responses with their rewards, and the responses that are worse than another one."""

    rewards: dict[str, float]
    worse: set[str]

    def add(self, pair: PreferencePair, rewards: Sequence[float]) -> None:
        self.rewards |= zip((pair.chosen, pair.rejected), rewards, strict=True)
        self.worse.add(pair.rejected if pair.label > 0.5 else pair.chosen)

    def shares(self) -> tuple[float, float, float]:
        """Probabilities that the highest reward, a random choice and the longest response select a best response."""
        best = self.rewards.keys() - self.worse
        by_reward = [text for text in self.rewards if self.rewards[text] == max(self.rewards.values())]
        by_length = [text for text in self.rewards if len(text) == max(map(len, self.rewards))]
        groups = (by_reward, list(self.rewards), by_length)
        first, second, third = (sum(text in best for text in group) / len(group) for group in groups)
        return first, second, third
