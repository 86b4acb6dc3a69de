"""Predictors of what a policy gains from a reward model, as vectors over the models of a world."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.experiments.readiness.measurement import MeasuredWorld
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.rl_coupling.readiness.features import relative_to_ceiling
from rm_optimizer.rl_coupling.readiness.fitted import FittedFeature, FittedOutcome
from rm_optimizer.rl_coupling.readiness.scorer import RLReadinessScorer

OUTCOMES: Mapping[str, str] = {"bon": "best_of_64", "rloo_kl": "rloo_kl_6", "grpo": "grpo_kl_6"}
"""The outcome that the fit of each algorithm predicts."""
IN_WORDS: Mapping[str, str] = {
    "bon": "gold reward of the best of 64",
    "rloo_kl": "gold reward after RLOO to a divergence of 6 nats",
    "grpo": "gold reward after GRPO to a divergence of 6 nats",
}
UNIT = "standard deviations of the gold reward within prompts"
_RELATIVE = "accuracy_relative"


@dataclass(frozen=True)
class Term:
    """A term of a fit.

    Args:
        feature: its name in a measurement of readiness.
        measured: its name in the study, with the number of labels.
    """

    feature: str
    measured: str

    @property
    def labels(self) -> int:
        """Labels that the term costs for each model."""
        return int(self.measured.partition("@")[2])


@dataclass(frozen=True)
class ChosenFit:
    """The fit chosen for one algorithm.

    Args:
        terms: its features.
        ridge: penalty, in units of the number of models.
        tau: mean rank correlation of each candidate with the algorithm's outcome, each development world predicted from
            the others.
    """

    terms: tuple[Term, ...]
    ridge: float
    tau: Mapping[str, float]


@dataclass(frozen=True)
class FrozenChoice(JsonRecord, indent=1):
    """Choice made on the development worlds, before a test world is looked at.

    Args:
        fits: the fit of each algorithm.
        development: seeds of the worlds that it was chosen on.
        code: digest of the code that makes worlds, models, policies and features.
        models: reward models of each world.
        steps: optimizer steps of each policy.
    """

    fits: Mapping[str, ChosenFit]
    development: tuple[int, ...]
    code: str
    models: int
    steps: int


def column(world: MeasuredWorld, name: str) -> Float[np.ndarray, " models"]:
    """A feature or outcome of every model of a world; `accuracy_relative@N` is relative to the world's ceiling."""
    if name.startswith(f"{_RELATIVE}@"):
        raw = column(world, f"accuracy@{name.partition('@')[2]}")
        return np.array([relative_to_ceiling(Estimate(value, None, 1), world.ceiling).value for value in raw])
    key = "outcomes" if name in world.models[0].outcomes else "features"
    return np.array([getattr(model, key)[name] for model in world.models])


def fit_outcome(worlds: Sequence[MeasuredWorld], terms: Sequence[Term], ridge: float, algorithm: str) -> FittedOutcome:
    """Ridge regression of an outcome on standardized features; tau and the residuals are the test's to fill in.

    Args:
        worlds: worlds to fit.
        terms: features.
        ridge: penalty of squared weights, in units of the number of models.
        algorithm: key of `OUTCOMES`.
    """
    values = np.concatenate([np.stack([column(world, term.measured) for term in terms], axis=1) for world in worlds])
    target = np.concatenate([column(world, OUTCOMES[algorithm]) for world in worlds])
    mean, std = values.mean(axis=0), np.maximum(values.std(axis=0), 1e-9)
    standardized = (values - mean) / std
    penalty = ridge * len(values) * np.eye(len(terms))
    weights = np.linalg.solve(standardized.T @ standardized + penalty, standardized.T @ (target - target.mean()))
    predicted = target.mean() + standardized @ weights
    numbers = (mean, std, weights, values.min(axis=0), values.max(axis=0))
    return FittedOutcome(
        outcome=IN_WORDS[algorithm],
        unit=UNIT,
        features=tuple(
            FittedFeature(term.feature, *(float(number[at]) for number in numbers)) for at, term in enumerate(terms)
        ),
        intercept=float(target.mean()),
        residual_std=float((target - predicted).std()),
        cut_points=tuple(float(cut) for cut in np.quantile(predicted, [0.25, 0.5, 0.75])),
        tau=Estimate(float("nan"), None, 0),
    )


def predicted(fit: FittedOutcome, world: MeasuredWorld, terms: Sequence[Term]) -> Float[np.ndarray, " models"]:
    """Prediction of a fit for every model of a world."""
    value = np.full(len(world.models), fit.intercept)
    for term, feature in zip(terms, fit.features, strict=True):
        value += feature.weight * (column(world, term.measured) - feature.mean) / feature.std
    return value


def with_labels(terms: Sequence[Term], labels: int) -> list[Term] | None:
    """The same terms measured with fewer or more labels in all, in the same proportions; None if none were measured."""
    whole = sum(term.labels for term in terms)
    found = []
    for term in terms:
        share = term.labels * labels / whole
        if share != int(share):
            return None
        found.append(replace(term, measured=f"{term.measured.partition('@')[0]}@{int(share)}"))
    return found


def authors_score(world: MeasuredWorld) -> Float[np.ndarray, " models"]:
    """The score of the method's authors from 2,048 labeled pairs, 512 of them for the top eigenvalue."""
    names = ("accuracy@2048", "ece@2048", "reward_variance", "top_eigenvalue")
    scorer = RLReadinessScorer()
    given = zip(*(column(world, name) for name in names), strict=True)
    return np.array([math.fsum(scorer.compute_score(*each).components.values()) for each in given])


def baselines(world: MeasuredWorld) -> dict[str, Float[np.ndarray, " models"]]:
    """Predictors without a fit, larger meaning better, by name."""

    def standard(values: np.ndarray) -> np.ndarray:
        return np.asarray((values - values.mean()) / max(values.std(), 1e-9))

    accuracy, spread = column(world, "accuracy@2048"), column(world, "reward_spread")
    return {
        "accuracy, 256 labels": column(world, "accuracy@256"),
        "accuracy, 2,048 labels": accuracy,
        "accuracy off policy, 2,048 labels": column(world, "off_policy_accuracy@2048"),
        "NLL at the fitted temperature, 2,048 labels": -column(world, "nll@2048"),
        "Brier score at the fitted temperature, 2,048 labels": -column(world, "brier@2048"),
        "accuracy and reward spread (Razin et al.), 2,048 labels": standard(accuracy) + standard(spread),
        "score of the method's authors": authors_score(world),
        "best of 16 of 32 rated responses, 1,024 ratings shared by all models": column(world, "rated_16"),
        "probe of the best of 16, 256 labels": column(world, "probe_16@256"),
        "probe of the best of 64, 256 labels": column(world, "probe_64@256"),
        "probe of the best of 256, 256 labels": column(world, "probe_256@256"),
        "probe of the best of 512, 256 labels": column(world, "probe_512@256"),
        "win rate after a short RLOO run to 3 nats, 256 labels": column(world, "short_run@256"),
    }
