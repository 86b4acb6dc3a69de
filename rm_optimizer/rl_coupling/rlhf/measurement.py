"""Measurement of a policy's checkpoints: proxy and gold reward, divergence, length and the members' disagreement."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import student_mean
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import Prompt, Scorer, require_finite
from rm_optimizer.evaluation.score_file import score_counted
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from rm_optimizer.rl_coupling.out_of_distribution import halves
from rm_optimizer.rl_coupling.overoptimization import OveroptimizationCurve
from rm_optimizer.rl_coupling.rlhf.generation import TrainedPolicy

_log = logging.getLogger("rm_optimizer")
FEWEST_CHECKPOINTS = 4
"""Least number of checkpoints, including the start, to fit an over-optimization curve."""


@dataclass(frozen=True)
class MeasuredCheckpoint(JsonRecord):
    """Means over the fresh responses to each prompt.

    Args:
        step: number of optimizer steps.
        divergence: estimates of the divergence from the start policy, in nats.
        proxy: rewards that are optimized.
        gold: rewards of the judge; None without one.
        disagreement: standard deviations over the members; None for a single reward model.
        num_tokens: number of tokens in a response.
        scales: standard deviations of proxy and gold within prompts; NaN if unknown.
        example: the first response to the first prompt.
    """

    step: int
    divergence: tuple[float, ...]
    proxy: tuple[float, ...]
    gold: tuple[float, ...] | None
    disagreement: tuple[float, ...] | None
    num_tokens: tuple[float, ...]
    scales: tuple[float, float]
    example: str


@dataclass(frozen=True)
class PolicyCheckpoint:
    """A checkpoint compared with the start policy, with intervals over prompts.

    Args:
        step: number of optimizer steps.
        divergence: divergence from the start policy, in nats.
        proxy: mean of the reward that is optimized.
        proxy_gain: `proxy` less the start policy's on the same prompts.
        gold: mean reward of the judge; None without one.
        gold_gain: `gold` less the start policy's on the same prompts; None without a judge.
        disagreement: mean standard deviation over the members; None for a single reward model.
        num_tokens: mean number of tokens in a response.
    """

    step: int
    divergence: Estimate
    proxy: Estimate
    proxy_gain: Estimate
    gold: Estimate | None
    gold_gain: Estimate | None
    disagreement: Estimate | None
    num_tokens: Estimate


@dataclass(frozen=True)
class Judges:
    """Rewards that measure a policy.

    Args:
        proxy: the reward that is optimized.
        gold: the judge, or None.
    """

    proxy: Scorer
    gold: Scorer | None

    def measure(
        self, policy: TrainedPolicy, prompts: Sequence[Prompt], num_samples: int, step: int, seed: int
    ) -> MeasuredCheckpoint:
        """Measure the policy in its current state on fresh responses.

        Raises:
            CheckpointError: if a reward is not finite.
        """
        drawn = policy.respond(prompts, num_samples, seed)
        rows = [prompt for prompt in prompts for _ in range(num_samples)]
        texts = [text for own in drawn.texts for text in own]
        shape = (len(prompts), num_samples)
        read = _read(self.proxy, rows, texts)
        proxy, disagreement = read.rewards.reshape(shape), None
        if read.disagreement is not None:
            disagreement = read.disagreement.reshape(shape)
        gold = None if self.gold is None else finite_rewards(self.gold, rows, texts).numpy().reshape(shape)
        _warn_of_cuts(step, read.num_cut, len(texts))
        return MeasuredCheckpoint(
            step,
            _means(drawn.divergence.numpy()),
            _means(proxy),
            None if gold is None else _means(gold),
            None if disagreement is None else _means(disagreement),
            _means(drawn.num_tokens.double().numpy()),
            (_within(proxy), math.nan if gold is None else _within(gold)),
            texts[0],
        )


@dataclass(frozen=True)
class _Read:
    """Rewards of responses by the reward that is optimized.

    Args:
        rewards: rewards, in the order of the responses.
        disagreement: standard deviations over the members; None for a single reward model.
        num_cut: number of responses with tokens that a model in this process does not read; 0 for other scorers.
    """

    rewards: np.ndarray
    disagreement: np.ndarray | None
    num_cut: int


def _read(scorer: Scorer, prompts: Sequence[Prompt], texts: Sequence[str]) -> _Read:
    if isinstance(scorer, RewardModelEnsemble):
        found, counted = scorer.predict_counted(prompts, texts)
        disagreement = np.array([one.std_reward for one in found])
    elif isinstance(scorer, BradleyTerryRM):
        counted, disagreement = score_counted(scorer, prompts, texts), None
        _require_finite(counted.rewards, texts)
    else:
        return _Read(finite_rewards(scorer, prompts, texts).numpy(), None, 0)
    return _Read(np.array(counted.rewards), disagreement, max(counted.num_prompt_cut, counted.num_response_cut))


def finite_rewards(scorer: Scorer, prompts: Sequence[Prompt], texts: Sequence[str]) -> Float[Tensor, " sequences"]:
    """Rewards of the responses, float32 on the CPU.

    Raises:
        CheckpointError: if one is not finite; the message quotes the response.
    """
    rewards = scorer.score(prompts, texts)
    _require_finite(rewards.tolist(), texts)
    return rewards


def _require_finite(rewards: Sequence[float], texts: Sequence[str]) -> None:
    require_finite(rewards, lambda index: f"the response {texts[index][:60]!r}")


def _warn_of_cuts(step: int, num_cut: int, num_texts: int) -> None:
    if num_cut:
        _log.warning(
            "step %d: the reward model cut %d of %d prompts or responses, so their ends or beginnings are not "
            "rewarded; lower rlhf.max_new_tokens, or train the reward model with a larger model.max_length",
            step,
            num_cut,
            num_texts,
        )


def _means(values: np.ndarray) -> tuple[float, ...]:
    return tuple(values.mean(axis=1).tolist())


def _within(values: np.ndarray) -> float:
    return math.sqrt(float(values.var(axis=1, ddof=1).mean()))


def beside_start(checkpoints: Sequence[MeasuredCheckpoint]) -> tuple[PolicyCheckpoint, ...]:
    """The checkpoints with intervals, each compared with the first."""

    def gain(name: str, checkpoint: MeasuredCheckpoint) -> Estimate:
        return student_mean(np.array(getattr(checkpoint, name)) - np.array(getattr(checkpoints[0], name)))

    def mean(values: tuple[float, ...] | None) -> Estimate | None:
        return None if values is None else student_mean(np.array(values))

    return tuple(
        PolicyCheckpoint(
            each.step,
            student_mean(np.array(each.divergence)),
            student_mean(np.array(each.proxy)),
            gain("proxy", each),
            mean(each.gold),
            None if each.gold is None else gain("gold", each),
            mean(each.disagreement),
            student_mean(np.array(each.num_tokens)),
        )
        for each in checkpoints
    )


def largest_gain(checkpoints: Sequence[MeasuredCheckpoint], seed: int) -> tuple[int, Estimate]:
    """Step of the checkpoint with the highest gold reward on one half of the prompts, and its gain on the other half.

    The halves are separate, since the highest of several noisy numbers is biased upwards.
    """
    gold = np.array([each.gold for each in checkpoints])
    choosing, measured = halves(gold.shape[1], seed)
    best = int(gold[:, choosing].mean(axis=1).argmax())
    return checkpoints[best].step, student_mean(gold[best, measured] - gold[0, measured])


def curve_of(
    checkpoints: Sequence[MeasuredCheckpoint], *, num_bootstrap: int, seed: int
) -> OveroptimizationCurve | None:
    """Over-optimization curve of the checkpoints; None without gold or with too few for its fit."""
    first, nats = checkpoints[0], [0.0, *(float(np.mean(each.divergence)) for each in checkpoints[1:])]
    num_records = len(set(np.maximum.accumulate(nats)))
    if first.gold is None or num_records < FEWEST_CHECKPOINTS or not min(first.scales) > 0:
        return None
    proxy, gold = (np.array([getattr(each, name) for each in checkpoints]).T for name in ("proxy", "gold"))
    return OveroptimizationCurve.of_checkpoints(
        nats, proxy, gold, scales=first.scales, num_bootstrap=num_bootstrap, seed=seed
    )
