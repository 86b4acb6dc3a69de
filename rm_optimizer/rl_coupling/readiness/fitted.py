"""Fitted readiness: a prediction from measured features, with the study that it comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from scipy.special import ndtri

from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate, IntervalKind
from rm_optimizer.records.codec import JsonRecord

PACKAGED = "fitted_v1.json"
"""File of the fit that ships."""


@dataclass(frozen=True)
class FittedFeature:
    """One term of a linear prediction.

    Args:
        name: feature, as in the report of a measurement.
        mean: mean over the reward models of the fit.
        std: standard deviation over them, positive.
        weight: change of the prediction with one standard deviation.
        low: smallest value in the fit; below it the prediction extrapolates.
        high: largest value in the fit.
    """

    name: str
    mean: float
    std: float
    weight: float
    low: float
    high: float


@dataclass(frozen=True)
class FittedOutcome:
    """Linear prediction of one outcome, `intercept + sum_i weight_i (x_i - mean_i) / std_i`.

    Args:
        outcome: predicted quantity, in words.
        unit: its unit, in words.
        features: the terms.
        intercept: prediction for a reward model of average features.
        residual_std: standard deviation of prediction errors on reward models that were not fitted.
        cut_points: predictions at the quantiles 1/4, 1/2 and 3/4 of the reward models of the fit.
        tau: rank correlation (Kendall's tau-b) with the outcome on worlds that were not fitted.
    """

    outcome: str
    unit: str
    features: tuple[FittedFeature, ...]
    intercept: float
    residual_std: float
    cut_points: tuple[float, ...]
    tau: Estimate

    def score(self, features: Mapping[str, Estimate]) -> Estimate:
        """Predicted outcome with a 95 % prediction interval.

        Its variance comes from the features' errors, taken as independent, and from the prediction errors on reward
        models that were not fitted. Distance between the fitted worlds and reality is not in it.

        Args:
            features: measured features by name, finite; those that are not terms are left alone.
        """
        value, variance, num = self.intercept, self.residual_std**2, 0
        for term in self.features:
            found, slope = features[term.name], term.weight / term.std
            value += slope * (found.value - term.mean)
            variance += (slope * (found.standard_error or 0.0)) ** 2
            num = min(num or found.num_samples, found.num_samples)
        error = math.sqrt(variance)
        half = float(ndtri(0.5 + CONFIDENCE / 2)) * error
        return Estimate(value, error, num, value - half, value + half, IntervalKind.normal)


@dataclass(frozen=True)
class FitProvenance:
    """Origin of a fit.

    Args:
        wording: the claim that the study allows, in words.
        fitted_worlds: seeds of the worlds that were fitted.
        tested_worlds: seeds of the worlds on which the fit was tested.
        num_fitted: reward models fitted.
        num_tested: reward models tested.
        frozen_commit: commit that froze features and regularizer before the test.
        created: time of the fit, ISO 8601.
        versions: versions of the packages by name.
    """

    wording: str
    fitted_worlds: tuple[int, ...]
    tested_worlds: tuple[int, ...]
    num_fitted: int
    num_tested: int
    frozen_commit: str
    created: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class FittedReadiness(JsonRecord, indent=2, ensure_ascii=False):
    """Predictions of what a policy gains from a reward model, for each algorithm.

    Args:
        version: version of the fit; scores of different versions do not compare.
        outcomes: the prediction for each algorithm.
        provenance: the study behind it.
    """

    version: str
    outcomes: Mapping[str, FittedOutcome]
    provenance: FitProvenance


@cache
def fitted_readiness() -> FittedReadiness:
    """The fit that ships with the package."""
    file = files("rm_optimizer.rl_coupling.readiness") / PACKAGED
    return FittedReadiness.from_json(file.read_text(encoding="utf-8"))
