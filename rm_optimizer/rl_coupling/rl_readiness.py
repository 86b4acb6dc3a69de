"""Readiness from four given numbers, by the weights of the method's authors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.errors import ConfigError
from rm_optimizer.rl_coupling.readiness.report import ReadinessVerdict
from rm_optimizer.rl_coupling.readiness.report import RLReadinessReport as RLReadinessReport
from rm_optimizer.schema.checks import require

WEIGHTS: Mapping[str, float] = MappingProxyType(
    {"accuracy": 0.35, "calibration": 0.25, "stability": 0.25, "landscape": 0.15}
)
"""Weight of each part by the method's authors; they sum to 1."""
READY_ABOVE, ACCEPTABLE_FROM = 0.8, 0.6
BASIS = (
    "four numbers by weights that the method's authors set by hand; nothing validates them, so use the score to "
    "compare with theirs, and rm-opt readiness for a measured one"
)


class RLReadinessScorer:
    """Score of a reward model from its accuracy, calibration, variance of rewards and curvature.

    `0.35 min(accuracy, 1) + 0.25 (1 - 5 ece) + 0.25 (1 - (variance - 0.5) / 2.5) + 0.15 (1 - (eigenvalue - 50) / 450)`,
    each term's factor clamped to [0, 1]. Above 0.8 is ready, 0.6 to 0.8 acceptable with monitoring, less not
    recommended.

    **The weights are unvalidated.** The method's authors set them by hand and publish no test of them. Calibration and
    curvature are not known to predict what a policy gains. A high variance of rewards counts as bad here, although a
    low variance *within* prompts is what slows an algorithm that does not rescale rewards (Razin et al., 2025,
    arXiv:2503.15477). On synthetic gold-reward worlds with tiny policies, the score does not rank reward models:
    Kendall's tau -0.13 [-0.31, 0.06] with the gold reward after RLOO to 6 nats, where accuracy has 0.46
    (`docs/readiness.md`).

    Args:
        weights: weight of `accuracy`, `calibration`, `stability` and `landscape`, not negative, with a sum of 1;
            None takes the authors'.

    Raises:
        ConfigError: if a weight is missing, unknown, negative or not finite, or the sum is not 1.

    Example:
        >>> report = RLReadinessScorer().compute_score(0.87, 0.05, 1.2, 150)
        >>> round(report.overall_score, 3), report.calibration_score, report.verdict.value
        (0.789, 0.75, 'acceptable with monitoring')
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(WEIGHTS if weights is None else weights)
        got = ", ".join(self.weights) or "none"
        require(self.weights.keys() == WEIGHTS.keys(), "weights", f"name {', '.join(WEIGHTS)}", got)
        for name, weight in self.weights.items():
            _number(f"weights[{name!r}]", weight)
        if abs(sum(self.weights.values()) - 1) > 1e-9:
            raise ConfigError(f"weights must sum to 1, got {sum(self.weights.values()):g}; divide each by their sum")

    def compute_score(
        self, accuracy: float, ece: float, reward_variance: float, top_eigenvalue: float
    ) -> RLReadinessReport:
        """Score four measured numbers.

        Args:
            accuracy: share of pairs ranked as labeled, not negative; more than 1 counts as 1.
            ece: expected calibration error, in [0, 1].
            reward_variance: variance of the rewards, not negative.
            top_eigenvalue: largest eigenvalue of the loss's Hessian.

        Raises:
            ConfigError: if a number is not finite or out of its range.
        """
        given = {
            "accuracy": _number("accuracy", accuracy, most=None),
            "ece": _number("ece", ece, most=1.0),
            "reward_variance": _number("reward_variance", reward_variance, most=None),
            "top_eigenvalue": _number("top_eigenvalue", top_eigenvalue, least=None),
        }
        unbounded = {
            "accuracy": given["accuracy"],
            "calibration": 1 - 5 * given["ece"],
            "stability": 1 - (given["reward_variance"] - 0.5) / 2.5,
            "landscape": 1 - (given["top_eigenvalue"] - 50) / 450,
        }
        parts = {name: min(max(value, 0.0), 1.0) for name, value in unbounded.items()}
        components = {name: self.weights[name] * part for name, part in parts.items()}
        score = math.fsum(components.values())
        verdict = ReadinessVerdict.ready if score > READY_ABOVE else ReadinessVerdict.not_recommended
        if ACCEPTABLE_FROM <= score <= READY_ABOVE:
            verdict = ReadinessVerdict.acceptable
        return RLReadinessReport(
            verdict=verdict,
            score=Estimate(score, None, 0),
            basis=BASIS,
            features={name: Estimate(value, None, 0) for name, value in given.items()},
            components=components,
            recommendations=tuple(_recommendations(given)),
            parts=parts,
        )


def _recommendations(given: Mapping[str, float]) -> list[str]:
    accuracy, ece, variance = given["accuracy"], given["ece"], given["reward_variance"]
    found = []
    if accuracy > 1:
        found.append(f"an accuracy of {accuracy:g} counted as 1; give a share of pairs, not a percentage")
    if accuracy < 0.7:
        found.append(
            "accuracy is below 0.7; train on more or cleaner pairs, and compare it with what the labels' noise allows"
        )
    if ece > 0.1:
        found.append("the calibration error is above 0.1; fit a temperature on pairs that are not reported")
    if variance > 2.0:
        found.append(
            "the variance of rewards is above 2; standardize rewards before a penalty on the divergence is added"
        )
    if given["top_eigenvalue"] > 200:
        found.append("the top eigenvalue is above 200; a lower learning rate or SAM leads to flatter minima")
    return found


def _number(name: str, value: float, *, least: float | None = 0.0, most: float | None = None) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be a number, got {value!r}") from error
    if not math.isfinite(number):
        raise ConfigError(f"{name} must be finite, got {number:g}; measure it again or leave the score out")
    if (least is not None and number < least) or (most is not None and number > most):
        expected = "not be negative" if most is None else f"lie in [{least:g}, {most:g}]"
        raise ConfigError(f"{name} must {expected}, got {number:g}")
    return number
