"""The validation of the readiness score: its choice on development worlds, its one test on worlds untouched before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import kendalltau

from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate, IntervalKind
from rm_optimizer.core.metrics.intervals import student_mean
from rm_optimizer.experiments.readiness.measurement import ACCURACY_LABELS, LABELS, MeasuredWorld
from rm_optimizer.experiments.readiness.predictors import (
    OUTCOMES,
    ChosenFit,
    FrozenChoice,
    Term,
    baselines,
    column,
    fit_outcome,
    predicted,
    with_labels,
)
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.rl_coupling.readiness.fitted import FittedOutcome

DEVELOPMENT, TEST = (0, 1, 2), (3, 4, 5, 6, 7, 8)
"""Seeds of the worlds."""
CANDIDATES: Mapping[str, tuple[Term, ...]] = {
    "probe 64": (Term("probe_64", "probe_64@256"),),
    "probe 256": (Term("probe_256", "probe_256@256"),),
    "probe 512": (Term("probe_512", "probe_512@256"),),
    "probe 64 and accuracy": (Term("probe_64", "probe_64@192"), Term("accuracy_relative", "accuracy_relative@64")),
    "probe 256 and accuracy": (Term("probe_256", "probe_256@192"), Term("accuracy_relative", "accuracy_relative@64")),
    "probe 512 and accuracy": (Term("probe_512", "probe_512@192"), Term("accuracy_relative", "accuracy_relative@64")),
    "probes 64 and 256": (Term("probe_64", "probe_64@128"), Term("probe_256", "probe_256@128")),
    "probes 64 and 512": (Term("probe_64", "probe_64@128"), Term("probe_512", "probe_512@128")),
}
"""Fits to choose from, each of 256 labels a model."""
RIDGES = (0.01, 0.1, 1.0)
SCORE = "readiness score"
MATCHED, EIGHTFOLD = "accuracy, 256 labels", "accuracy, 2,048 labels"
JUDGED = (
    "best_of_16",
    "best_of_64",
    "best_of_256",
    "rloo_kl_3",
    "rloo_kl_6",
    "rloo_kl_12",
    "grpo_kl_6",
    "unpenalized_kl_6",
    "unpenalized_final",
)
"""Outcomes that tables list."""
NUM_BOOTSTRAP = 10_000
_PAIRS: Mapping[str, tuple[str, str]] = {
    "two seeds of RLOO at 6 nats": ("rloo_first_kl_6", "rloo_again_kl_6"),
    "RLOO and GRPO at 6 nats": ("rloo_kl_6", "grpo_kl_6"),
    "RLOO at 6 nats with and without a penalty": ("rloo_kl_6", "unpenalized_kl_6"),
    "RLOO at 6 nats and the best of 64": ("rloo_kl_6", "best_of_64"),
    "RLOO at 6 nats and the best of 256": ("rloo_kl_6", "best_of_256"),
}


@dataclass(frozen=True)
class PredictorTau:
    """Rank correlation of a predictor with one outcome.

    Args:
        predictor: the predictor, in words.
        outcome: the outcome.
        tau: mean over worlds of Kendall's tau-b; Student's interval over worlds.
        by_world: tau of each world.
        regret: mean over worlds of the best model's outcome less that of the predictor's first choice.
        top_five: mean share of the predictor's five first choices among the five best models.
    """

    predictor: str
    outcome: str
    tau: Estimate
    by_world: tuple[float, ...]
    regret: float
    top_five: float


@dataclass(frozen=True)
class TauDifference:
    """The readiness score's tau less that of a baseline, for one outcome.

    Args:
        outcome: the outcome.
        baseline: the baseline, in words.
        over_models: interval from reward models drawn anew within worlds, the same for both.
        over_worlds: Student's interval over worlds.
    """

    outcome: str
    baseline: str
    over_models: Estimate
    over_worlds: Estimate


@dataclass(frozen=True)
class LabelPoint:
    """Mean tau with gold after RLOO to 6 nats at a number of labels a model; None where it was not measured."""

    labels: int
    score: float | None
    probe: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Validation(JsonRecord, indent=1):
    """Result of the one test.

    Args:
        worlds: seeds of the test worlds.
        num_models: reward models in all of them.
        taus: every predictor and outcome.
        differences: differences between the readiness score and accuracy.
        curve: tau against labels.
        outcomes: quantiles 0, 1/4, 1/2, 3/4 and 1 of every outcome over the models.
        over_optimized: share of models whose policy without a penalty ends more than 0.3 below its peak, and below its
            start.
        agreement: mean over worlds of tau between two measurements of gold, by what they are; no predictor is expected
            to be better than the first of them.
    """

    worlds: tuple[int, ...]
    num_models: int
    taus: tuple[PredictorTau, ...]
    differences: tuple[TauDifference, ...]
    curve: tuple[LabelPoint, ...]
    outcomes: Mapping[str, tuple[float, ...]]
    over_optimized: tuple[float, float]
    agreement: Mapping[str, Estimate]

    def of(self, predictor: str, outcome: str) -> PredictorTau:
        """The entry of a predictor and an outcome."""
        return next(each for each in self.taus if (each.predictor, each.outcome) == (predictor, outcome))


def choose(worlds: Sequence[MeasuredWorld], *, code: str, steps: int) -> FrozenChoice:
    """Choose features and penalty for each algorithm by tau with its outcome, each world predicted from the others.

    Args:
        worlds: development worlds.
        code: digest of the code that measured them.
        steps: optimizer steps of their policies.
    """
    return FrozenChoice(
        fits={algorithm: _chosen(worlds, algorithm) for algorithm in OUTCOMES},
        development=tuple(world.seed for world in worlds),
        code=code,
        models=len(worlds[0].models),
        steps=steps,
    )


def _chosen(worlds: Sequence[MeasuredWorld], algorithm: str) -> ChosenFit:
    outcome = OUTCOMES[algorithm]
    scores: dict[tuple[str, float], float] = {}
    for name, terms in CANDIDATES.items():
        for ridge in RIDGES:
            taus = [
                _tau(predicted(fit_outcome(others, terms, ridge, algorithm), world, terms), column(world, outcome))
                for world, others in ((w, [o for o in worlds if o is not w]) for w in worlds)
            ]
            scores[name, ridge] = float(np.mean(taus))
    name, ridge = max(scores, key=lambda key: scores[key])
    tau = {f"{each}, ridge {penalty:g}": value for (each, penalty), value in scores.items()}
    return ChosenFit(CANDIDATES[name], ridge, tau)


def fitted_outcomes(worlds: Sequence[MeasuredWorld], choice: FrozenChoice) -> dict[str, FittedOutcome]:
    """The fit of each algorithm on the development worlds."""
    return {algorithm: fit_outcome(worlds, fit.terms, fit.ridge, algorithm) for algorithm, fit in choice.fits.items()}


def validate(fits: Mapping[str, FittedOutcome], choice: FrozenChoice, worlds: Sequence[MeasuredWorld]) -> Validation:
    """Test the fits on worlds that they were not fitted on.

    Args:
        fits: result of `fitted_outcomes`.
        choice: the choice behind them.
        worlds: test worlds.
    """
    taus, differences = [], []
    for outcome in JUDGED:
        columns = [_predictors(fits, choice, world, outcome) for world in worlds]
        targets = [column(world, outcome) for world in worlds]
        by_name = {name: [each[name] for each in columns] for name in columns[0]}
        taus += [_predictor_tau(name, outcome, values, targets) for name, values in by_name.items()]
        for baseline in (MATCHED, EIGHTFOLD):
            differences.append(_difference(outcome, baseline, by_name[SCORE], by_name[baseline], targets))
    names = worlds[0].models[0].outcomes
    pooled = {name: np.concatenate([column(world, name) for world in worlds]) for name in names}
    return Validation(
        worlds=tuple(world.seed for world in worlds),
        num_models=sum(len(world.models) for world in worlds),
        taus=tuple(taus),
        differences=tuple(differences),
        curve=tuple(_label_point(fits["rloo_kl"], choice, worlds, labels) for labels in ACCURACY_LABELS),
        outcomes={
            name: tuple(np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()) for name, values in pooled.items()
        },
        over_optimized=(
            float((pooled["unpenalized_fall"] > 0.3).mean()),
            float((pooled["unpenalized_final"] < 0).mean()),
        ),
        agreement=_agreement(worlds),
    )


def _agreement(worlds: Sequence[MeasuredWorld]) -> dict[str, Estimate]:
    return {
        name: student_mean(np.array([_tau(column(world, one), column(world, other)) for world in worlds]))
        for name, (one, other) in _PAIRS.items()
    }


def tested_outcomes(
    fits: Mapping[str, FittedOutcome], choice: FrozenChoice, worlds: Sequence[MeasuredWorld], validation: Validation
) -> dict[str, FittedOutcome]:
    """The fits with their tau and their prediction errors on the test worlds."""
    found = {}
    for algorithm, fit in fits.items():
        errors = [column(w, OUTCOMES[algorithm]) - predicted(fit, w, choice.fits[algorithm].terms) for w in worlds]
        error = float(np.sqrt((np.concatenate(errors) ** 2).mean()))
        found[algorithm] = replace(fit, residual_std=error, tau=validation.of(SCORE, OUTCOMES[algorithm]).tau)
    return found


def _predictors(
    fits: Mapping[str, FittedOutcome], choice: FrozenChoice, world: MeasuredWorld, outcome: str
) -> dict[str, Float[np.ndarray, " models"]]:
    algorithm = "bon" if outcome.startswith("best") else "grpo" if outcome.startswith("grpo") else "rloo_kl"
    return {SCORE: predicted(fits[algorithm], world, choice.fits[algorithm].terms)} | baselines(world)


def _predictor_tau(
    name: str, outcome: str, values: Sequence[np.ndarray], targets: Sequence[np.ndarray]
) -> PredictorTau:
    by_world = [_tau(value, target) for value, target in zip(values, targets, strict=True)]
    regrets, shares = [], []
    for value, target in zip(values, targets, strict=True):
        regrets.append(float(target.max() - target[value == value.max()].mean()))
        best, chosen = (set(np.argsort(-each, kind="stable")[:5].tolist()) for each in (target, value))
        shares.append(len(best & chosen) / 5)
    return PredictorTau(
        predictor=name,
        outcome=outcome,
        tau=student_mean(np.array(by_world)),
        by_world=tuple(by_world),
        regret=float(np.mean(regrets)),
        top_five=float(np.mean(shares)),
    )


def _difference(
    outcome: str,
    baseline: str,
    score: Sequence[np.ndarray],
    other: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
) -> TauDifference:
    by_world, drawn = [], np.zeros(NUM_BOOTSTRAP)
    rng = np.random.default_rng(0)
    for first, second, target in zip(score, other, targets, strict=True):
        by_world.append(_tau(first, target) - _tau(second, target))
        counts = rng.multinomial(len(target), np.full(len(target), 1 / len(target)), size=NUM_BOOTSTRAP)
        drawn += (resampled_taus(first, target, counts) - resampled_taus(second, target, counts)) / len(targets)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    over_models = Estimate(
        float(np.mean(by_world)),
        float(drawn.std(ddof=1)),
        sum(map(len, targets)),
        float(low),
        float(high),
        IntervalKind.resampled,
    )
    return TauDifference(outcome, baseline, over_models, student_mean(np.array(by_world)))


def resampled_taus(
    first: Float[np.ndarray, " models"], second: Float[np.ndarray, " models"], counts: Int[np.ndarray, "draws models"]
) -> Float[np.ndarray, " draws"]:
    """Kendall's tau-b of draws with replacement, in which model i stands `counts[i]` times.

    `c'(S∘T)c / sqrt(c'(S∘S)c · c'(T∘T)c)` with S and T the signs of all differences; a model ties with its copies.

    Args:
        first: one number of each model.
        second: the other one.
        counts: number of times that each draw has each model.
    """
    signs = [np.sign(values[:, None] - values[None, :]) for values in (first, second)]
    weights = counts.astype(np.float64)

    def total(matrix: np.ndarray) -> np.ndarray:
        return np.asarray(((weights @ matrix) * weights).sum(axis=1))

    scale = np.sqrt(total(signs[0] ** 2) * total(signs[1] ** 2))
    return np.asarray(total(signs[0] * signs[1]) / np.where(scale > 0, scale, 1.0))


def _label_point(fit: FittedOutcome, choice: FrozenChoice, worlds: Sequence[MeasuredWorld], labels: int) -> LabelPoint:
    """Mean taus at a number of labels, with the frozen weights."""
    terms = with_labels(choice.fits["rloo_kl"].terms, labels)
    measured = worlds[0].models[0].features
    has_terms = terms is not None and all(
        term.measured.replace("accuracy_relative", "accuracy") in measured for term in terms
    )
    score = [_tau(predicted(fit, w, terms), column(w, "rloo_kl_6")) for w in worlds] if terms and has_terms else None

    def mean_of(name: str) -> float | None:
        if name not in measured:
            return None
        return float(np.mean([_tau(column(world, name), column(world, "rloo_kl_6")) for world in worlds]))

    probe = mean_of(f"probe_64@{labels}") if labels in LABELS else None
    return LabelPoint(labels, None if score is None else float(np.mean(score)), probe, mean_of(f"accuracy@{labels}"))


def _tau(first: np.ndarray, second: np.ndarray) -> float:
    """Kendall's tau-b; 0 where one of the two does not vary."""
    found = float(kendalltau(first, second).statistic)
    return found if np.isfinite(found) else 0.0
