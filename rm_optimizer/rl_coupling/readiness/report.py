"""Readiness of a reward model as a program reads it, and the verdict from gates, probe and fitted score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.doctor.diagnosis import Check, Status
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.rl_coupling.readiness.fitted import FittedOutcome, FittedReadiness


class Algorithm(StrEnum):
    """Algorithm that is to optimize a policy by the reward model."""

    bon = "bon"
    """Best-of-n sampling."""
    rloo_kl = "rloo_kl"
    """REINFORCE with a leave-one-out baseline and a penalty on the divergence."""
    ppo_kl = "ppo_kl"
    """PPO with a penalty on the divergence."""
    grpo = "grpo"
    """Group-relative optimization, which divides rewards by the standard deviation of their group."""


class ReadinessVerdict(StrEnum):
    """Answer to whether a reward model is good enough to optimize a policy by."""

    ready = "ready"
    acceptable = "acceptable with monitoring"
    not_recommended = "not recommended"
    unknown = "not known"
    """No score, since there is no oracle or no validated prediction."""


@dataclass(frozen=True)
class ProbeRecord(JsonRecord):
    """The best-of-n probe, and when it stopped.

    Args:
        n: responses among which the model picked.
        win_rate: share of questions in which the pick was preferred. The interval holds the truth with 95 % whenever
            the probe stops.
        num_questions: questions asked.
        num_labels: different questions that the oracle answered; equal texts tie without one.
        num_open: questions asked without an answer.
        max_questions: questions that the rule allowed.
        stopped: reason why the probe stopped, in words.
    """

    n: int
    win_rate: Estimate
    num_questions: int
    num_labels: int
    num_open: int
    max_questions: int
    stopped: str


@dataclass(frozen=True)
class ReadinessSample:
    """Data behind a measurement.

    Args:
        num_pairs: labeled pairs.
        num_prompts: prompts that the policy answered.
        num_responses: responses to each.
        num_labels: answers of the oracle, over probe and on-policy pairs.
        model: digest of the reward model's weights and tokens.
        responses: digest of the policy's responses; empty without any.
        seed: seed of every random choice.
        wall_seconds: duration in seconds.
    """

    num_pairs: int
    num_prompts: int
    num_responses: int
    num_labels: int
    model: str
    responses: str
    seed: int
    wall_seconds: float


@dataclass(frozen=True)
class RLReadinessReport(JsonRecord, indent=2, ensure_ascii=False):
    """Verdict on a reward model, and the numbers that it rests on.

    Args:
        verdict: the answer.
        score: the score that decided it; None without a score.
        basis: origin and meaning of the score, in words.
        features: measured features by name, each with its interval where it has one.
        components: share of each scored feature in the score.
        recommendations: sentences on what to do next, most important first.
        cautions: sentences on what the verdict does not cover.
        algorithm: algorithm that the verdict is for; None where it is for none in particular.
        gates: checks of the doctor that a model must pass.
        probes: the best-of-n probes.
        unscored: further measured numbers, which take no part in the score.
        sample: data behind the measurement; None for a score from given numbers.
        parts: parts in [0, 1] of a score from given numbers, before their weights.
    """

    verdict: ReadinessVerdict
    score: Estimate | None
    basis: str
    features: Mapping[str, Estimate]
    components: Mapping[str, float]
    recommendations: tuple[str, ...]
    cautions: tuple[str, ...] = ()
    algorithm: Algorithm | None = None
    gates: tuple[Check, ...] = ()
    probes: tuple[ProbeRecord, ...] = ()
    unscored: Mapping[str, Estimate] = field(default_factory=dict)
    sample: ReadinessSample | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def overall_score(self) -> float:
        """Value of the score; NaN without one."""
        return math.nan if self.score is None else self.score.value

    @property
    def accuracy_score(self) -> float:
        """Part of the accuracy in a score of four numbers, in [0, 1]; NaN for a measured report."""
        return self.parts.get("accuracy", math.nan)

    @property
    def calibration_score(self) -> float:
        """Part of the calibration in a score of four numbers, in [0, 1]; NaN for a measured report."""
        return self.parts.get("calibration", math.nan)

    @property
    def stability_score(self) -> float:
        """Part of the variance of rewards in a score of four numbers, in [0, 1]; NaN for a measured report."""
        return self.parts.get("stability", math.nan)

    @property
    def landscape_score(self) -> float:
        """Part of the curvature in a score of four numbers, in [0, 1]; NaN for a measured report."""
        return self.parts.get("landscape", math.nan)

    @property
    def failed_gates(self) -> tuple[Check, ...]:
        """Checks that failed."""
        return tuple(check for check in self.gates if check.status is Status.fail)


LEAST_SPREAD = 0.1
"""Share of the reward's variance within prompts below which an algorithm that does not rescale is slowed.

In a pilot on synthetic worlds, REINFORCE with a penalty reached 1.02 in place of 2.27 where the share was squeezed from
0.43 to 0.03; algorithms that rescale groups did not change.
"""
MOST_TIED_GROUPS = 0.25
"""Share of groups of equal rewards above which GRPO, which learns nothing from them, wastes much of its sampling."""
LITTLE_ABOVE_CHANCE = 0.6
"""Upper end of the probe's interval below which the picks are hardly better than chance."""
MOST_UNLIKE = 0.1
"""Share of the policy's responses beyond 95 % of the pairs' responses above which the report warns."""
_RESCALES = (Algorithm.bon, Algorithm.grpo)


@dataclass(frozen=True)
class Evidence:
    """Measurements that a verdict rests on.

    Args:
        algorithm: algorithm that is to use the model.
        features: measured features by name.
        gates: checks of the doctor.
        probes: the best-of-n probes; empty without an oracle or a policy.
        unscored: further measured numbers.
    """

    algorithm: Algorithm
    features: Mapping[str, Estimate]
    gates: Sequence[Check]
    probes: Sequence[ProbeRecord]
    unscored: Mapping[str, Estimate] = field(default_factory=dict)


def conclude(evidence: Evidence, fit: FittedReadiness) -> RLReadinessReport:
    """Decide whether a reward model is good enough for an algorithm.

    A failed gate, rewards that rank no responses, or picks that are hardly better than other responses, decide against
    it. If picks are not shown to be better, the score at the upper ends of their intervals decides against it below the
    study's median, and else leaves it open. If they are, the fitted score decides: the top quarter of the study's
    reward models is ready, the quarter below it is acceptable with monitoring, less is not recommended. A
    spread of rewards that the algorithm cannot use takes "ready" back to "acceptable". Without a score there is no
    verdict.

    Args:
        evidence: the measurements.
        fit: the fitted score.
    """
    score, cautions = _scored(evidence, fit)
    obstacles = _obstacles(evidence)
    limits = _limits(evidence)
    outcome = None if score is None else fit.outcomes[evidence.algorithm]
    components = {  # change of the prediction by each feature, against a reward model of average features
        term.name: term.weight * (evidence.features[term.name].value - term.mean) / term.std
        for term in (outcome.features if outcome is not None else ())
    }
    if obstacles:
        verdict, basis = ReadinessVerdict.not_recommended, obstacles[0][0]
    elif (undecided := _undecided(evidence)) is not None:
        verdict, basis = ReadinessVerdict.unknown, undecided
        if outcome is not None:
            rates = {f"probe_{each.n}": each.win_rate for each in evidence.probes}
            ends = {name: replace(rate, value=rate.high) for name, rate in rates.items() if rate.high is not None}
            highest, place = _placed(outcome.score({**evidence.features, **ends}), outcome)
            if highest is ReadinessVerdict.not_recommended:
                verdict, basis = highest, f"{undecided}; at the upper ends of the intervals, {place}"
    elif score is None or outcome is None:
        verdict = ReadinessVerdict.unknown
        basis = "no oracle compared responses of the policy, so there is no probe and no score"
        if evidence.probes:
            basis = f"{_told(evidence.probes[0])}; there is no score"
    else:
        verdict, basis = _placed(score, outcome)
        if limits and verdict is ReadinessVerdict.ready:
            verdict = ReadinessVerdict.acceptable
    advice = [remedy for _, remedy in obstacles] + limits + _next_steps(evidence, verdict, components)
    return RLReadinessReport(
        verdict=verdict,
        score=score,
        basis=basis,
        features=evidence.features,
        components=components,
        recommendations=tuple(dict.fromkeys(advice)),
        cautions=tuple(cautions),
        algorithm=evidence.algorithm,
        gates=tuple(evidence.gates),
        probes=tuple(evidence.probes),
        unscored=evidence.unscored,
    )


def _scored(evidence: Evidence, fit: FittedReadiness) -> tuple[Estimate | None, list[str]]:
    """The fitted score, or None, with what to bear in mind about it."""
    algorithm, features = evidence.algorithm, evidence.features
    if algorithm not in fit.outcomes:
        known = ", ".join(fit.outcomes)
        return None, [f"the fitted score {fit.version} is validated for {known}, not for {algorithm}"]
    outcome = fit.outcomes[algorithm]
    measured = {name for name, value in features.items() if math.isfinite(value.value)}
    missing = [term.name for term in outcome.features if term.name not in measured]
    if missing:
        return None, [f"the fitted score {fit.version} needs {', '.join(missing)}, which was not measured"]
    cautions = [
        f"the score is validated {fit.provenance.wording}: Kendall's tau {outcome.tau:.2f} on worlds that were not "
        "fitted; how far it carries to other policies and data is not known"
    ]
    far = evidence.unscored.get("policy_out_of_distribution")
    if far is not None and far.low is not None and far.low > MOST_UNLIKE:
        cautions.insert(
            0,
            f"{far.value:.0%} of the policy's responses are unlike the labeled pairs, where the study had pairs of the "
            "policy's own; label such pairs (rm-opt select) and measure again",
        )
    outside = [term.name for term in outcome.features if not term.low <= features[term.name].value <= term.high]
    if outside:
        cautions.insert(0, f"the score extrapolates: {', '.join(outside)} lies outside what the study saw")
    return outcome.score(features), cautions


def _obstacles(evidence: Evidence) -> list[tuple[str, str]]:
    """Reasons against the model that no score outweighs, each with its remedy."""
    found = [
        (f"the check {check.name} failed", f"repair {check.name}: {check.explanation}")
        for check in evidence.gates
        if check.status is Status.fail
    ]
    tied = evidence.features.get("tied_groups")
    if tied is not None and tied.value == 1:
        reason = "the rewards of all responses to a prompt are equal"
        found.append((reason, "train on pairs that the model ranks, or draw responses at a higher temperature"))
    for probe in evidence.probes:
        if probe.win_rate.high is not None and probe.win_rate.high <= LITTLE_ABOVE_CHANCE:
            reason = f"{_told(probe)}, hardly above chance"
            remedy = "label pairs of this policy's own responses and train on them (rm-opt select, rm-opt label)"
            found.append((reason, remedy))
    return found


def _undecided(evidence: Evidence) -> str | None:
    """Sentence on a probe that does not show whether picks are better; None where all do."""
    for probe in evidence.probes:
        if probe.win_rate.low is None or probe.win_rate.low <= 0.5:
            return f"{_told(probe)}, not shown to be above chance"
    return None


def _limits(evidence: Evidence) -> list[str]:
    """Sentences on a spread of rewards that the algorithm cannot use."""
    spread, tied = evidence.features.get("reward_spread"), evidence.features.get("tied_groups")
    if evidence.algorithm not in _RESCALES and spread is not None and spread.value < LEAST_SPREAD:
        return [
            f"only {spread.value:.0%} of the reward's variance lies within prompts, which slows {evidence.algorithm}; "
            "subtract a baseline of each prompt and rescale the rewards, or use GRPO"
        ]
    if evidence.algorithm is Algorithm.grpo and tied is not None and tied.value > MOST_TIED_GROUPS:
        return [
            f"{tied.value:.0%} of the groups have equal rewards, from which GRPO gets no gradient; draw larger groups, "
            "or responses at a higher temperature"
        ]
    return []


def _placed(score: Estimate, outcome: FittedOutcome) -> tuple[ReadinessVerdict, str]:
    """Verdict by the place of the score among the study's reward models, and that place in words."""
    places = (
        (ReadinessVerdict.not_recommended, "in the lowest quarter of"),
        (ReadinessVerdict.not_recommended, "below the median of"),
        (ReadinessVerdict.acceptable, "above the median of"),
        (ReadinessVerdict.ready, "in the top quarter of"),
    )
    verdict, place = places[sum(score.value >= cut for cut in outcome.cut_points)]
    return verdict, f"predicted {outcome.outcome}: {score:.2f} {outcome.unit}, {place} the study's reward models"


def _told(probe: ProbeRecord) -> str:
    return f"the best of {probe.n} by this model is preferred in {probe.win_rate:.2f} of the questions"


def _next_steps(evidence: Evidence, verdict: ReadinessVerdict, components: Mapping[str, float]) -> list[str]:
    steps = []
    is_open = verdict is not ReadinessVerdict.not_recommended  # which further answers would not change
    if is_open and not evidence.probes:
        steps.append(
            "answer the probe's questions, or name an oracle: rm-opt readiness --ask FILE, rm-opt label FILE, then "
            "--comparisons FILE; or --gold MODEL"
        )
    elif is_open and (any(probe.num_open for probe in evidence.probes) or _undecided(evidence) is not None):
        steps.append(
            "answer more questions (rm-opt label FILE), on more prompts (--num-prompts), and repeat the command"
        )
    flips, length = evidence.features.get("style_flips"), evidence.features.get("length_correlation")
    if flips is not None and flips.low is not None and flips.low > 0.1:
        steps.append(
            f"style alone turns {flips.value:.0%} of the preferences; add pairs that differ in style only, or a policy "
            "will learn the style"
        )
    if length is not None and abs(length.value) > 0.5:
        steps.append(
            f"reward follows length (correlation {length.value:.2f} within prompts); watch the length of responses, "
            "or penalize it"
        )
    if verdict is ReadinessVerdict.not_recommended and components:
        worst = min(components, key=lambda name: components[name])
        remedy = _REMEDIES.get(worst.split("_")[0], "train on more or cleaner pairs")
        steps.append(f"{worst} lowers the score most; {remedy}")
    if verdict in _START and evidence.probes:
        steps.append(_START[verdict])
    return steps


_REMEDIES = {
    "probe": "label pairs of the policy's own responses, and train on them",
    "accuracy": "train on more pairs, or clean their labels (rm-opt data clean)",
    "nll": "train on more pairs, or clean their labels (rm-opt data clean)",
}
_START = {
    ReadinessVerdict.unknown: (
        "compare the probe's win rate between candidates on the same prompts; where the cautions name what a fitted "
        "score covers, measure that"
    ),
    ReadinessVerdict.ready: (
        "start with a penalty on the divergence, keep checkpoints, and repeat the probe on the trained policy's "
        "responses: a good start does not last (rm-opt rlhf measures every checkpoint)"
    ),
    ReadinessVerdict.acceptable: (
        "keep the policy close: best of few, or a strong penalty on the divergence; repeat the probe at every "
        "checkpoint and stop where the win rate falls (rm-opt rlhf)"
    ),
}
