"""Features and outcomes of the reward models of a world: features from labels, outcomes from gold rewards.

Features are measured on one half of the prompts, outcomes on the other, on responses drawn anew. Labels are noisy
Bradley-Terry draws; outcomes are the gold reward itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import expit
from torch import Tensor

from rm_optimizer.core.metrics.calibration import equal_mass_bins, expected_calibration_error, fold
from rm_optimizer.experiments.readiness.policy_training import Algorithm, PolicyCourse, Schedule, train_policies
from rm_optimizer.experiments.readiness.reward_models import Population, population
from rm_optimizer.experiments.readiness.sharpness import top_eigenvalues
from rm_optimizer.experiments.readiness.world import LABEL_BETA, NUM_PROMPTS, RewardWorld, Texts
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

PROBE_SIZES = (16, 64, 256, 512)
SELECTIONS = (4, 16, 64, 256)
"""Responses that the best is taken of, for a probe and for an outcome."""
LABELS = (16, 32, 64, 96, 128, 192, 256, 512, 1024)
"""Numbers of labels that every probe and accuracy is measured with; each is a beginning of the next."""
ACCURACY_LABELS = (*LABELS, 2048, 8192)
DIVERGENCES = (3, 6, 12)
"""Divergences from the first policy, in nats, at which gold is read."""
POOL, RESPONSES = 2048, 512
"""Responses to each prompt of the pool that probes draw from, and of the one that outcomes are measured on."""
RATED = 32
"""Responses to a prompt that one set of ratings, shared by all models, covers."""
SHARPNESS_PAIRS = 512
"""Labeled pairs that the sharpness of the loss is measured on."""
RUNS = ("rloo", "rloo_again", "grpo", "unpenalized")
"""Policies of a world: RLOO with two seeds and GRPO under a falling KL penalty, and RLOO without one."""
_SMOOTHED = 9
_LAST = 10


@dataclass(frozen=True)
class WorldSize:
    """Size of a world's measurement.

    Args:
        models: reward models.
        steps: optimizer steps of each policy under a falling KL penalty.
        architectures: architectures of the reward models.
    """

    models: int = 48
    steps: int = 200
    architectures: tuple[str, ...] = ("bag", "bigram", "gru")

    @property
    def unpenalized_steps(self) -> int:
        """Optimizer steps of each policy without a penalty."""
        return self.steps * 3 // 5


@dataclass(frozen=True)
class MeasuredModel:
    """One reward model.

    Args:
        spec: description of its training.
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
        courses: KL divergence, gold and proxy at each step of each policy, by run.
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
    features, ceiling = _features(world, models, for_features, size)
    runs = _runs(world, models, for_outcomes, size)
    outcomes = _best_of_n(world, models, for_outcomes) | _of_runs(runs)
    rows = tuple(
        MeasuredModel(
            spec=asdict(spec),
            features={name: float(values[number]) for name, values in features.items()},
            outcomes={name: float(values[number]) for name, values in outcomes.items()},
        )
        for number, spec in enumerate(models.specs)
    )
    return MeasuredWorld(seed, ceiling, rows, {name: _stored(course) for name, course in runs.items()})


def _stored(course: PolicyCourse) -> dict[str, tuple[tuple[float, ...], ...]]:
    return {
        name: tuple(tuple(round(value, 4) for value in row) for row in getattr(course, name).tolist())
        for name in ("divergence", "gold", "proxy")
    }


def _runs(world: RewardWorld, models: Population, prompts: Tensor, size: WorldSize) -> dict[str, PolicyCourse]:
    """Courses of all policies, by run."""
    annealed, unpenalized = Schedule.annealed(size.steps), Schedule.unpenalized(size.unpenalized_steps)
    how = ((Algorithm.rloo, annealed), (Algorithm.rloo, annealed), (Algorithm.grpo, annealed))
    return {
        name: train_policies(world, models, prompts, algorithm, schedule=schedule, seed=world.seed + 1000 * number)
        for number, (name, (algorithm, schedule)) in enumerate(
            zip(RUNS, (*how, (Algorithm.rloo, unpenalized)), strict=True)
        )
    }


def _pool(world: RewardWorld, prompts: Tensor, count: int, generator: torch.Generator) -> Texts:
    return world.respond(prompts.repeat_interleave(count), generator)


def _features(
    world: RewardWorld, models: Population, prompts: Tensor, size: WorldSize
) -> tuple[dict[str, np.ndarray], float]:
    """Features of all models by name, and the ceiling of their accuracy."""
    generator = torch.Generator().manual_seed(world.seed + 10_000)
    found, ceiling = _accuracies(world, models, prompts, generator)
    pool = _pool(world, prompts, POOL, generator)
    proxy = models.rewards(pool).double().numpy().reshape(len(models.specs), -1, POOL)
    gold = world.gold(pool).numpy().reshape(-1, POOL)
    found["reward_spread"] = np.array([reward_spread(rewards, num_bootstrap=0).value for rewards in proxy])
    found["reward_variance"] = proxy.reshape(len(proxy), -1).var(axis=1)
    for n in PROBE_SIZES:
        wins = _probed(proxy, gold, n, world.seed)
        for labels in LABELS:
            found[f"probe_{n}@{labels}"] = np.array(
                [probe_win_rate(won[:labels], asked[:labels]).value for won, asked in wins]
            )
    found |= _of_short_runs(world, models, prompts, Schedule.annealed(size.steps), generator)
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
            found |= {"ece@2048": np.array([_calibration_error(m[:2048], label[:2048]) for m in margins])}
            found |= {"top_eigenvalue": _sharpness(models, asked, sides, label)}
    return found, ceiling


def _calibration_error(margins: np.ndarray, label: np.ndarray) -> float:
    """Expected calibration error of untempered rewards."""
    weight = np.ones(len(label))
    pairs = fold(margins, label, weight)
    return expected_calibration_error(pairs, equal_mass_bins(pairs.confidence, weight))


def _sharpness(models: Population, prompts: Tensor, sides: Sequence[Texts], label: np.ndarray) -> np.ndarray:
    """Top eigenvalue of each model's Hessian on the first labeled pairs."""
    first, second = (side.tokens[:SHARPNESS_PAIRS] for side in sides)
    is_first = torch.from_numpy(label[:SHARPNESS_PAIRS] > 0.5).unsqueeze(1)
    asked = prompts[:SHARPNESS_PAIRS]
    better, worse = torch.where(is_first, first, second), torch.where(is_first, second, first)
    return top_eigenvalues(models, Texts(asked, better), Texts(asked, worse))


def _probed(
    proxy: Float[np.ndarray, "models prompts samples"], gold: Float[np.ndarray, "prompts samples"], n: int, seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Labels of each model's probe and the prompt of each.

    All models are asked the same questions, as all share the pairs of the accuracy. Models with the same pick share its
    label; labels of different picks are independent.
    """
    chance = np.random.default_rng([seed, n]).random((LABELS[-1], gold.shape[1]))
    found = []
    for rewards in proxy:
        asked = probe_questions(rewards, n, LABELS[-1], seed=seed)
        gap = gold[asked.prompt, asked.pick] - gold[asked.prompt, asked.other]
        wins = chance[np.arange(LABELS[-1]), asked.pick] < expit(LABEL_BETA * gap)
        found.append((wins.astype(float), asked.prompt))
    return found


def _of_short_runs(
    world: RewardWorld, models: Population, prompts: Tensor, schedule: Schedule, generator: torch.Generator
) -> dict[str, np.ndarray]:
    """Win rates of policies after the first half of a run over the first policy's responses to the same prompts."""
    half, seed = schedule.beginning(len(schedule.penalties) // 2), world.seed + 30_000
    early = train_policies(world, models, prompts, Algorithm.rloo, schedule=half, seed=seed).early
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
    means = np.stack([selected_means(rewards, [gold], SELECTIONS)[0].mean(axis=0) for rewards in proxy])
    return {f"best_of_{n}": means[:, column] for column, n in enumerate(SELECTIONS)}


def _of_runs(runs: Mapping[str, PolicyCourse]) -> dict[str, np.ndarray]:
    """Gold of each policy at each divergence, and of the ones without a penalty at its peak and at the end too.

    `rloo_kl_K` is the mean over both seeds of RLOO.
    """
    found = {f"{run}_kl_{kl}": _at(course, kl) for run, course in runs.items() for kl in DIVERGENCES}
    for kl in DIVERGENCES:
        first, second = found[f"rloo_kl_{kl}"], found[f"rloo_again_kl_{kl}"]
        found |= {f"rloo_first_kl_{kl}": first, f"rloo_kl_{kl}": (first + second) / 2}
    divergence, gold = (getattr(runs["unpenalized"], name).double().numpy().T for name in ("divergence", "gold"))
    final, peak = gold[:, -_LAST:].mean(axis=1), np.stack([_moving_mean(row) for row in gold]).max(axis=1)
    reached = np.stack([_moving_mean(row) for row in runs["rloo"].divergence.double().numpy().T]).max(axis=1)
    return found | {
        "rloo_farthest": reached,
        "unpenalized_final": final,
        "unpenalized_peak": peak,
        "unpenalized_fall": peak - final,
        "unpenalized_final_kl": divergence[:, -_LAST:].mean(axis=1),
    }


def _at(course: PolicyCourse, kl: float) -> Float[np.ndarray, " models"]:
    """Gold of each policy of a run where its divergence first reaches a number of nats."""
    courses = zip(course.divergence.double().numpy().T, course.gold.double().numpy().T, strict=True)
    return np.array([_read(_moving_mean(divergence), _moving_mean(gold), kl) for divergence, gold in courses])


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
