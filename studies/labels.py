"""Study of the labels that acquisition functions save: `python studies/labels.py FOLDER [--data PAIRS …]`.

The pairs are split many times into a pool and test pairs. Every rule starts with the same random labels and asks for
more in batches. In each round a linear Bradley-Terry model of fixed features is fitted again. A second random draw is
the placebo. A split with a result is only read, so a stopped command can be repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from jaxtyping import Float
from scipy.linalg import cho_factor, solve_triangular
from scipy.optimize import isotonic_regression
from scipy.special import expit, log_expit

from rm_optimizer import BradleyTerryRM, PreferenceDataset, PreferencePair
from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate
from rm_optimizer.core.metrics.intervals import student_mean
from rm_optimizer.core.pairs.pair import conversation_groups
from rm_optimizer.data_efficiency.feature_rules import RULES, acquisition_function
from rm_optimizer.data_efficiency.margin_analysis import fit_linear_reward, fixed_differences, turned
from rm_optimizer.data_efficiency.pool import Pool
from rm_optimizer.data_efficiency.scaling import fit_power_laws
from rm_optimizer.errors import ConfigError, DataError, RMOptimizerError
from rm_optimizer.records.codec import json_values
from rm_optimizer.records.files import write_text
from rm_optimizer.records.orders import random_positions
from rm_optimizer.reporting.tables import new_table, output_console

NUM_FEATURES, NUM_POOL, NUM_TEST, NUM_PROTOTYPES = 24, 3000, 2000, 100
"""Size of a synthetic pool."""
NOISE = 0.1
"""Deviation of a pair from its prototype in a redundant pool, relative to a feature's standard deviation."""
COPIED_SHARE, NUM_COPIED, COPY_NOISE = 0.9, 2, 0.05
"""Share of copies in a duplicated pool, number of copied pairs, and relative deviation of the copies."""
MARGIN_STD = 2.0
"""Standard deviation of the oracle's margins over independent pairs."""


class SyntheticPool(StrEnum):
    """Pools whose oracle is a linear Bradley-Terry model of Gaussian features with variances 1, 1/2, 1/3, ….

    `iid` has independent pairs. In `redundant` every pair is close to one of 100 prototypes, the r-th with a frequency
    proportional to 1/r; test pairs have the same distribution. `shifted` has the same pool and independent test pairs.
    In `duplicated` nine of ten pairs are near-copies of two pairs, and the others are independent; test pairs have the
    same distribution.
    """

    iid = "iid"
    redundant = "redundant"
    shifted = "shifted"
    duplicated = "duplicated"


@dataclass(frozen=True)
class LabelSplit:
    """A pool of pairs to choose from, with their labels, and pairs to test on.

    Args:
        differences: features of the first response less those of the second, of the pool.
        labels: 1 where the first response of a pair was preferred, else 0.
        test_differences: differences of the test pairs.
        test_chances: probability that the first response of a test pair is preferred.
        lengths: logarithm of the ratio of the first response's length to the other's, in the pool; 0 without texts.
        groups: number of the conversation of each pair in the pool.
    """

    differences: Float[np.ndarray, "pool features"]
    labels: Float[np.ndarray, " pool"]
    test_differences: Float[np.ndarray, "test features"]
    test_chances: Float[np.ndarray, " test"]
    lengths: Float[np.ndarray, " pool"]
    groups: np.ndarray

    def flipped(self, share: float, seed: int) -> LabelSplit:
        """The split with a random share of the pool's labels flipped; a share of 0 flips none."""
        is_wrong = np.random.default_rng([seed, 2]).random(len(self.labels)) < share
        return replace(self, labels=np.where(is_wrong, 1 - self.labels, self.labels))


def synthetic_split(pool: SyntheticPool, seed: int, *, margin_std: float = MARGIN_STD) -> LabelSplit:
    """A synthetic pool with labels by its oracle; each seed has its own oracle.

    Args:
        pool: kind of the pool.
        seed: seed of the oracle and the pairs.
        margin_std: standard deviation of the oracle's margins over independent pairs; a large one leaves no noise.
    """
    generator = np.random.default_rng([seed, 0])
    scales = np.arange(1, NUM_FEATURES + 1) ** -0.5
    weights = generator.normal(size=NUM_FEATURES)
    weights *= margin_std / np.linalg.norm(weights * scales)
    prototypes = generator.normal(size=(NUM_PROTOTYPES, NUM_FEATURES)) * scales
    often = 1 / np.arange(1, NUM_PROTOTYPES + 1)

    def near_prototypes(num: int) -> np.ndarray:
        drawn = prototypes[generator.choice(NUM_PROTOTYPES, size=num, p=often / often.sum())]
        return np.asarray(drawn + NOISE * scales * generator.normal(size=drawn.shape))

    def independent(num: int) -> np.ndarray:
        return np.asarray(generator.normal(size=(num, NUM_FEATURES)) * scales)

    def with_copies(num: int) -> np.ndarray:
        copied = prototypes[generator.integers(NUM_COPIED, size=num)]
        copied = copied + COPY_NOISE * scales * generator.normal(size=copied.shape)
        return np.where(generator.random((num, 1)) < COPIED_SHARE, copied, independent(num))

    drawn, tested = {
        SyntheticPool.iid: (independent, independent),
        SyntheticPool.redundant: (near_prototypes, near_prototypes),
        SyntheticPool.shifted: (near_prototypes, independent),
        SyntheticPool.duplicated: (with_copies, with_copies),
    }[pool]
    differences, test = drawn(NUM_POOL), tested(NUM_TEST)
    labels = (generator.random(NUM_POOL) < expit(differences @ weights)).astype(float)
    return LabelSplit(differences, labels, test, expit(test @ weights), np.zeros(NUM_POOL), np.arange(NUM_POOL))


PLACEBO_BOUND = 0.10
"""Largest absolute saving of a second random draw for a study to be accepted."""
RANDOM, PLACEBO = "random", "random_again"
RIDGES = tuple(float(ridge) for ridge in 10.0 ** np.arange(-1.0, 3.51, 0.5))
"""Penalties to choose from."""
TUNING_SPLITS = 10
"""Number of splits on which the penalty for each number of labels is chosen; no trial has their seeds."""
_TUNING_SEED = 1_000_000
NUM_MEMBERS = 32
"""Draws from the posterior that serve as members of an ensemble."""


@dataclass(frozen=True)
class LabelSaving:
    """A rule compared with a random draw at one number of labels.

    Args:
        rule: name of the rule.
        saving: share of labels saved at the random draw's accuracy at `budget`; -1 if twice the budget is too few.
        accuracy_gain: accuracy at `budget` less the random draw's.
        nll_gain: NLL of the random draw at `budget` less the rule's, in nats.
    """

    rule: str
    saving: Estimate
    accuracy_gain: Estimate
    nll_gain: Estimate


@dataclass(frozen=True)
class LabelSavings:
    """Rules compared with a random draw over the same splits.

    Args:
        pool: name of the pool.
        budget: number of labels at which rules are compared.
        num_splits: number of random splits into pool and test pairs.
        rules: the rules, best saving first, including the second random draw.
        is_accepted: True if the second random draw saves at most a tenth, with an interval that contains 0.
    """

    pool: str
    budget: int
    num_splits: int
    rules: tuple[LabelSaving, ...]
    is_accepted: bool


def label_savings(
    pool: str,
    budgets: Sequence[int],
    accuracy: Mapping[str, Float[np.ndarray, "splits budgets"]],
    nll: Mapping[str, Float[np.ndarray, "splits budgets"]],
    *,
    num_bootstrap: int = 1000,
) -> LabelSavings:
    """Compare rules with a random draw over splits.

    The saving at budget B is ``1 - n / B``, with `n` the number of labels at which the rule's curve has the accuracy of
    the random draw's curve at B. Each curve is a power law ``c - a n^-b`` fitted to the mean over splits, or a monotone
    fit if no such law rises. If `n` is beyond the largest budget, it counts as twice B, a saving of -1. Intervals are
    percentiles of a bootstrap over splits, with the same resamples for all rules.

    Args:
        pool: name of the pool.
        budgets: numbers of labels, ascending, the largest twice the one at which the rules are compared.
        accuracy: accuracy of each rule, on the same splits.
        nll: NLL of each rule, on the same splits.
        num_bootstrap: resamples.

    Raises:
        DataError: if there are fewer than two splits.
    """
    num_splits, budget = len(accuracy[RANDOM]), budgets[-1] // 2
    if num_splits < 2:
        raise DataError(f"savings need at least 2 splits, got {num_splits}")
    labels = np.asarray(budgets, dtype=float)
    generator = np.random.default_rng(0)
    counts = generator.multinomial(num_splits, np.full(num_splits, 1 / num_splits), size=num_bootstrap) / num_splits
    shares = np.concatenate([np.full((1, num_splits), 1 / num_splits), counts])  # the data first, then the resamples
    smoothed = fitted(labels, shares @ accuracy[RANDOM])
    target = np.array([np.interp(np.log(budget), np.log(labels), curve) for curve in smoothed])
    place = list(budgets).index(budget)
    rules = [
        LabelSaving(
            rule,
            _saving(labels_needed(labels, fitted(labels, shares @ accuracy[rule]), target), budget, num_splits),
            student_mean(accuracy[rule][:, place] - accuracy[RANDOM][:, place]),
            student_mean(nll[RANDOM][:, place] - nll[rule][:, place]),
        )
        for rule in accuracy
        if rule != RANDOM
    ]
    rules.sort(key=lambda found: -found.saving.value)
    second = next(found.saving for found in rules if found.rule == PLACEBO)
    holds_zero = second.low is not None and second.high is not None and second.low <= 0 <= second.high
    return LabelSavings(pool, budget, num_splits, tuple(rules), abs(second.value) <= PLACEBO_BOUND and holds_zero)


def _saving(reached: Float[np.ndarray, " curves"], budget: int, num_splits: int) -> Estimate:
    """Saving, from the numbers of labels that the curve of the data (first) and of each resample needs."""
    savings = np.maximum(1 - reached / budget, -1.0).round(9)  # an equal curve saves 0, not rounding
    low, high = np.quantile(savings[1:], [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return Estimate(float(savings[0]), float(savings[1:].std()), num_splits, float(low), float(high))


def fitted(
    labels: Float[np.ndarray, " budgets"], curves: Float[np.ndarray, "curves budgets"]
) -> Float[np.ndarray, "curves budgets"]:
    """Curves smoothed to rise with the labels: the best power law for each, or a monotone fit if no law rises.

    Args:
        labels: numbers of labels, ascending.
        curves: accuracies at these numbers.
    """
    best = fit_power_laws(labels, curves).at(labels)
    for place in np.flatnonzero(np.isnan(best[:, 0])):
        best[place] = isotonic_regression(curves[place]).x
    return best


def labels_needed(
    labels: Float[np.ndarray, " budgets"],
    curves: Float[np.ndarray, "curves budgets"],
    targets: Float[np.ndarray, " curves"],
) -> Float[np.ndarray, " curves"]:
    """Numbers of labels at which rising curves reach their targets, linear in log labels; infinite if they do not.

    A target below a curve's start is reached at its start.
    """
    needed = np.full(len(curves), np.inf)
    for place, (curve, target) in enumerate(zip(curves, targets, strict=True)):
        if curve[-1] >= target:
            last = int(np.argmax(curve >= target)) + 1  # a level is reached where it begins
            needed[place] = np.exp(np.interp(target, curve[:last], np.log(labels[:last])))
    return needed


@dataclass(frozen=True)
class LabelStudy:
    """Numbers of labels that all trials of a pool share.

    Args:
        budget: number of labels at which rules are compared; curves extend to twice as many.
        start: number of random labels that every rule starts with.
        batch: number of labels in each round.
        flips: share of the pool's labels to flip.
    """

    budget: int = 512
    start: int = 64
    batch: int = 64
    flips: float = 0.0

    def __post_init__(self) -> None:
        if self.start < 2 or self.batch < 1 or self.budget <= self.start or (self.budget - self.start) % self.batch:
            raise ConfigError(
                f"--budget must be --start and a multiple of --batch labels, got {self.budget}, {self.start} and "
                f"{self.batch}"
            )
        if not 0 <= self.flips < 0.5:
            raise ConfigError(f"--flips must lie in [0, 0.5), got {self.flips}")

    @property
    def budgets(self) -> tuple[int, ...]:
        """Numbers of labels after each round."""
        return tuple(range(self.start, 2 * self.budget + 1, self.batch))


@dataclass(frozen=True)
class LabeledFeatures:
    """Real pairs as features.

    Args:
        differences: features of the chosen response less those of the rejected one.
        groups: number of each pair's conversation; splits keep a conversation on one side.
        lengths: logarithm of the ratio of the chosen response's length to the rejected one's.
    """

    differences: Float[np.ndarray, "pairs features"]
    groups: np.ndarray
    lengths: Float[np.ndarray, " pairs"]

    @classmethod
    def of(cls, pairs: Sequence[PreferencePair], differences: Float[np.ndarray, "pairs features"]) -> LabeledFeatures:
        """Features of these pairs, which must be plain preferences.

        Raises:
            DataError: if a label is not 1.
        """
        for number, pair in enumerate(pairs):
            if pair.label != 1:
                raise DataError(
                    f"pair {number + 1} has the label {pair.label}; a study compares plain preferences, so leave out "
                    "pairs whose label is not 1"
                )
        _, groups = np.unique(conversation_groups([pair.prompt for pair in pairs]), return_inverse=True)
        return cls(differences, groups, np.array([np.log(len(p.chosen)) - np.log(len(p.rejected)) for p in pairs]))

    def split(self, seed: int, *, test_share: float = 0.3) -> LabelSplit:
        """Random split of the conversations into pool and test, with each pair's responses in random order."""
        num_groups = int(self.groups.max()) + 1
        tested = np.isin(self.groups, random_positions(num_groups, round(test_share * num_groups), [seed, 0]))
        differences, labels = turned(self.differences, seed)
        lengths = self.lengths * (2 * labels - 1)
        kept = (lengths[~tested], self.groups[~tested])
        return LabelSplit(differences[~tested], labels[~tested], differences[tested], labels[tested], *kept)


@dataclass(frozen=True)
class PairPool:
    """A pool under its name, which splits by a seed.

    Args:
        name: name of the pool in tables.
        identity: values that tell the pool from others, for the names of trials.
        split: the split of a seed.
    """

    name: str
    identity: Mapping[str, Any]
    split: Callable[[int], LabelSplit]


def real_pool(data: Sequence[str], model: str | None, name: str | None) -> PairPool:
    """Pool of real pairs, with the last layer of a model as features, or words, length and question marks."""
    pairs = PreferenceDataset(list(data))
    scorer = None if model is None else BradleyTerryRM.from_pretrained(model)
    features = LabeledFeatures.of(pairs, fixed_differences(pairs, scorer))
    default = f"{Path(data[0]).name.partition('.')[0]}{'' if model is None else f' by {Path(model).name}'}"
    content = hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in vars(features).values()))
    return PairPool(name or default, {"content": content.hexdigest()}, features.split)


def stored(folder: Path, identity: Mapping[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Result of a trial: read from its file in `trials/`, else measured and written.

    Args:
        folder: folder of the study.
        identity: values that determine the result.
        measure: function that measures it.
    """
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / "trials" / f"{name}.json"
    if not path.is_file():
        write_text(path, json.dumps({"trial": dict(identity), "values": measure()}) + "\n")
    return dict(json.loads(path.read_text())["values"])


def tuned_ridges(study: LabelStudy, pool: PairPool) -> list[float]:
    """Penalty for each number of labels: the one with the lowest mean test NLL of random draws, on separate splits."""
    totals = np.zeros((len(study.budgets), len(RIDGES)))
    for number in range(TUNING_SPLITS):
        seed = _TUNING_SEED + number
        split = pool.split(seed).flipped(study.flips, seed)
        order = np.random.default_rng(seed).permutation(len(split.labels))
        for row, labels in enumerate(study.budgets):
            known = order[:labels]
            for column, ridge in enumerate(RIDGES):
                weights = fit_linear_reward(split.differences[known], split.labels[known], ridge=ridge)
                totals[row, column] += tested(weights, split.test_differences, split.test_chances)[1]
    return [RIDGES[column] for column in totals.argmin(axis=1)]


def measure_split(
    study: LabelStudy, pool: PairPool, ridges: Sequence[float], seed: int
) -> dict[str, list[list[float]]]:
    """Accuracies and NLLs of every rule after each round on one split."""
    split = pool.split(seed).flipped(study.flips, seed)
    found = {}
    for rule in (*RULES, PLACEBO):  # each with its own seed, which does not depend on other rules
        rounds = _rounds(split, study, rule, ridges, [seed, crc32(rule.encode())])
        scores = [tested(weights, split.test_differences, split.test_chances) for weights in rounds]
        found[rule] = [list(column) for column in zip(*scores, strict=True)]
    return found


def _rounds(
    split: LabelSplit, study: LabelStudy, rule: str, ridges: Sequence[float], seed: Sequence[int]
) -> Iterator[Float[np.ndarray, " hidden"]]:
    """Weights of each round of one rule; the first labels depend only on the split."""
    acquire = acquisition_function(RANDOM if rule == PLACEBO else rule)
    generator = np.random.default_rng([*seed, 0])
    is_labeled = np.zeros(len(split.labels), dtype=bool)
    is_labeled[np.random.default_rng([seed[0], 3]).permutation(len(split.labels))[: study.start]] = True
    for turn, (labels, ridge) in enumerate(zip(study.budgets, ridges, strict=True)):
        known = split.differences[is_labeled]
        weights = fit_linear_reward(known, split.labels[is_labeled], ridge=ridge)
        yield weights
        if labels < study.budgets[-1]:
            margins = sampled_margins(weights, known, ridge, split.differences, NUM_MEMBERS, generator)
            pool = Pool(margins, split.lengths, is_labeled, split.differences)
            is_labeled[acquire.select(pool, study.batch, seed=int(generator.integers(2**31)) + turn)] = True


def sampled_margins(
    weights: Float[np.ndarray, " hidden"],
    known: Float[np.ndarray, "known hidden"],
    ridge: float,
    differences: Float[np.ndarray, "pairs hidden"],
    num_members: int,
    generator: np.random.Generator,
) -> Float[np.ndarray, "members pairs"]:
    """Margins by members drawn from the Laplace posterior ``N(weights, H^-1)``, with ``H`` of the known pairs."""
    chances = expit(known @ weights)
    curved = known * (chances * (1 - chances))[:, None]
    factor = cho_factor(known.T @ curved + ridge * np.eye(len(weights)), lower=True)[0]
    noise = generator.standard_normal((len(weights), num_members))
    members = weights[:, None] + solve_triangular(factor, noise, lower=True, trans="T")
    return np.asarray((differences @ members).T)


def tested(
    weights: Float[np.ndarray, " features"],
    differences: Float[np.ndarray, "test features"],
    chances: Float[np.ndarray, " test"],
) -> tuple[float, float]:
    """Expected accuracy and NLL on test pairs whose first response is preferred with these probabilities."""
    margins: Float[np.ndarray, " test"] = differences @ weights
    right = np.where(margins > 0, chances, np.where(margins < 0, 1 - chances, 0.5))
    nll = -chances * log_expit(margins) - (1 - chances) * log_expit(-margins)
    return float(right.mean()), float(nll.mean())


def run_pool(
    folder: Path, study: LabelStudy, pool: PairPool, num_splits: int, num_bootstrap: int = 1000
) -> LabelSavings:
    """Savings in a pool, from its stored trials and those that are missing.

    Raises:
        DataError: if the pool has fewer pairs than twice the budget, or there are fewer than two splits.
    """
    largest = len(pool.split(0).labels)
    if largest < 2 * study.budget:
        raise DataError(
            f"pool '{pool.name}' has {largest:,} pairs to choose from, fewer than twice --budget {study.budget}; "
            "lower it"
        )
    identity = {**pool.identity, **asdict(study)}
    ridges = stored(folder, identity, lambda: {"ridges": tuned_ridges(study, pool)})["ridges"]
    splits = []
    for seed in range(num_splits):
        splits.append(stored(folder, {**identity, "split": seed}, partial(measure_split, study, pool, ridges, seed)))
    accuracy, nll = ({rule: np.array([one[rule][kind] for one in splits]) for rule in splits[0]} for kind in (0, 1))
    name = f"{pool.name}, {study.flips:.0%} flipped" if study.flips else pool.name
    return label_savings(name, study.budgets, accuracy, nll, num_bootstrap=num_bootstrap)


def points(gain: Estimate) -> str:
    """A gain in accuracy in points, with its interval."""
    if gain.value == gain.standard_error == 0:
        return "0"
    interval = "" if gain.low is None or gain.high is None else f" [{100 * gain.low:+.2f}, {100 * gain.high:+.2f}]"
    return f"{100 * gain.value:+.2f}{interval}"


def show(pool: LabelSavings) -> None:
    """Print a pool's table, with a warning below if the placebo refutes it."""
    console = output_console()
    title = f"{pool.pool}: labels saved at {pool.budget:,} labels, {pool.num_splits} splits"
    table = new_table(title, "rule", "saving", "accuracy, points", "NLL, nats")
    for rule in pool.rules:
        name = f"{rule.rule} (placebo)" if rule.rule == PLACEBO else rule.rule
        table.add_row(name, f"{rule.saving:.0%}", points(rule.accuracy_gain), f"{rule.nll_gain:+.4f}")
    console.print(table)
    if not pool.is_accepted:
        saved = next(rule.saving.value for rule in pool.rules if rule.rule == PLACEBO)
        console.print(
            f"warning: in '{pool.pool}' the second random draw 'saves' {saved:.0%}, which is not nothing; no saving of "
            "this pool is shown; add splits, or a pool with more to learn",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pool_arguments(parser)
    parser.add_argument("--pool", action="append", choices=[*SyntheticPool], help="a synthetic pool, default: all")
    parser.add_argument("--splits", type=int, default=40, help="random splits into pool and test pairs")
    parser.add_argument("--budget", type=int, default=512, help="number of labels at which rules are compared")
    parser.add_argument("--start", type=int, default=64, help="random labels that every rule starts with")
    parser.add_argument("--batch", type=int, default=64, help="labels in each round")
    parser.add_argument("--flips", type=float, default=0.0, help="share of the pool's labels to flip, in [0, 0.5)")
    parser.add_argument("--bootstrap", type=int, default=1000, help="resamples of splits for the intervals")
    given = parser.parse_args()
    try:
        if given.data and given.pool:
            raise ConfigError("--pool names a synthetic pool, and --data real pairs; leave one out")
        study = LabelStudy(given.budget, given.start, given.batch, given.flips)
        kinds = [SyntheticPool(kind) for kind in given.pool or SyntheticPool]
        pools = chosen_pools(given, [PairPool(kind, {"pool": kind}, partial(synthetic_split, kind)) for kind in kinds])
        found = [run_pool(given.folder, study, pool, given.splits, given.bootstrap) for pool in pools]
    except RMOptimizerError as error:
        parser.error(str(error))
    write_text(given.folder / "savings.json", json.dumps(json_values(found), indent=1) + "\n")
    for pool in found:
        show(pool)
    print(f"numbers: {given.folder / 'savings.json'}")


def add_pool_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder and the options of `chosen_pools`."""
    parser.add_argument("folder", type=Path, help="folder of trials and result")
    parser.add_argument("--data", action="append", default=[], help="preference pairs; default: synthetic pools")
    parser.add_argument("--model", help="model whose last-layer features are used, in place of words and lengths")
    parser.add_argument("--name", help="name of the pool in the tables; default: the file's")


def chosen_pools(given: argparse.Namespace, synthetic: Sequence[PairPool]) -> Sequence[PairPool]:
    """The pool of real pairs that the options name, or the synthetic ones.

    Raises:
        ConfigError: if options of real pairs are given without real pairs.
    """
    if given.data:
        return [real_pool(given.data, given.model, given.name)]
    if given.model is not None or given.name is not None:
        raise ConfigError("--model and --name are for --data; synthetic pools bring their features and names")
    return synthetic


if __name__ == "__main__":
    main()
