"""Features and outcomes of the reward models of a world: features from labels, outcomes from gold rewards.

Features are measured on one half of the prompts, outcomes on the other, on responses drawn anew. Labels are noisy
Bradley-Terry draws; outcomes are the gold reward itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.experiments.readiness.policy_training import Algorithm, PolicyCourse, train_policies
from rm_optimizer.experiments.readiness.reward_models import Population, population
from rm_optimizer.experiments.readiness.world import NUM_PROMPTS, RewardWorld, Texts
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.rl_coupling.best_of_n_curve import selected_means
from rm_optimizer.rl_coupling.readiness.features import (
    agreement,
    pair_accuracy,
    probe_questions,
    probe_win_rate,
    reward_spread,
    tempered_scores,
)

PROBE_SIZES = (4, 16, 64, 256)
LABELS = (16, 32, 64, 96, 128, 192, 256, 512, 1024)
"""Numbers of labels that every probe and accuracy is measured with; each is a beginning of the next."""
ACCURACY_LABELS = (*LABELS, 2048, 8192)
DIVERGENCES = (3, 6, 12)
"""Divergences from the first policy, in nats, at which gold is read."""
RESPONSES = 512
"""Responses of a pool, for features and for outcomes."""
RATED = 32
"""Responses to a prompt that one set of ratings, shared by all models, covers."""
SHORT_STEPS = 60
"""Steps at most of the short runs that are probed."""
_SMOOTHED = 5
_LAST = 10


@dataclass(frozen=True)
class WorldSize:
    """Size of a world's measurement.

    Args:
        models: reward models.
        steps: optimizer steps of each policy.
        architectures: architectures of the reward models.
    """

    models: int = 48
    steps: int = 120
    architectures: tuple[str, ...] = ("bag", "bigram", "gru")


@dataclass(frozen=True)
class MeasuredModel:
    """One reward model.

    Args:
        spec: how it was trained.
        features: measured features; `@` stands before the number of labels.
        outcomes: gold rewards in standard deviations within prompts under the first policy.
    """

    spec: Mapping[str, float | int | str]
    features: Mapping[str, float]
    outcomes: Mapping[str, float]


@dataclass(frozen=True)
class MeasuredWorld(JsonRecord):
    """The reward models of a world.

    Args:
        seed: the world's seed.
        ceiling: accuracy of the gold reward on the labels.
        models: the models.
        courses: KL divergence, gold and proxy at each step of each policy, by algorithm.
    """

    seed: int
    ceiling: float
    models: tuple[MeasuredModel, ...]
    courses: Mapping[str, Mapping[str, tuple[tuple[float, ...], ...]]]


def measure_world(seed: int, size: WorldSize) -> MeasuredWorld:
    """Train the reward models of a world, measure their features, and optimize policies against them.

    Args:
        seed: seed of the world.
        size: size of the measurement.
    """
    world = RewardWorld(seed)
    models = Population.trained(world, population(seed, size.models, architectures=size.architectures))
    order = torch.from_numpy(np.random.default_rng([seed, 3]).permutation(NUM_PROMPTS))
    for_features, for_outcomes = order[: NUM_PROMPTS // 2], order[NUM_PROMPTS // 2 :]
    features, ceiling = _features(world, models, for_features)
    outcomes = _best_of_n(world, models, for_outcomes)
    courses: dict[str, Mapping[str, tuple[tuple[float, ...], ...]]] = {}
    for number, algorithm in enumerate(Algorithm):
        course = train_policies(world, models, for_outcomes, algorithm, steps=size.steps, seed=seed + 1000 * number)
        outcomes |= _of_course(course, algorithm)
        courses[algorithm.value] = {
            name: tuple(tuple(round(value, 4) for value in row) for row in getattr(course, name).tolist())
            for name in ("divergence", "gold", "proxy")
        }
    rows = tuple(
        MeasuredModel(
            spec=asdict(spec),
            features={name: float(values[number]) for name, values in features.items()},
            outcomes={name: float(values[number]) for name, values in outcomes.items()},
        )
        for number, spec in enumerate(models.specs)
    )
    return MeasuredWorld(seed, ceiling, rows, courses)


def _pool(world: RewardWorld, prompts: Tensor, count: int, generator: torch.Generator) -> Texts:
    return world.respond(prompts.repeat_interleave(count), generator)


def _features(world: RewardWorld, models: Population, prompts: Tensor) -> tuple[dict[str, np.ndarray], float]:
    """Features of all models by name, and the ceiling of their accuracy."""
    generator = torch.Generator().manual_seed(world.seed + 10_000)
    found, ceiling = _accuracies(world, models, prompts, generator)
    pool = _pool(world, prompts, RESPONSES, generator)
    proxy = models.rewards(pool).double().numpy().reshape(len(models.specs), -1, RESPONSES)
    gold = world.gold(pool).numpy().reshape(-1, RESPONSES)
    found["reward_spread"] = np.array([reward_spread(rewards, num_bootstrap=0).value for rewards in proxy])
    for n in PROBE_SIZES:
        wins = [_probed(world, rewards, gold, n, generator) for rewards in proxy]
        for labels in LABELS:
            found[f"probe_{n}@{labels}"] = np.array(
                [probe_win_rate(won[:labels], asked[:labels]).value for won, asked in wins]
            )
    found |= _of_short_runs(world, models, prompts, generator)
    noise = torch.randn(len(prompts), RATED, generator=generator).numpy()
    ratings = gold[:, :RATED] + noise  # one rating of each response, shared by all models
    for n in (4, 16):
        found[f"rated_{n}"] = np.array(
            [selected_means(rewards[:, :RATED], [ratings], [n])[0].mean() for rewards in proxy]
        )
    return found, ceiling


def _accuracies(
    world: RewardWorld, models: Population, prompts: Tensor, generator: torch.Generator
) -> tuple[dict[str, np.ndarray], float]:
    """Accuracy, proper scores and the ceiling, on pairs of the policy and of a stranger."""
    found: dict[str, np.ndarray] = {}
    ceiling = 1.0
    for name, by in (("accuracy", world.policy), ("off_policy_accuracy", world.stranger)):
        asked = prompts[torch.randint(len(prompts), (ACCURACY_LABELS[-1],), generator=generator)]
        sides = [world.respond(asked, generator, by=by) for _ in range(2)]
        first, second = (world.gold(side) for side in sides)
        label = world.prefers_first(first, second, generator).double().numpy()
        margins = (models.rewards(sides[0]) - models.rewards(sides[1])).double().numpy()
        clusters = asked.numpy()
        for labels in ACCURACY_LABELS if name == "accuracy" else (256, 2048):
            found[f"{name}@{labels}"] = np.array(
                [pair_accuracy(margin[:labels], clusters[:labels], label[:labels]).value for margin in margins]
            )
        if name == "accuracy":
            agreed, _ = agreement((first - second).double().numpy(), label)
            ceiling = float(agreed.mean())
            scores = [tempered_scores(m[:2048], clusters[:2048], label[:2048], num_bootstrap=0) for m in margins]
            found |= {"nll@2048": np.array([each.nll.value for each in scores])}
            found |= {"brier@2048": np.array([each.brier.value for each in scores])}
    return found, ceiling


def _probed(
    world: RewardWorld,
    rewards: Float[np.ndarray, "prompts samples"],
    gold: Float[np.ndarray, "prompts samples"],
    n: int,
    generator: torch.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Labels of a model's probe and the prompt of each; questions and labels of their own for every model."""
    asked = probe_questions(rewards, n, LABELS[-1], seed=int(torch.randint(2**31, (1,), generator=generator)))
    first, second = (torch.from_numpy(gold[asked.prompt, at]) for at in (asked.pick, asked.other))
    return world.prefers_first(first, second, generator).double().numpy(), asked.prompt


def _of_short_runs(
    world: RewardWorld, models: Population, prompts: Tensor, generator: torch.Generator
) -> dict[str, np.ndarray]:
    """Win rates of policies after a short run over the first policy's responses to the same prompts."""
    early = train_policies(world, models, prompts, Algorithm.rloo, steps=SHORT_STEPS, seed=world.seed + 30_000).early
    order = torch.randperm(early.prompts.shape[1], generator=generator)
    moved = Texts(early.prompts[:, order], early.tokens[:, order])
    first = world.respond(moved.prompts.reshape(-1), generator)
    gold = world.gold(first).view_as(moved.prompts)
    wins = world.prefers_first(world.gold(moved), gold, generator).double().numpy()
    asked = moved.prompts.numpy()
    return {
        f"short_run@{labels}": np.array(
            [probe_win_rate(won[:labels], of[:labels]).value for won, of in zip(wins, asked, strict=True)]
        )
        for labels in LABELS
        if labels <= wins.shape[1]
    }


def _best_of_n(world: RewardWorld, models: Population, prompts: Tensor) -> dict[str, np.ndarray]:
    """Mean gold of the best of n of each model."""
    generator = torch.Generator().manual_seed(world.seed + 20_000)
    pool = _pool(world, prompts, RESPONSES, generator)
    gold = world.gold(pool).double().numpy().reshape(-1, RESPONSES)
    proxy = models.rewards(pool).double().numpy().reshape(len(models.specs), -1, RESPONSES)
    means = np.stack([selected_means(rewards, [gold], PROBE_SIZES)[0].mean(axis=0) for rewards in proxy])
    return {f"best_of_{n}": means[:, column] for column, n in enumerate(PROBE_SIZES)}


def _of_course(course: PolicyCourse, algorithm: Algorithm) -> dict[str, np.ndarray]:
    """Gold of each policy at each divergence, at its peak and at the end."""
    divergence, gold = course.divergence.double().numpy().T, course.gold.double().numpy().T
    smooth = np.stack([_moving_mean(row) for row in gold])
    steps = [_moving_mean(row) for row in divergence]
    found = {
        f"{algorithm.value}_kl_{kl}": np.array([_read(at, row, kl) for at, row in zip(steps, smooth, strict=True)])
        for kl in DIVERGENCES
    }
    final, peak = gold[:, -_LAST:].mean(axis=1), smooth.max(axis=1)
    return found | {
        f"{algorithm.value}_final": final,
        f"{algorithm.value}_peak": peak,
        f"{algorithm.value}_fall": peak - final,
        f"{algorithm.value}_final_kl": divergence[:, -_LAST:].mean(axis=1),
    }


def _moving_mean(row: np.ndarray) -> np.ndarray:
    return np.convolve(row, np.full(_SMOOTHED, 1 / _SMOOTHED), "valid")


def _read(divergence: np.ndarray, gold: np.ndarray, at: float) -> float:
    """Gold where a policy first reaches a divergence, linear between steps; at the end where it never does."""
    reached = divergence >= at
    if not reached.any():
        return float(gold[-1])
    last = int(reached.argmax())
    if last == 0:
        return float(gold[0])
    share = (at - divergence[last - 1]) / (divergence[last] - divergence[last - 1])
    return float((1 - share) * gold[last - 1] + share * gold[last])
