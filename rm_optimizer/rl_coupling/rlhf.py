"""Resumable optimization of a policy against a reward model, with a measurement of every checkpoint."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import student_mean
from rm_optimizer.core.model.identity import weights_digest
from rm_optimizer.core.pairs.pair import Prompt, digest, prompt_id
from rm_optimizer.core.rows.natural import Prompts, flat_groups, prompts_of
from rm_optimizer.errors import ConfigError, Interrupted, RewardServerUnavailable
from rm_optimizer.evaluation.score_file import score_counted
from rm_optimizer.records.codec import JsonRecord, from_values, json_values
from rm_optimizer.records.files import replacing_folder, write_text
from rm_optimizer.records.ledger import open_ledger
from rm_optimizer.records.provenance import commit, machine, versions
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from rm_optimizer.rl_coupling.out_of_distribution import halves
from rm_optimizer.rl_coupling.overoptimization import OveroptimizationCurve
from rm_optimizer.rl_coupling.policy_simulation import scorer_identity
from rm_optimizer.rl_coupling.policy_training import (
    FreshResponses,
    TrainedPolicy,
    checkpoint_folder,
    finite_rewards,
    require_finite_rewards,
    require_trl,
    train_policy,
)
from rm_optimizer.schema.rlhf import RLHFConfig

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

    @classmethod
    def of(cls, own: MeasuredCheckpoint, start: MeasuredCheckpoint) -> PolicyCheckpoint:
        """A checkpoint compared with the start policy's."""

        def mean(values: Sequence[float], first: Sequence[float] | float = 0.0) -> Estimate:
            return student_mean(np.array(values) - np.array(first))

        return cls(
            own.step,
            mean(own.divergence),
            mean(own.proxy),
            mean(own.proxy, start.proxy),
            None if own.gold is None else mean(own.gold),
            None if own.gold is None or start.gold is None else mean(own.gold, start.gold),
            None if own.disagreement is None else mean(own.disagreement),
            mean(own.num_tokens),
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


MEASUREMENTS_FILE = "measurements.jsonl"
RESULT_FILE = "rlhf.json"
CHECKPOINTS_FOLDER = "checkpoints"
POLICY_FOLDER = "policy"
_OF_THE_TRAINER = ("*.pt", "*.pth", "training_args.bin", "trainer_state.json", "README.md")
"""Files of a checkpoint that a policy does not need."""
_HAS_NO_EFFECT = ("policy", "prompts", "reward_models", "members", "server", "gold", "steps", "stop_disagreement")
"""Options left out of the identity: a digest covers their values, or they only end the run, which may be extended."""


class StopReason(StrEnum):
    """End of an optimization: all steps done, or too much disagreement of the reward models."""

    finished = "finished"
    disagreement = "disagreement"


@dataclass(frozen=True, kw_only=True)
class RLHFResult(JsonRecord, indent=2, rows="checkpoints"):
    """Result of `optimize_policy`, saved as `rlhf.json`.

    Args:
        policy: folder of the optimized policy, which `transformers` loads.
        step: optimizer steps of this policy; after a stop by disagreement, the steps of the checkpoint before.
        stop_reason: reason why the optimization ended.
        checkpoints: the measured checkpoints; the first is the start policy.
        best_gold_step: step with the highest gold reward on one half of the prompts; None without gold.
        best_gold_gain: gain of that step over the start policy on the other half.
        curve: gains by distance from the start policy, which grows from point to point; None without gold or with fewer
            than 4 such checkpoints.
        wall_seconds: duration of the last call, without earlier ones.
        config: the options.
        versions: versions of packages that affect the numbers.
        machine: processor, cores, system.
        commit: the checkout's commit.
    """

    policy: str
    step: int
    stop_reason: StopReason
    checkpoints: tuple[PolicyCheckpoint, ...]
    best_gold_step: int | None
    best_gold_gain: Estimate | None
    curve: OveroptimizationCurve | None
    wall_seconds: float
    config: RLHFConfig
    versions: dict[str, str]
    machine: dict[str, str]
    commit: str | None


def optimize_policy(
    policy: str | Path,
    reward: Scorer,
    prompts: Prompts,
    measured_prompts: Prompts,
    folder: Path,
    config: RLHFConfig,
    *,
    gold: Scorer | None = None,
    seed: int = 0,
    num_bootstrap: int = 1000,
    on_checkpoint: Callable[[PolicyCheckpoint], None] = lambda checkpoint: None,
) -> RLHFResult:
    """Optimize a policy against a reward with TRL, and measure every checkpoint on fresh responses.

    Every checkpoint answers the same prompts, so gains are paired. Measurements are appended to `measurements.jsonl` in
    the folder. Repeating a stopped call, or a finished one with more steps, continues from the last checkpoint.

    Args:
        policy: hub id or folder of a causal language model.
        reward: the reward: a model, an ensemble or a server's client.
        prompts: prompts to train on.
        measured_prompts: prompts of the measurements, at least 4.
        folder: folder of checkpoints, measurements and result.
        config: algorithm and numbers; options that name models and files are not used.
        gold: judge of the responses, or None.
        seed: seed of prompts and responses, not negative.
        num_bootstrap: resamples over prompts for the curve's intervals.
        on_checkpoint: called with each checkpoint, including checkpoints of earlier calls.

    Raises:
        MissingExtra: if TRL is not installed.
        ConfigError: if there are too few prompts, or the folder holds an optimization of more steps.
        CheckpointError: if the policy cannot be used, or a reward is not finite.
        DataError: if a prompt is too long, or the folder holds another optimization.
        RewardServerUnavailable: if the reward's server failed; the checkpoints so far are kept.
        Interrupted: if the user stops the call; the checkpoints so far are kept.
    """
    require_trl()
    prompts, measured_prompts = prompts_of("prompts", prompts), prompts_of("measured_prompts", measured_prompts)
    if not prompts or len(measured_prompts) < 4:
        raise ConfigError(
            f"expected prompts to train on and at least 4 to measure, got {len(prompts)} and {len(measured_prompts)}"
        )
    started = time.perf_counter()
    model = TrainedPolicy(policy, max_new_tokens=config.max_new_tokens, temperature=config.temperature)
    model.require_room([*prompts, *measured_prompts])
    options = {name: value for name, value in json_values(config).items() if name not in _HAS_NO_EFFECT}
    judges = [None if scorer is None else _known_by(scorer, measured_prompts[0]) for scorer in (reward, gold)]
    asked = [[prompt_id(prompt) for prompt in own] for own in (prompts, measured_prompts)]
    identity = digest([weights_digest(model.model), model.tokenizer.chat_template, judges, asked, options, seed])
    with open_ledger(folder / MEASUREMENTS_FILE, identity, other="another optimization") as log:
        measured = [from_values(MeasuredCheckpoint, value) for value in log.values()]
        if measured and measured[-1].step > config.steps:
            raise ConfigError(
                f"{folder} holds an optimization of {measured[-1].step} steps, which is longer than "
                f"rlhf.steps={config.steps}; give as many steps or more, or name another folder"
            )
        for found in measured:
            on_checkpoint(PolicyCheckpoint.of(found, measured[0]))

        def reached(step: int) -> bool:
            """Measure a checkpoint, and save the measurement; False if no step is left."""
            draw = int(digest([seed, step])[:8], 16)
            drawn = model.respond(measured_prompts, config.measured_samples, draw)
            found = measure(step, measured_prompts, drawn, reward, gold)
            log.append(found)
            measured.append(found)
            on_checkpoint(PolicyCheckpoint.of(found, measured[0]))
            return step < config.steps and not _disagree(measured, config.stop_disagreement)

        checkpoints = folder / CHECKPOINTS_FOLDER
        try:
            if not measured:
                reached(0)
            step = measured[-1].step
            if step < config.steps and not _disagree(measured, config.stop_disagreement):
                if step and not (needed := checkpoint_folder(checkpoints, step)).is_dir():
                    raise ConfigError(f"{needed} is gone, and the run cannot go on without it; remove {folder}")
                train_policy(model, reward, prompts, checkpoints, config, seed=seed, resume_step=step, reached=reached)
        except (KeyboardInterrupt, RewardServerUnavailable) as error:
            again = f"the same command goes on from step {measured[-1].step if measured else 0}"
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(f"stopped; {again}") from None
            raise RewardServerUnavailable(f"{error}; {again}") from error
        disagree = _disagree(measured, config.stop_disagreement)
        step = measured[-2 if disagree else -1].step  # after a stop, the checkpoint before
        with replacing_folder(folder / POLICY_FOLDER) as aside:
            if step == 0:
                model.save(aside, model.reference)
            else:
                left_out = shutil.ignore_patterns(*_OF_THE_TRAINER)
                shutil.copytree(checkpoint_folder(checkpoints, step), aside, dirs_exist_ok=True, ignore=left_out)
    best_step, best_gain = (None, None) if measured[0].gold is None else largest_gain(measured, seed)
    result = RLHFResult(
        policy=str(folder / POLICY_FOLDER),
        step=step,
        stop_reason=StopReason.disagreement if disagree else StopReason.finished,
        checkpoints=tuple(PolicyCheckpoint.of(each, measured[0]) for each in measured),
        best_gold_step=best_step,
        best_gold_gain=best_gain,
        curve=curve_of(measured, num_bootstrap=num_bootstrap, seed=seed),
        wall_seconds=time.perf_counter() - started,
        config=config,
        versions=versions() | {"trl": version("trl")},
        machine=machine(),
        commit=commit(),
    )
    write_text(folder / RESULT_FILE, result.to_json() + "\n")
    return result


def _known_by(scorer: Scorer, prompt: Prompt) -> str:
    """Identity of a scorer; if it has none, its kind and one of its rewards."""
    try:
        return scorer_identity(scorer)
    except ConfigError:
        return digest([type(scorer).__name__, round(float(scorer.score([prompt], ["Hello."])[0]), 3)])


def _disagree(measured: Sequence[MeasuredCheckpoint], limit: float | None) -> bool:
    """True if the members disagree on the last checkpoint by more than `limit` times the first one's."""
    first, last = measured[0].disagreement, measured[-1].disagreement
    if limit is None or first is None or last is None:
        return False
    return bool(np.mean(last) > limit * np.mean(first))


def measure(
    step: int, prompts: Sequence[Prompt], drawn: FreshResponses, reward: Scorer, gold: Scorer | None
) -> MeasuredCheckpoint:
    """Measure a checkpoint by fresh responses of its policy.

    Args:
        step: optimizer steps of the policy.
        prompts: prompts that it answered.
        drawn: its responses.
        reward: the reward that is optimized.
        gold: judge of the responses, or None.

    Raises:
        CheckpointError: if a reward is not finite.
    """
    rows, texts, (num_samples, *_) = flat_groups(prompts, drawn.texts)
    disagreement = None
    if isinstance(reward, RewardModelEnsemble):
        found, counted = reward.predict_counted(rows, texts)
        disagreement = [one.std_reward for one in found]
    else:
        counted = score_counted(reward, rows, texts)
    require_finite_rewards(counted.rewards, texts)
    judged = None if gold is None else finite_rewards(gold, rows, texts).tolist()
    if num_cut := max(counted.num_prompt_cut or 0, counted.num_response_cut or 0):
        _log.warning(
            "step %d: the reward model cut %d of %d prompts or responses, so their ends or beginnings are not "
            "rewarded; lower rlhf.max_new_tokens, or train the reward model with a larger model.max_length",
            *(step, num_cut, len(texts)),
        )

    def means(values: ArrayLike) -> tuple[float, ...]:
        return tuple(np.reshape(values, (len(prompts), num_samples)).mean(axis=1).tolist())

    def within(values: ArrayLike) -> float:
        return math.sqrt(np.reshape(values, (len(prompts), num_samples)).var(axis=1, ddof=1).mean())

    return MeasuredCheckpoint(
        step,
        means(drawn.divergence.numpy()),
        means(counted.rewards),
        None if judged is None else means(judged),
        None if disagreement is None else means(disagreement),
        means(drawn.num_tokens.double().numpy()),
        (within(counted.rewards), math.nan if judged is None else within(judged)),
        texts[0],
    )
