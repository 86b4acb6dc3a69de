"""Readiness of a reward model, as a program reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.doctor.diagnosis import Check, Status
from rm_optimizer.records.codec import JsonRecord


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
    """No score, for want of an oracle or of a validated prediction."""


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
        score: the score that decided it; None where there is none.
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

    @property
    def failed_gates(self) -> tuple[Check, ...]:
        """Checks that failed."""
        return tuple(check for check in self.gates if check.status is Status.fail)
