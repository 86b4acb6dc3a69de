"""Rules that score lists of responses, and best-of-n selection.

The rules of suites are a closed table of functions. A rule turns the rewards of rows into credits. Every score of a
suite is a tree of means over credits, so that intervals and differences of all suites come from totals over prompts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.metrics.estimate import UNKNOWN, Estimate
from rm_optimizer.core.metrics.intervals import cluster_bootstrap, cluster_totals, ratios, with_honest_width
from rm_optimizer.core.pairs.pair import PreferencePair, Prompt
from rm_optimizer.errors import DataError


class Tie(StrEnum):
    """Credit for rewards that are exactly equal."""

    wrong = "wrong"
    half = "half"
    shared = "shared"
    """The share of the responses with the highest reward that are best ones."""
    second = "second"
    """The second response of the row counts as preferred."""


@dataclass(frozen=True, eq=False)
class SuiteItem:
    """Row of a suite with all of its responses.

    Args:
        row: file and number of the row, for messages.
        prompt: text, or the messages before the responses.
        prompt_id: identity of the prompt.
        responses: responses by their place in the row; of lists of better and worse ones, the better ones come first.
        edges: places of the better and the worse response of each decided comparison.
        pairs: these comparisons as pairs, without equal or blank responses.
        is_second: True if the better response of a pair is the row's second one.
        group: group that the row belongs to.
        rule: name of the rule.
        tie: credit for equal rewards.
        metadata: values of columns that are not read.
    """

    row: str
    prompt: Prompt
    prompt_id: str
    responses: Mapping[int, str]
    edges: tuple[tuple[int, int], ...]
    pairs: tuple[PreferencePair, ...]
    is_second: bool
    group: str
    rule: str
    tie: Tie
    metadata: Mapping[str, Any]

    @property
    def better(self) -> list[int]:
        """Places of responses that are better than another one, each once."""
        return list(dict.fromkeys(better for better, _ in self.edges))

    @property
    def worse(self) -> list[int]:
        """Places of responses that are worse than another one, each once."""
        return list(dict.fromkeys(worse for _, worse in self.edges))


Place = TypeVar("Place", int, str)
Rewards = Mapping[int, float]
"""Rewards of the responses of a row by their place."""


class Credit(NamedTuple):
    """Score of a row, or of rows that are scored together.

    Args:
        group: group with the measure, such as `Math` or `chat/hard`.
        cluster: what is resampled together: the prompt, or twin prompts.
        value: the score.
    """

    group: str
    cluster: str
    value: float


def share_of_best(best: Collection[Place], values: Mapping[Place, float]) -> float:
    """Share of the responses with the highest value that are best ones."""
    top = [place for place, value in values.items() if value == max(values.values())]
    return sum(place in best for place in top) / len(top)


def kendall_tau(signs: Sequence[int]) -> float:
    """Kendall's tau over comparisons with a better response.

    Of n comparisons, C agree (1), D disagree (-1) and others are tied (0). `(C - D) / max(1, sqrt((C + D) n))` over n
    comparisons: tau-b with ties in the rewards alone (Kendall, 1945, doi:10.2307/2332303).

    Example:
        >>> kendall_tau([1, 1, -1, 0])
        0.2886751345948129
    """
    return sum(signs) / max(1.0, math.sqrt(sum(map(abs, signs)) * len(signs)))


Rule = Callable[[Sequence[tuple[SuiteItem, Rewards]]], Iterator[Credit]]


def _credit(item: SuiteItem, better: float, worse: float) -> float:
    """Credit of one comparison."""
    of_tie = {Tie.wrong: 0.0, Tie.half: 0.5, Tie.second: float(item.is_second)}
    return float(better > worse) if better != worse else of_tie.get(item.tie, 0.5)


def _pairs(rows: Sequence[tuple[SuiteItem, Rewards]]) -> Iterator[Credit]:
    """One credit a comparison.

    It is 1 if the better response has the higher reward.
    """
    for item, rewards in rows:
        for better, worse in item.edges:
            yield Credit(item.group, item.prompt_id, _credit(item, rewards[better], rewards[worse]))


def _best_of(rows: Sequence[tuple[SuiteItem, Rewards]]) -> Iterator[Credit]:
    """One credit a list.

    It is 1 if the highest reward belongs to a best response, one that is never the worse one.
    """
    for item, rewards in rows:
        if not item.edges:
            continue
        compared = dict.fromkeys([*item.better, *item.worse])
        share = share_of_best(compared.keys() - item.worse, {place: rewards[place] for place in compared})
        yield Credit(item.group, item.prompt_id, share if item.tie is Tie.shared else float(share == 1.0))


def _ties(rows: Sequence[tuple[SuiteItem, Rewards]]) -> Iterator[Credit]:
    """Parts of RewardBench 2's score of prompts with several right answers.

    Malik et al., 2025, arXiv:2506.01937. Rows `ref:N` have one right answer and rows `tied:N` several. `GROUP/ref` and
    `GROUP/tied` are 1 if all right answers have higher rewards than all wrong ones. With `s` the spread of the right
    answers of `tied:N`, and `m` the margin of the worst right over the best wrong one, `GROUP/spread` is 1 if `m_tied >
    s`, `GROUP/both` is 1 if `min(m_ref, m_tied) > s`, and `GROUP/gain` is `tanh(min(m_ref, m_tied) / s - 1)`, or the
    sign of the margin at 0.
    """
    found: dict[tuple[str, str], dict[str, tuple[float, float]]] = defaultdict(dict)
    for item, rewards in rows:
        kind, _, number = str(item.metadata.get("id")).partition(":")
        if kind not in ("ref", "tied") or not item.edges or (kind == "tied") != (len(item.better) > 1):
            raise DataError(
                f"{item.row}: expected an id ref:N with one right answer or tied:N with several, and wrong ones; got "
                f"{item.metadata.get('id')!r} with {len(item.better)} right and {len(item.worse)} wrong answers"
            )
        right = [rewards[place] for place in item.better]
        margin = min(right) - max(rewards[place] for place in item.worse)
        found[item.group, number][kind] = margin, max(right) - min(right)
    for (group, number), kinds in found.items():
        cluster = f"{group}:{number}"
        for kind, (margin, _) in kinds.items():
            yield Credit(f"{group}/{kind}", cluster, float(margin > 0))
        if len(kinds) == 2:
            (of_ref, _), (of_tied, spread) = kinds["ref"], kinds["tied"]
            least = min(of_ref, of_tied)
            yield Credit(f"{group}/spread", cluster, float(of_tied > spread))
            yield Credit(f"{group}/both", cluster, float(least > spread))
            gain = math.tanh(least / spread - 1) if spread else float((least > 0) - (least < 0))
            yield Credit(f"{group}/gain", cluster, gain)


def _matrix(rows: Sequence[tuple[SuiteItem, Rewards]]) -> Iterator[Credit]:
    """Three credits a row of equally many better and worse responses.

    The responses of both sides go from the plainest to the most styled form. They are the means over the cells in which
    the worse response has more style (`GROUP/hard`), as much (`GROUP/normal`) or less (`GROUP/easy`), as in RM-Bench
    (Liu et al., 2024, arXiv:2410.16184).
    """
    for item, rewards in rows:
        num, num_worse = len(item.better), len(item.worse)
        cells: dict[str, list[float]] = defaultdict(list)
        for better, worse in item.edges:
            column = worse - num
            level = "hard" if better < column else "normal" if better == column else "easy"
            cells[level].append(_credit(item, rewards[better], rewards[worse]))
        if num_worse != num or num < 2:
            counts = f"got {num} and {num_worse}"
            raise DataError(f"{item.row}: expected two chosen responses or more and as many rejected ones, {counts}")
        for level, credits in cells.items():
            yield Credit(f"{item.group}/{level}", item.prompt_id, sum(credits) / len(credits))


def _graph(rows: Sequence[tuple[SuiteItem, Rewards]]) -> Iterator[Credit]:
    """`GROUP/accuracy` and `GROUP/tau` (`kendall_tau`) over a row's different comparisons."""
    for item, rewards in rows:
        signs = [(rewards[a] > rewards[b]) - (rewards[a] < rewards[b]) for a, b in dict.fromkeys(item.edges)]
        if signs:
            yield Credit(f"{item.group}/accuracy", item.prompt_id, signs.count(1) / len(signs))
            yield Credit(f"{item.group}/tau", item.prompt_id, kendall_tau(signs))


RULES: Mapping[str, Rule] = {"pairs": _pairs, "best_of": _best_of, "ties": _ties, "matrix": _matrix, "graph": _graph}
"""The rules by name."""
BOUNDS: Mapping[str, tuple[float, float]] = {"tau": (-1.0, 1.0), "gain": (-1.0, 1.0)}
"""Least and greatest credit by measure; all others lie in [0, 1]."""


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
        every_best: share of lists whose best responses all have higher rewards than every other one.
        tau: mean over lists of Kendall's tau over their pairs (`kendall_tau`).
        by_subset: the same for the lists of each subset; empty if there are fewer than two.
    """

    num_lists: int
    mean_responses: float
    accuracy: Estimate
    random: float
    longest: float
    every_best: Estimate = UNKNOWN
    tau: Estimate = UNKNOWN
    by_subset: dict[str, BestOfN] = field(default_factory=dict)


def best_of_n(
    pairs: Sequence[PreferencePair],
    chosen: Float[np.ndarray, " pairs"],
    rejected: Float[np.ndarray, " pairs"],
    *,
    num_bootstrap: int,
    seed: int,
) -> BestOfN | None:
    """Best-of-n selection on the pairs that come from lists of responses.

    None if there are no such lists. The best responses of a list are those that are not the worse one in any of its
    pairs.

    Args:
        pairs: the pairs; pairs of one list have the same `metadata["group"]`.
        chosen: rewards of the pairs' chosen responses.
        rejected: rewards of the pairs' rejected responses.
        num_bootstrap: number of resamples of prompts for the interval.
        seed: seed of the resamples.
    """
    lists, subsets = dict[tuple[str, str], _List](), dict[tuple[str, str], str]()  # by prompt and list
    for pair, *rewards in zip(pairs, chosen.tolist(), rejected.tolist(), strict=True):
        if "group" in pair.metadata and pair.label != 0.5:
            key = (pair.prompt_id, f"{pair.metadata.get('source')} {pair.metadata['group']}")
            subsets[key] = str(pair.metadata.get("subset", ""))
            found = lists.setdefault(key, _List({}, set()))
            found.rewards.update(zip((pair.chosen, pair.rejected), rewards, strict=True))
            found.edges.add((pair.chosen, pair.rejected) if pair.label > 0.5 else (pair.rejected, pair.chosen))
    long = {key: item for key, item in lists.items() if len(item.rewards) >= FEWEST_RESPONSES}
    if not long:
        return None
    names = sorted({subsets[key] for key in long})
    parts = {name: {key: item for key, item in long.items() if subsets[key] == name} for name in names}
    by_subset = {name: _of_lists(part, num_bootstrap, seed) for name, part in parts.items()} if len(names) > 1 else {}
    return replace(_of_lists(long, num_bootstrap, seed), by_subset=by_subset)


def _of_lists(long: Mapping[tuple[str, str], _List], num_bootstrap: int, seed: int) -> BestOfN:
    rows = np.array([[*item.scores(), 1.0] for item in long.values()])
    sums = cluster_totals(rows, [prompt for prompt, _ in long])
    found = cluster_bootstrap(sums, ratios, num_bootstrap=num_bootstrap, seed=seed)
    bounds = ((0.0, 1.0), (0.0, 1.0), (-1.0, 1.0))
    accuracy, every_best, tau = (
        with_honest_width(each, sums[:, -1], bounds=ends) for each, ends in zip(found, bounds, strict=False)
    )
    mean_responses = float(np.mean([len(item.rewards) for item in long.values()]))
    return BestOfN(len(long), mean_responses, accuracy, found[3].value, found[4].value, every_best, tau)


class _List(NamedTuple):
    """Rewards and comparisons of a list's responses.

    A comparison is the better and the worse response.
    """

    rewards: dict[str, float]
    edges: set[tuple[str, str]]

    def scores(self) -> list[float]:
        """Best-of-n accuracy, whether the best lead, tau, and other choices.

        The other choices are a random response and the longest one.
        """
        worse = {worse for _, worse in self.edges}
        best = self.rewards.keys() - worse
        signs = [(self.rewards[a] > self.rewards[b]) - (self.rewards[a] < self.rewards[b]) for a, b in self.edges]
        leads = bool(best) and min(map(self.rewards.__getitem__, best)) > max(map(self.rewards.__getitem__, worse))
        of_others = len(best) / len(self.rewards), share_of_best(best, {text: len(text) for text in self.rewards})
        return [share_of_best(best, self.rewards), float(leads), kendall_tau(signs), *of_others]
