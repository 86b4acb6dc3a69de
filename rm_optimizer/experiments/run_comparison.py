"""Comparison of finished runs on their common validation pairs.

Runs that differ only by seed form an arm. Each run's metrics have intervals over prompts. Differences from the baseline
arm are paired by prompt, and by seed if there are several. `rm_optimizer.core.metrics.effects` describes the method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.metrics.effects import SCORES, PairedScores, Score
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.experiments.compared_runs import ComparedRun, DivergedRun, FoundRuns, common_pairs
from rm_optimizer.records.codec import JsonRecord, json_values

COSTS = ("steps", "best_step", "wall_seconds", "pairs_per_second", "parameters")
"""Names of the numbers of a run's result that describe its cost."""
ALWAYS = "the best weights were chosen on these pairs; rm-opt evaluate judges them on others"


@dataclass(frozen=True, kw_only=True)
class RunInArm:
    """A run of a comparison.

    Args:
        name: path of its folder, relative to the common folder of all runs.
        folder: its folder.
        arm: name of its arm.
        seed: its seed.
    """

    name: str
    folder: str
    arm: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class RunScores(RunInArm):
    """A finished run of a comparison.

    Args:
        num_pairs: number of all its validation pairs, common or not.
        scores: metrics on the common pairs, with intervals over prompts.
        collapse: sentence on the collapse of its rewards; None if they did not collapse.
        costs: numbers named in `COSTS`; None where unknown.
    """

    num_pairs: int
    scores: dict[str, Estimate]
    collapse: str | None
    costs: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class DivergedScores(RunInArm):
    """A run of a comparison that diverged, so that it is in no mean.

    Args:
        error: sentence on the step and the pairs.
    """

    error: str


@dataclass(frozen=True, kw_only=True)
class ArmScores:
    """Scores of an arm, which is a set of runs that differ only by seed.

    Args:
        name: the options in which it differs from the other arms.
        options: its value of each option in which arms differ; None if its configuration has no such option.
        runs: names of its runs.
        seeds: their seeds.
        scores: means over seeds; with several seeds their intervals are over seeds and prompts.
        deviations: standard deviations over seeds; None for one seed.
    """

    name: str
    options: dict[str, Any]
    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    scores: dict[str, Estimate]
    deviations: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class ArmDifference:
    """Difference of an arm from the baseline.

    Args:
        arm: name of the arm.
        score: compared metric.
        estimate: the arm's score minus the baseline's, paired.
        num_seeds: number of pairs of runs; with one pair, the interval is over prompts only.
    """

    arm: str
    score: str
    estimate: Estimate
    num_seeds: int

    @property
    def verdict(self) -> str:
        """`better` or `worse` if the interval excludes 0, else an empty text."""
        low, high = self.estimate.low, self.estimate.high
        if low is None or high is None or low <= 0 <= high:
            return ""
        return "better" if (low > 0) == (self.score == "accuracy") else "worse"


@dataclass(frozen=True, kw_only=True)
class RunComparison(JsonRecord, indent=2, rows="rows"):
    """Comparison of finished runs, `comparison.json`.

    Args:
        baseline: name of the arm that the others are compared with.
        num_pairs: number of the validation pairs that all runs share.
        num_prompts: number of prompts of these pairs.
        runs: each finished run, arm by arm.
        diverged: each diverged run, arm by arm.
        arms: each arm with a finished run, the baseline first.
        differences: differences of each other arm in each of `SCORES`.
        notes: sentences that are needed to interpret the numbers.
    """

    baseline: str
    num_pairs: int
    num_prompts: int
    runs: tuple[RunScores, ...]
    arms: tuple[ArmScores, ...]
    differences: tuple[ArmDifference, ...]
    notes: tuple[str, ...]
    diverged: tuple[DivergedScores, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """The numbers as rows of one table, with one score in a row.

        Its `level` is `run`, `arm` or `difference`.
        """
        found: list[dict[str, Any]] = []
        for run in (*self.runs, *self.diverged):
            about = {"level": "run", "arm": run.arm, "run": run.name, "seed": run.seed, "num_seeds": 1}
            if isinstance(run, RunScores):
                found += [about | {"score": name} | _cells(estimate) for name, estimate in run.scores.items()]
                found += [about | {"score": name, "value": value} for name, value in run.costs.items()]
            else:
                found.append(about | {"score": "diverged", "value": 1.0})
        for arm in self.arms:
            about = {"level": "arm", "arm": arm.name, "num_seeds": len(arm.seeds)}
            found += [
                about | {"score": name, "deviation": arm.deviations[name]} | _cells(estimate)
                for name, estimate in arm.scores.items()
            ]
        for item in self.differences:
            about = {"level": "difference", "arm": item.arm, "baseline": self.baseline, "num_seeds": item.num_seeds}
            found.append(about | {"score": item.score} | _cells(item.estimate))
        return [dict.fromkeys(_COLUMNS) | row for row in found]


_OF_ESTIMATE = ("value", "standard_error", "low", "high", "num_samples")
_COLUMNS = ("level", "arm", "baseline", "run", "seed", "num_seeds", "score", *_OF_ESTIMATE, "deviation")


def _cells(estimate: Estimate) -> dict[str, Any]:
    return {name: getattr(estimate, name) for name in _OF_ESTIMATE}


def compare_runs(found: FoundRuns, *, num_bootstrap: int = 1000) -> RunComparison:
    """Compare runs on their common validation pairs.

    The first finished run's arm is the baseline.

    Args:
        found: two runs or more.
        num_bootstrap: number of resamples of prompts for intervals; 0 gives intervals only for several seeds.

    Raises:
        ConfigError: if the runs have no validation pair in common.
    """
    pairs = common_pairs(found.runs)
    prompts = [found.runs[0].by_key[key].prompt_id for key in pairs]
    label, weight = (np.array([key[column] for key in pairs], dtype=float) for column in (1, 2))
    paired_scores = partial(PairedScores, prompts=prompts, label=label, weight=weight)
    arms: dict[str, list[ComparedRun]] = {}
    runs: list[RunScores] = []
    diverged: list[DivergedScores] = []
    for name, members in _named(_arms([*found.runs, *found.diverged])).items():
        for run in members:
            about: dict[str, Any] = {"name": run.name, "folder": str(run.folder.path), "arm": name, "seed": run.seed}
            if isinstance(run, DivergedRun):
                diverged.append(DivergedScores(**about, error=run.error))
                continue
            metrics = run.metrics(pairs, num_bootstrap=num_bootstrap)
            arms.setdefault(name, []).append(run)
            runs.append(
                RunScores(
                    **about,
                    num_pairs=len(run.rewards),
                    scores={score: getattr(metrics, score) for score in SCORES},
                    collapse=metrics.collapse.reason if metrics.collapse.collapsed else None,
                    costs={cost: getattr(run.result, cost) for cost in COSTS},
                )
            )
    baseline, *challengers = arms
    paired = {name: _seed_pairs(arms[baseline], arms[name]) for name in challengers}
    options = _differing([members[0].options for members in arms.values()])

    def logits(members: Iterable[ComparedRun]) -> Float[np.ndarray, "runs pairs"]:
        return np.stack([run.logits(pairs) for run in members])

    def mean(name: str, score: Score) -> Estimate:
        found = paired_scores(logits(arms[name]), None).effect(score, num_bootstrap=num_bootstrap)
        return found if found.low is None else replace(found, low=max(found.low, 0.0))  # no score can be negative

    def arm_scores(name: str, own: Sequence[RunScores]) -> ArmScores:
        several, values = len(own) > 1, {score: [run.scores[score].value for run in own] for score in SCORES}
        return ArmScores(
            name=name,
            options={option: json_values(arms[name][0].options.get(option)) for option in options},
            runs=tuple(run.name for run in own),
            seeds=tuple(run.seed for run in own),
            scores={score: mean(name, score) if several else own[0].scores[score] for score in SCORES},
            deviations={score: float(np.std(each, ddof=1)) if several else None for score, each in values.items()},
        )

    def difference(name: str, score: Score) -> ArmDifference:
        both = [logits(runs) for runs in zip(*paired[name], strict=True)]  # of the baseline, then of the arm
        better, worse = both[::-1] if score == "accuracy" else both
        estimate = paired_scores(better, worse).effect(score, num_bootstrap=num_bootstrap)
        return ArmDifference(arm=name, score=score, estimate=estimate, num_seeds=len(paired[name]))

    return RunComparison(
        baseline=baseline,
        num_pairs=len(pairs),
        num_prompts=len(set(prompts)),
        runs=tuple(runs),
        diverged=tuple(diverged),
        arms=tuple(arm_scores(name, [run for run in runs if run.arm == name]) for name in arms),
        differences=tuple(difference(name, score) for name in challengers for score in SCORES),
        notes=tuple(_notes(found, runs, len(pairs), paired)),
    )


def _arms(runs: Sequence[ComparedRun | DivergedRun]) -> list[list[ComparedRun | DivergedRun]]:
    """Runs grouped by equal options, in the order of their first runs.

    A repeated seed starts another arm.
    """
    arms: list[list[ComparedRun | DivergedRun]] = []
    for run in runs:
        for arm in arms:
            if arm[0].options == run.options and all(other.seed != run.seed for other in arm):
                arm.append(run)
                break
        else:
            arms.append([run])
    return [sorted(arm, key=lambda run: run.seed) for arm in arms]


def _named(arms: Sequence[list[ComparedRun | DivergedRun]]) -> dict[str, list[ComparedRun | DivergedRun]]:
    """Arms by name: the few options that distinguish them, with the first run's name if options do not."""
    chosen: list[str] = []
    groups = 1
    for option in _differing([arm[0].options for arm in arms]):
        apart = len({tuple(str(arm[0].options.get(name)) for name in (*chosen, option)) for arm in arms})
        if apart > groups:
            chosen, groups = [*chosen, option], apart

    def shown(arm: list[ComparedRun | DivergedRun], option: str) -> str:
        value = arm[0].options.get(option)
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{_short(option)}={text if len(text) <= 40 else f'…{text[-39:]}'}"

    names = [", ".join(shown(arm, option) for option in chosen) for arm in arms]
    if len(set(names)) < len(names):
        names = [f"{name} ({arm[0].name})" if name else arm[0].name for name, arm in zip(names, arms, strict=True)]
    return dict(zip(names, arms, strict=True))


def _differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Options in which these differ, with the names of presets first."""
    names = sorted({name for each in options for name in each}, key=lambda name: (not name.endswith(".name"), name))
    return [name for name in names if len({str(each.get(name)) for each in options}) > 1]


def _short(option: str) -> str:
    """Short form of an option: its name without the group, or the group alone if the name is `name`.

    Example:
        >>> _short("optimizer.name"), _short("optimizer.lr"), _short("seed")
        ('optimizer', 'lr', 'seed')
    """
    group, _, name = option.rpartition(".")
    return group if name == "name" and group else name


def _seed_pairs(baseline: Sequence[ComparedRun], arm: Sequence[ComparedRun]) -> list[tuple[ComparedRun, ComparedRun]]:
    """Pairs of runs of the same seed.

    Without a common seed they are paired in order, since independent draws may be paired.
    """
    by_seed = {run.seed: run for run in baseline}
    common = [(by_seed[run.seed], run) for run in arm if run.seed in by_seed]
    return common or list(zip(baseline, arm, strict=False))


def _notes(
    found: FoundRuns,
    scores: Sequence[RunScores],
    num_common: int,
    paired: Mapping[str, Sequence[tuple[ComparedRun, ComparedRun]]],
) -> Iterator[str]:
    yield from found.left_out
    yield from (f"{run.name} diverged and is in no mean: {run.error}" for run in found.diverged)
    sizes = sorted({len(run.rewards) for run in found.runs})
    if sizes != [num_common]:
        shown = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        yield f"the runs were validated on different pairs ({shown}); {num_common:,} are common to all"
    yield from (f"{run.name} collapsed: {run.collapse}" for run in scores if run.collapse is not None)
    packages = sorted({name for run in found.runs for name in run.result.versions})
    for what, values in (
        ("commits", [str(run.result.commit) for run in found.runs]),
        *((f"versions of {name}", [run.result.versions.get(name, "none") for run in found.runs]) for name in packages),
    ):
        if len(set(values)) > 1:
            yield f"the runs have different {what}: {', '.join(dict.fromkeys(values))}"
    sizes_of_arms = Counter(run.arm for run in scores)
    for name, both in paired.items():
        most = max(sizes_of_arms[name], sizes_of_arms[scores[0].arm])
        if both[0][0].seed != both[0][1].seed:
            yield f"{name} shares no seed with the baseline; its runs are paired in order"
        if len(both) < most:
            yield f"{name} is compared over {len(both)} of {most} seeds, those that it and the baseline have"
    if any(len(both) == 1 for both in paired.values()):
        yield "a difference of one seed covers prompts alone: with another seed it may turn around"
    if len(paired) > 1:
        yield f"{len(paired)} arms are compared, and intervals are not widened for that"
    yield ALWAYS
