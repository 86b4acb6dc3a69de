"""Scores of models on a suite.

They have intervals over prompts, differences and leads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float
from scipy.stats import t as student_t

from rm_optimizer.core.classifier.quantization import computing_dtype, dtype_name
from rm_optimizer.core.metrics.effects import ERROR_RATE, holm_adjusted
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import StudentMean, cluster_bootstrap, cluster_totals, with_honest_width
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.model_files import TrainedOn, TrainedPairs
from rm_optimizer.errors import ConfigError
from rm_optimizer.evaluation.list_rules import BOUNDS, Credit
from rm_optimizer.evaluation.saved_model import ResponseScorer
from rm_optimizer.evaluation.suite import Suite, SuiteItems
from rm_optimizer.records.codec import NOT_STORED, JsonRecord, json_values
from rm_optimizer.records.files import replacing, write_text
from rm_optimizer.records.run_folder import SUITE_FILE as SUITE_FILE

CREDITS_FILE = "suite.parquet"
"""Credits of all rows of a table, with their group and cluster; `rm-opt leaderboard` compares models by them."""
LONGER, RANDOM = "longer wins", "random"
"""Rows of a table that are no models: the response with more characters wins, or one by chance."""
RESERVED = (LONGER, RANDOM, "group", "cluster")
"""Names in a table of credits that no model can have."""
NUM_DRAWS = 16
"""Number of random rewards over which the credits of `random` are averaged."""


@dataclass(frozen=True)
class SuiteScores(JsonRecord):
    """Scores of one model on a suite.

    Args:
        name: name of the model, or of a rule that is no model.
        is_model: False for a rule such as `longer wins`.
        scores: scores by name: averages, the official number first, then groups.
        num_ties: comparisons whose rewards are exactly equal.
        max_length: most tokens of a sequence; 0 for no model.
        dtype: type of the weights.
        num_prompt_cut: responses whose prompt lost tokens.
        num_response_cut: responses that lost tokens themselves.
        trained_on: overlap with the model's training pairs; None without a record of them.
    """

    name: str
    is_model: bool
    scores: dict[str, Estimate] = field(default_factory=dict)
    num_ties: int = 0
    max_length: int = 0
    dtype: str = "float32"
    num_prompt_cut: int = 0
    num_response_cut: int = 0
    trained_on: TrainedOn | None = None


@dataclass(frozen=True)
class SuiteDifference:
    """Difference of two models in the official number, paired by prompt.

    Args:
        first: name of the model with the higher score.
        second: name of the other.
        difference: score of the first less the score of the second.
        p_value: two-sided p-value against no difference.
        holm_p: `p_value` after Holm's correction over all pairs with a model.
    """

    first: str
    second: str
    difference: Estimate
    p_value: float
    holm_p: float


@dataclass(frozen=True)
class SuiteLead:
    """Claim that a model leads in a group or average.

    All claims of a result hold together in 95 % of suites.

    Args:
        group: name of the group or average.
        model: name of the model.
        low: lower end of the simultaneous interval of its difference to the next row of the table, above 0.
    """

    group: str
    model: str
    low: float


@dataclass(frozen=True)
class SuiteResult(JsonRecord, indent=2, rows="rows"):
    """Result of models on a suite, saved as `suite.json`.

    Args:
        suite: the suite's options.
        fingerprint: identity of the rows.
        num_rows: rows that are scored.
        num_responses: different responses.
        models: the models, and rows that are no models.
        differences: differences of models in the official number.
        leads: claims that a model leads somewhere, over all rows of the table.
        notes: what to know when reading the numbers.
        credits: credits of the models, in a file next to the JSON.
    """

    suite: dict[str, Any]
    fingerprint: str
    num_rows: int
    num_responses: int
    models: tuple[SuiteScores, ...]
    differences: tuple[SuiteDifference, ...] = ()
    leads: tuple[SuiteLead, ...] = ()
    notes: tuple[str, ...] = ()
    credits: SuiteCredits | None = field(default=None, compare=False, metadata=NOT_STORED)

    @property
    def score(self) -> str:
        """Name of the official number."""
        return str(self.suite["score"])

    def rows(self) -> list[dict[str, Any]]:
        """A row for each model and name."""
        found = ((model.name, name, score) for model in self.models for name, score in model.scores.items())
        return [{"model": model, "name": name, **json_values(score)} for model, name, score in found]

    def scored(self, credits: SuiteCredits, *, num_bootstrap: int = 1000, seed: int = 0) -> SuiteResult:
        """Result with scores, differences and leads from credits of its models.

        Args:
            credits: credits of the models.
            num_bootstrap: number of resamples of prompts for the intervals.
            seed: seed of the resamples.
        """
        options: Any = {"num_bootstrap": num_bootstrap, "seed": seed}
        models = tuple(
            replace(model, scores={name: credits.estimate(name, model.name, **options) for name in credits.names})
            for model in self.models
        )
        differences, leads = credits.differences(models, **options), credits.leads(models)
        return replace(self, models=models, differences=tuple(differences), leads=tuple(leads), credits=credits)

    def write(self, folder: Path) -> None:
        """Write `suite.json` and `suite.parquet`, each completely or not at all."""
        assert self.credits is not None
        self.credits.write(folder / CREDITS_FILE)
        write_text(folder / SUITE_FILE, self.to_json() + "\n")


@dataclass(frozen=True)
class SuiteCredits:
    """Credits of several models on the same rows.

    Args:
        suite: the suite.
        groups: group of each credit.
        clusters: cluster of each credit.
        values: credits by the name of the model.
    """

    suite: Suite
    groups: tuple[str, ...]
    clusters: tuple[str, ...]
    values: Mapping[str, Float[np.ndarray, " credits"]]

    @classmethod
    def read(cls, path: Path, result: SuiteResult) -> SuiteCredits:
        """Credits that `write` stored for the models of a result.

        Raises:
            ConfigError: if the file is missing, damaged or of other models.
        """
        try:
            table = pq.read_table(path).to_pydict()
            values = {model.name: np.array(table[model.name]) for model in result.models}
        except (OSError, pa.ArrowException, KeyError) as error:
            raise ConfigError(f"{path} is missing or damaged; evaluate the models of its folder again") from error
        return cls(Suite.from_values(result.suite), tuple(table["group"]), tuple(table["cluster"]), values)

    def write(self, path: Path) -> None:
        """Write a row for each credit: group, cluster and each model's credit."""
        columns = {"group": self.groups, "cluster": self.clusters, **self.values}
        with replacing(path) as temporary:
            pq.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), temporary)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all scores: the official number, averages, groups."""
        averages = [name for name in self.suite.average if self._weights(name)]
        return tuple(dict.fromkeys(sorted([*averages, *self._positions], key=lambda name: name != self.suite.score)))

    @cached_property
    def _clusters(self) -> np.ndarray:
        return np.unique(np.array(self.clusters), return_inverse=True)[1]

    @cached_property
    def _positions(self) -> dict[str, np.ndarray]:
        groups = np.array(self.groups)
        return {group: np.flatnonzero(groups == group) for group in dict.fromkeys(self.groups)}

    def estimate(self, name: str, first: str, second: str | None = None, *, num_bootstrap: int, seed: int) -> Estimate:
        """Score of a model, or difference of two, with an interval.

        There is one over clusters if every group has two. A score is a sum over groups of a weight times a mean of
        credits. Without one of the `n` clusters of a group, it changes by the weight times `(cluster's credits - its
        count * mean) / (count * (1 - 1 / n))`. The changes are resampled, so that the cost does not grow with the
        number of groups.

        Args:
            name: one of `names`.
            first: name of the model.
            second: name of a model whose score is subtracted.
            num_bootstrap: number of resamples; 0 gives a standard error only.
            seed: seed of the resamples.
        """
        weights = self._weights(name)
        places = [self._positions[leaf] for leaf in weights]
        ends = [BOUNDS.get(group.rpartition("/")[2], (0.0, 1.0)) for group in weights]
        bounds = np.array([*weights.values()]) @ np.array(ends)
        credits = self.values[first]
        if second is not None:
            credits, bounds = credits - self.values[second], bounds - bounds[::-1]
        means = [credits[place].mean() for place in places]
        value, rows = float(np.dot([*weights.values()], means)), list[np.ndarray]()
        for place, weight, mean in zip(places, weights.values(), means, strict=True):
            if (num := len(np.unique(self._clusters[place]))) < 2:
                return Estimate(value, None, num)
            change = (credits[place] - mean) * weight / (len(place) * (1 - 1 / num))
            rows.append(np.stack([change, np.ones(len(place))], axis=1))
        sums = cluster_totals(np.concatenate(rows), self._clusters[np.concatenate(places)].tolist())
        options: Any = {"num_bootstrap": num_bootstrap, "seed": seed}
        found = cluster_bootstrap(sums[:, :1], lambda totals: value + totals, **options)[0]
        return with_honest_width(found, sums[:, 1], bounds=(bounds[0], bounds[1]))

    def _weights(self, name: str) -> dict[str, float]:
        return self.suite.weights(name, {group: len(place) for group, place in self._positions.items()})

    def differences(self, models: Sequence[SuiteScores], *, num_bootstrap: int, seed: int) -> list[SuiteDifference]:
        """Differences in the official number of all pairs with a model."""
        score = self.names[0]
        ordered = sorted(models, key=lambda model: -model.scores[score].value)
        pairs = [(a.name, b.name) for a, b in combinations(ordered, 2) if a.is_model or b.is_model]
        values = np.nan_to_num([self._tested(score, *pair).p_different for pair in pairs], nan=1.0)
        return [
            SuiteDifference(*pair, self.estimate(score, *pair, num_bootstrap=num_bootstrap, seed=seed), *p_values)
            for pair, *p_values in zip(pairs, values.tolist(), holm_adjusted(values).tolist(), strict=True)
        ]

    def _tested(self, name: str, first: str, second: str) -> StudentMean:
        """Difference of two models with the jackknife's error over clusters."""
        found = self.estimate(name, first, second, num_bootstrap=0, seed=0)
        error = np.nan if found.standard_error is None else found.standard_error
        return StudentMean(found.value, error, max(1, found.num_samples - 1), found.num_samples)

    def leads(self, models: Sequence[SuiteScores]) -> list[SuiteLead]:
        """Models that lead over all others in a group or average.

        The claims follow from intervals that hold simultaneously. Each difference has Student's interval at `0.05 /
        (names * models * (models - 1))` on one side (Bonferroni), so that the probability of any false claim is at most
        0.05, whichever model and group it is about.
        """
        found, num_tests = [], len(self.names) * len(models) * (len(models) - 1)
        for name in self.names:
            first, *others = sorted(models, key=lambda model: -model.scores[name].value)
            tests = [self._tested(name, first.name, other.name) for other in others]
            ends = [each.standard_error * student_t.isf(ERROR_RATE / num_tests, each.freedom) for each in tests]
            low = float(np.min([each.value - end for each, end in zip(tests, ends, strict=True)]))
            if first.is_model and low > 0:
                found.append(SuiteLead(name, first.name, low))
        return found


def score_on_suite(
    model: BradleyTerryRM, name: str, items: SuiteItems, scorer: ResponseScorer
) -> tuple[SuiteScores, list[Credit]]:
    """Facts about a model on a suite, and its credits.

    Each different response is scored once. The rewards stay in a folder, so that a repeated call scores nothing again.

    Args:
        model: the model, on its device.
        name: its name, from which the record of its training pairs is read.
        items: rows of the suite.
        scorer: scorer of the responses, in whose folder the rewards stay.

    Raises:
        CheckpointError: if a reward is not finite, or the record of the model's training pairs is damaged.
        DataError: if a conversation cannot be rendered.
    """
    conversations = [(prompt, text) for (_, text), prompt in items.responses.items()]
    scored = scorer.rewards(model, conversations, items.fingerprint, keeps=True)
    rewards = {key: row.reward for key, row in zip(items.responses, scored, strict=True)}
    sides = [
        [rewards[item.prompt_id, item.responses[place]] for place in edge]
        for item in items.items
        for edge in item.edges
    ]
    trained = TrainedPairs.recorded(name)
    facts = SuiteScores(
        name,
        is_model=True,
        num_ties=sum(better == worse for better, worse in sides),
        max_length=model.max_length,
        dtype=dtype_name(computing_dtype(model.model)),
        num_prompt_cut=sum(row.prompt_cut > 0 for row in scored),
        num_response_cut=sum(row.response_cut > 0 for row in scored),
        trained_on=None if trained is None else trained.count([pair for item in items.items for pair in item.pairs]),
    )
    return facts, items.credits(rewards.__getitem__)


def credits_on(items: SuiteItems, found: Mapping[str, Sequence[Credit]]) -> SuiteCredits:
    """Table of the credits that `items.credits` gave, by model.

    There must be one model at least.
    """
    groups, clusters, _ = zip(*next(iter(found.values())), strict=True)
    values = {name: np.array([each.value for each in of]) for name, of in found.items()}
    return SuiteCredits(items.suite, groups, clusters, values)


def official_number(items: SuiteItems, rewards: Sequence[float]) -> float:
    """A model's official number on a suite, from its rewards.

    The rewards are of the different responses, in their order.

    Raises:
        DataError: if a row lacks what its rule needs.
    """
    found = items.credits(dict(zip(items.responses, rewards, strict=True)).__getitem__)
    return credits_on(items, {"": found}).estimate(items.suite.score, "", num_bootstrap=0, seed=0).value


def suite_result(
    items: SuiteItems, found: Sequence[tuple[SuiteScores, Sequence[Credit]]], *, num_bootstrap: int, seed: int
) -> SuiteResult:
    """Result of models on a suite, with `longer wins` and `random`.

    Args:
        items: rows of the suite.
        found: facts and credits of each model.
        num_bootstrap: number of resamples of prompts for the intervals.
        seed: seed of the resamples and of `random`.
    """
    rng, keys, suite = np.random.default_rng(seed), [*items.responses], items.suite
    credits = {facts.name: of for facts, of in found} | {LONGER: items.credits(lambda key: len(key[1]))}
    draws = [dict(zip(keys, rng.random(len(keys)).tolist(), strict=True)) for _ in range(NUM_DRAWS)]
    of_draws = [[each.value for each in items.credits(draw.__getitem__)] for draw in draws]
    table = credits_on(items, credits)
    table = replace(table, values={**table.values, RANDOM: np.mean(of_draws, axis=0)})
    models = [*(facts for facts, _ in found), *(SuiteScores(name, is_model=False) for name in (LONGER, RANDOM))]
    protocol = [f"the published numbers are at {suite.protocol}"] if suite.protocol else []
    notes = [*items.notes, f"rule: {suite.source}", *protocol]
    sizes = len(items.items), len(items.responses)
    about = SuiteResult(json_values(suite), items.fingerprint, *sizes, tuple(models), notes=tuple(notes))
    return about.scored(table, num_bootstrap=num_bootstrap, seed=seed)
