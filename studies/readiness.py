"""Validation of the readiness score: `python studies/readiness.py FOLDER [--worlds development|test]`.

The worlds have a gold reward. Worlds 0-2 choose the features and the penalty of the score, and worlds 3-8 test that
choice once. In each world reward models are trained, their features measured from noisy labels on one half of the
prompts, and outcomes measured by the gold reward itself on the other half, on responses drawn anew. A measured world is
only read, so a stopped command can be repeated. `readiness_choice.json` and `readiness_validation.json` are the choice
and the result behind the score of `rm-opt readiness`, which the package holds as `fitted_v1.json`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from readiness_worlds import (
    LABEL_BETA,
    NUM_PROMPTS,
    Algorithm,
    PolicyCourse,
    Population,
    RewardWorld,
    Schedule,
    Texts,
    population,
    top_eigenvalues,
    train_policies,
)
from scipy.special import expit
from scipy.stats import kendalltau
from torch import Tensor

from rm_optimizer.core.metrics.calibration import equal_mass_bins, expected_calibration_error, fold
from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate, IntervalKind
from rm_optimizer.core.metrics.intervals import clustered_share, student_mean
from rm_optimizer.errors import ConfigError, RMOptimizerError
from rm_optimizer.records.codec import json_values
from rm_optimizer.records.files import write_text
from rm_optimizer.records.provenance import commit, versions
from rm_optimizer.reporting.figures import BLUE, GRAY, VERMILION, draw_legend, new_figure, save_figure
from rm_optimizer.reporting.tables import new_table, output_console
from rm_optimizer.rl_coupling.best_of_n_curve import selected_means
from rm_optimizer.rl_coupling.readiness.features import (
    agreement,
    pair_accuracy,
    relative_to_ceiling,
    reward_spread,
    tempered_scores,
)
from rm_optimizer.rl_coupling.readiness.fitted import FitProvenance, FittedFeature, FittedOutcome, FittedReadiness
from rm_optimizer.rl_coupling.readiness.probe import probe_questions
from rm_optimizer.rl_coupling.rl_readiness import RLReadinessScorer

DEVELOPMENT, TEST = (0, 1, 2), (3, 4, 5, 6, 7, 8)
"""Seeds of the worlds."""
MODELS, STEPS, ARCHITECTURES = 48, 200, ("bag", "bigram", "gru")
"""Reward models of a world, optimizer steps of each policy, and architectures of the models."""
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
WORDING = "on synthetic gold-reward worlds with tiny policies"
OUTCOMES: Mapping[str, tuple[str, str]] = {
    "bon": ("best_of_64", "gold reward of the best of 64"),
    "rloo_kl": ("rloo_kl_6", "gold reward after RLOO to a divergence of 6 nats"),
    "grpo": ("grpo_kl_6", "gold reward after GRPO to a divergence of 6 nats"),
}
"""The outcome that the fit of each algorithm predicts, and what it is in words."""
CANDIDATES: Mapping[str, tuple[str, ...]] = {
    "probe 64": ("probe_64@256",),
    "probe 256": ("probe_256@256",),
    "probe 512": ("probe_512@256",),
    "probe 64 and accuracy": ("probe_64@192", "accuracy_relative@64"),
    "probe 256 and accuracy": ("probe_256@192", "accuracy_relative@64"),
    "probe 512 and accuracy": ("probe_512@192", "accuracy_relative@64"),
    "probes 64 and 256": ("probe_64@128", "probe_256@128"),
    "probes 64 and 512": ("probe_64@128", "probe_512@128"),
}
"""Features of the fits to choose from, each of 256 labels a model."""
RIDGES = (0.01, 0.1, 1.0)
SCORE = "readiness score"
MATCHED, EIGHTFOLD = "accuracy, 256 labels", "accuracy, 2,048 labels"
JUDGED: Mapping[str, str] = {
    "best_of_16": "best of 16",
    "best_of_64": "best of 64",
    "best_of_256": "best of 256",
    "rloo_kl_3": "RLOO, 3 nats",
    "rloo_kl_6": "RLOO, 6 nats",
    "rloo_kl_12": "RLOO, 12 nats",
    "grpo_kl_6": "GRPO, 6 nats",
    "unpenalized_kl_6": "no penalty, 6 nats",
    "unpenalized_final": "no penalty, end",
}
"""Outcomes that tables list, and what they are in words."""
NUM_BOOTSTRAP = 10_000
PAIRS: Mapping[str, tuple[str, str]] = {
    "two seeds of RLOO at 6 nats": ("rloo_first_kl_6", "rloo_again_kl_6"),
    "RLOO and GRPO at 6 nats": ("rloo_kl_6", "grpo_kl_6"),
    "RLOO at 6 nats with and without a penalty": ("rloo_kl_6", "unpenalized_kl_6"),
    "RLOO at 6 nats and the best of 64": ("rloo_kl_6", "best_of_64"),
    "RLOO at 6 nats and the best of 256": ("rloo_kl_6", "best_of_256"),
}


def measure_world(seed: int, models: int, steps: int, architectures: Sequence[str]) -> dict[str, Any]:
    """Features and outcomes of the reward models of a world, and the courses of the policies optimized against them.

    Args:
        seed: seed of the world.
        models: number of reward models.
        steps: optimizer steps of each policy under a falling KL penalty.
        architectures: architectures of the reward models.

    Returns:
        Seed; `ceiling`, the accuracy of the gold reward on the labels; the `models` with spec, features (`@` and the
        number of labels at the end) and outcomes in standard deviations within prompts; and the `courses`.
    """
    world = RewardWorld(seed)
    trained = Population.trained(world, population(seed, models, architectures=architectures))
    order = torch.from_numpy(np.random.default_rng([seed, 3]).permutation(NUM_PROMPTS))
    for_features, for_outcomes = order[: NUM_PROMPTS // 2], order[NUM_PROMPTS // 2 :]
    annealed, unpenalized = Schedule.annealed(steps), Schedule(1e-3, (0.0,) * (steps * 3 // 5))
    features, ceiling = _features(world, trained, for_features, annealed)
    kinds = ((Algorithm.rloo, annealed), (Algorithm.rloo, annealed), (Algorithm.grpo, annealed))
    runs = {
        name: train_policies(world, trained, for_outcomes, algorithm, schedule=schedule, seed=seed + 1000 * number)
        for number, (name, (algorithm, schedule)) in enumerate(
            zip(RUNS, (*kinds, (Algorithm.rloo, unpenalized)), strict=True)
        )
    }
    outcomes = _best_of_n(world, trained, for_outcomes) | _of_runs(runs)
    rows = [
        {
            "spec": asdict(spec),
            "features": {name: float(values[number]) for name, values in features.items()},
            "outcomes": {name: float(values[number]) for name, values in outcomes.items()},
        }
        for number, spec in enumerate(trained.specs)
    ]
    courses = {
        run: {
            name: [[round(value, 4) for value in row] for row in getattr(course, name).tolist()]
            for name in ("divergence", "gold", "proxy")
        }
        for run, course in runs.items()
    }
    return {"seed": seed, "ceiling": ceiling, "models": rows, "courses": courses}


def _features(
    world: RewardWorld, models: Population, prompts: Tensor, schedule: Schedule
) -> tuple[dict[str, np.ndarray], float]:
    """Features of all models by name, and the ceiling of their accuracy."""
    generator = torch.Generator().manual_seed(world.seed + 10_000)
    found, ceiling = _accuracies(world, models, prompts, generator)
    pool = world.respond(prompts.repeat_interleave(POOL), generator)
    proxy = models.rewards(pool).double().numpy().reshape(len(models.specs), -1, POOL)
    gold = world.gold(pool).numpy().reshape(-1, POOL)
    found["reward_spread"] = np.array([reward_spread(rewards, num_bootstrap=0).value for rewards in proxy])
    found["reward_variance"] = proxy.reshape(len(proxy), -1).var(axis=1)
    for n in PROBE_SIZES:
        wins = _probed(proxy, gold, n, world.seed)
        for labels in LABELS:
            found[f"probe_{n}@{labels}"] = np.array(
                [clustered_share(won[:labels], asked[:labels]).value for won, asked in wins]
            )
    found |= _of_short_runs(world, models, prompts, schedule, generator)
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
            weight = np.ones(2048)
            folded = [fold(margin[:2048], label[:2048], weight) for margin in margins]
            bins = [equal_mass_bins(pairs.confidence, weight) for pairs in folded]
            errors = map(expected_calibration_error, folded, bins)
            found |= {"ece@2048": np.array(list(errors))}  # of untempered rewards
            found |= {"top_eigenvalue": _sharpness(models, asked, sides, label)}
    return found, ceiling


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
    half = replace(schedule, penalties=schedule.penalties[: len(schedule.penalties) // 2])
    seed = world.seed + 30_000
    early = train_policies(world, models, prompts, Algorithm.rloo, schedule=half, seed=seed).early
    order = torch.randperm(early.prompts.shape[1], generator=generator)
    moved = Texts(early.prompts[:, order], early.tokens[:, order])
    first = world.respond(moved.prompts.reshape(-1), generator)
    gold = world.gold(first).view_as(moved.prompts)
    wins = world.prefers_first(world.gold(moved), gold, generator).double().numpy()
    asked = moved.prompts.numpy()
    return {
        f"short_run@{labels}": np.array(
            [clustered_share(won[:labels], of[:labels]).value for won, of in zip(wins, asked, strict=True)]
        )
        for labels in LABELS
        if labels <= wins.shape[1]
    }


def _best_of_n(world: RewardWorld, models: Population, prompts: Tensor) -> dict[str, np.ndarray]:
    """Mean gold of the best of n of each model."""
    generator = torch.Generator().manual_seed(world.seed + 20_000)
    pool = world.respond(prompts.repeat_interleave(RESPONSES), generator)
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


def column(world: Mapping[str, Any], name: str) -> Float[np.ndarray, " models"]:
    """A feature or outcome of every model of a world; `accuracy_relative@N` is relative to the world's ceiling."""
    if name.startswith("accuracy_relative@"):
        raw = column(world, f"accuracy@{name.partition('@')[2]}")
        return np.array([relative_to_ceiling(Estimate(value, None, 1), world["ceiling"]).value for value in raw])
    return np.array([(model["features"] | model["outcomes"])[name] for model in world["models"]])


def fit_outcome(
    worlds: Sequence[Mapping[str, Any]], terms: Sequence[str], ridge: float, algorithm: str
) -> FittedOutcome:
    """Ridge regression of an outcome on standardized features; tau and the residuals are the test's to fill in.

    Args:
        worlds: worlds to fit.
        terms: features.
        ridge: penalty of squared weights, in units of the number of models.
        algorithm: key of `OUTCOMES`.
    """
    values = np.concatenate([np.stack([column(world, term) for term in terms], axis=1) for world in worlds])
    target = np.concatenate([column(world, OUTCOMES[algorithm][0]) for world in worlds])
    mean, std = values.mean(axis=0), np.maximum(values.std(axis=0), 1e-9)
    standardized = (values - mean) / std
    penalty = ridge * len(values) * np.eye(len(terms))
    weights = np.linalg.solve(standardized.T @ standardized + penalty, standardized.T @ (target - target.mean()))
    fitted = target.mean() + standardized @ weights
    numbers = (mean, std, weights, values.min(axis=0), values.max(axis=0))
    return FittedOutcome(
        outcome=OUTCOMES[algorithm][1],
        unit="standard deviations of the gold reward within prompts",
        features=tuple(
            FittedFeature(term.partition("@")[0], *(float(number[at]) for number in numbers))
            for at, term in enumerate(terms)
        ),
        intercept=float(target.mean()),
        residual_std=float((target - fitted).std()),
        cut_points=tuple(float(cut) for cut in np.quantile(fitted, [0.25, 0.5, 0.75])),
        tau=Estimate(float("nan"), None, 0),
    )


def predicted(fit: FittedOutcome, world: Mapping[str, Any], terms: Sequence[str]) -> Float[np.ndarray, " models"]:
    """Prediction of a fit for every model of a world."""
    value = np.full(len(world["models"]), fit.intercept)
    for term, feature in zip(terms, fit.features, strict=True):
        value += feature.weight * (column(world, term) - feature.mean) / feature.std
    return value


def baselines(world: Mapping[str, Any]) -> dict[str, Float[np.ndarray, " models"]]:
    """Predictors without a fit, larger meaning better, by name."""

    def standard(values: np.ndarray) -> np.ndarray:
        return np.asarray((values - values.mean()) / max(values.std(), 1e-9))

    accuracy, spread = column(world, "accuracy@2048"), column(world, "reward_spread")
    names = ("accuracy@2048", "ece@2048", "reward_variance", "top_eigenvalue")
    given = zip(*(column(world, name) for name in names), strict=True)
    authors = [math.fsum(RLReadinessScorer().compute_score(*each).components.values()) for each in given]
    return {
        MATCHED: column(world, "accuracy@256"),
        EIGHTFOLD: accuracy,
        "accuracy off policy, 2,048 labels": column(world, "off_policy_accuracy@2048"),
        "NLL at the fitted temperature, 2,048 labels": -column(world, "nll@2048"),
        "Brier score at the fitted temperature, 2,048 labels": -column(world, "brier@2048"),
        "accuracy and reward spread (Razin et al.), 2,048 labels": standard(accuracy) + standard(spread),
        "score of the method's authors": np.array(authors),
        "best of 16 of 32 rated responses, 1,024 ratings shared by all models": column(world, "rated_16"),
        **{f"probe of the best of {n}, 256 labels": column(world, f"probe_{n}@256") for n in PROBE_SIZES},
        "win rate after a short RLOO run to 3 nats, 256 labels": column(world, "short_run@256"),
    }


def choose(worlds: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Choice of features and penalty for each algorithm by tau with its outcome, each world predicted from the others.

    Args:
        worlds: development worlds.
        steps: optimizer steps of their policies.
    """
    fits = {}
    for algorithm, (outcome, _) in OUTCOMES.items():
        scores = {}
        for (name, terms), ridge in product(CANDIDATES.items(), RIDGES):
            fits_of = [fit_outcome([w for w in worlds if w is not world], terms, ridge, algorithm) for world in worlds]
            taus = [tau(predicted(fit, w, terms), column(w, outcome)) for fit, w in zip(fits_of, worlds, strict=True)]
            scores[name, ridge] = float(np.mean(taus))
        name, ridge = max(scores, key=lambda key: scores[key])
        fits[algorithm] = {
            "terms": [{"feature": term.partition("@")[0], "measured": term} for term in CANDIDATES[name]],
            "ridge": ridge,
            "tau": {f"{each}, ridge {penalty:g}": value for (each, penalty), value in scores.items()},
        }
    size = {"models": len(worlds[0]["models"]), "steps": steps}
    return {"fits": fits, "development": [world["seed"] for world in worlds], **size}


def terms_of(choice: Mapping[str, Any], algorithm: str) -> list[str]:
    """Features of the fit that was chosen for an algorithm."""
    return [term["measured"] for term in choice["fits"][algorithm]["terms"]]


def validate(
    fits: Mapping[str, FittedOutcome], choice: Mapping[str, Any], worlds: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Test of fits on worlds that they were not fitted on: tau of every predictor, and the score's lead over accuracy.

    Args:
        fits: the fit of each algorithm.
        choice: the choice behind them.
        worlds: test worlds.
    """
    taus, differences = [], []
    for outcome in JUDGED:
        algorithm = "bon" if outcome.startswith("best") else "grpo" if outcome.startswith("grpo") else "rloo_kl"
        scores = [predicted(fits[algorithm], world, terms_of(choice, algorithm)) for world in worlds]
        columns = [{SCORE: score} | baselines(world) for score, world in zip(scores, worlds, strict=True)]
        targets = [column(world, outcome) for world in worlds]
        by_name = {name: [each[name] for each in columns] for name in columns[0]}
        taus += [_predictor_tau(name, outcome, values, targets) for name, values in by_name.items()]
        for baseline in (MATCHED, EIGHTFOLD):
            differences.append(_difference(outcome, baseline, by_name[SCORE], by_name[baseline], targets))
    names = worlds[0]["models"][0]["outcomes"]
    pooled = {name: np.concatenate([column(world, name) for world in worlds]) for name in names}
    return {
        "worlds": [world["seed"] for world in worlds],
        "num_models": sum(len(world["models"]) for world in worlds),
        "taus": taus,
        "differences": differences,
        "curve": [_label_point(fits["rloo_kl"], choice, worlds, labels) for labels in ACCURACY_LABELS],
        "outcomes": {name: np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist() for name, values in pooled.items()},
        "over_optimized": [
            float(share.mean()) for share in (pooled["unpenalized_fall"] > 0.3, pooled["unpenalized_final"] < 0)
        ],
        "agreement": {
            name: student_mean(np.array([tau(column(world, one), column(world, other)) for world in worlds]))
            for name, (one, other) in PAIRS.items()
        },
    }


def _predictor_tau(
    name: str, outcome: str, values: Sequence[np.ndarray], targets: Sequence[np.ndarray]
) -> dict[str, Any]:
    by_world = [tau(value, target) for value, target in zip(values, targets, strict=True)]
    regrets, shares = [], []
    for value, target in zip(values, targets, strict=True):
        regrets.append(float(target.max() - target[value == value.max()].mean()))
        best, chosen = (set(np.argsort(-each, kind="stable")[:5].tolist()) for each in (target, value))
        shares.append(len(best & chosen) / 5)
    return {
        "predictor": name,
        "outcome": outcome,
        "tau": student_mean(np.array(by_world)),
        "by_world": by_world,
        "regret": float(np.mean(regrets)),
        "top_five": float(np.mean(shares)),
    }


def _difference(
    outcome: str,
    baseline: str,
    score: Sequence[np.ndarray],
    other: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
) -> dict[str, Any]:
    by_world, drawn = [], np.zeros(NUM_BOOTSTRAP)
    rng = np.random.default_rng(0)
    for first, second, target in zip(score, other, targets, strict=True):
        by_world.append(tau(first, target) - tau(second, target))
        counts = rng.multinomial(len(target), np.full(len(target), 1 / len(target)), size=NUM_BOOTSTRAP)
        drawn += (resampled_taus(first, target, counts) - resampled_taus(second, target, counts)) / len(targets)
    mean, error, num_models = float(np.mean(by_world)), float(drawn.std(ddof=1)), sum(map(len, targets))
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    over_models = Estimate(mean, error, num_models, low, high, IntervalKind.resampled)
    over_worlds = student_mean(np.array(by_world))
    return {"outcome": outcome, "baseline": baseline, "over_models": over_models, "over_worlds": over_worlds}


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


def _label_point(
    fit: FittedOutcome, choice: Mapping[str, Any], worlds: Sequence[Mapping[str, Any]], labels: int
) -> dict[str, Any]:
    """Mean taus with gold after RLOO to 6 nats at a number of labels, with the frozen weights; None if not measured."""
    terms = terms_of(choice, "rloo_kl")
    whole = sum(int(term.partition("@")[2]) for term in terms)
    scaled = [f"{term.partition('@')[0]}@{int(term.partition('@')[2]) * labels / whole:g}" for term in terms]
    measured = worlds[0]["models"][0]["features"]

    def mean(values: Sequence[np.ndarray]) -> float:
        return float(np.mean([tau(v, column(w, "rloo_kl_6")) for v, w in zip(values, worlds, strict=True)]))

    has_terms = all(term.replace("accuracy_relative", "accuracy") in measured for term in scaled)
    score = mean([predicted(fit, world, scaled) for world in worlds]) if has_terms else None
    probe, accuracy = (
        mean([column(world, name) for world in worlds]) if name in measured else None
        for name in (f"probe_64@{labels}", f"accuracy@{labels}")
    )
    return {"labels": labels, "score": score, "probe": probe, "accuracy": accuracy}


def tau(first: np.ndarray, second: np.ndarray) -> float:
    """Kendall's tau-b; 0 where one of the two does not vary."""
    found = float(kendalltau(first, second).statistic)
    return found if np.isfinite(found) else 0.0


def measured(folder: Path, seeds: Sequence[int], size: dict[str, Any]) -> list[dict[str, Any]]:
    """Worlds of these seeds, read from the folder or measured.

    Raises:
        ConfigError: if a stored world has another size.
    """
    found = []
    for seed in seeds:
        path = folder / f"world-{seed}.json"
        if not path.is_file():
            print(f"measuring world {seed}", flush=True)
            write_text(path, json.dumps({"size": size} | measure_world(seed, **size)) + "\n")
        found.append(json.loads(path.read_text(encoding="utf-8")))
        if found[-1]["size"] != json_values(size):
            raise ConfigError(f"{path} has another size, {found[-1]['size']}; choose another folder")
    return found


def develop(folder: Path, size: dict[str, Any], seeds: Sequence[int] = DEVELOPMENT) -> dict[str, Any]:
    """Choice on the development worlds, written as `frozen.json`.

    Raises:
        ConfigError: if the test has begun with another choice.
    """
    choice, touched = choose(measured(folder, seeds, size), size["steps"]), folder / "touched.json"
    if touched.is_file() and json.loads(touched.read_text(encoding="utf-8"))["choice"] != choice:
        raise ConfigError(f"the test worlds of {folder} were measured under another choice; choose another folder")
    write_text(folder / "choice.json", json.dumps(choice, indent=1) + "\n")
    return choice


def judge_once(
    folder: Path, size: dict[str, Any], development: Sequence[int] = DEVELOPMENT, seeds: Sequence[int] = TEST
) -> dict[str, Any]:
    """Result on the test worlds under the frozen choice; writes `validation.json` and the score, `fitted.json`.

    `touched.json` is written before a test world is measured.

    Raises:
        ConfigError: if no choice was frozen, or the test has begun with another one.
    """
    frozen, touched = folder / "choice.json", folder / "touched.json"
    if not frozen.is_file():
        raise ConfigError("a test without a frozen choice would be no test; run --worlds development first")
    choice = json.loads(frozen.read_text(encoding="utf-8"))
    if not touched.is_file():
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_text(touched, json.dumps({"time": now, "commit": commit(), "choice": choice}, indent=1) + "\n")
    touch = json.loads(touched.read_text(encoding="utf-8"))
    if touch["choice"] != choice:
        raise ConfigError(f"the test worlds of {folder} were measured under another choice; choose another folder")
    worlds, developed = measured(folder, seeds, size), measured(folder, development, size)
    validation, fitted = result_of(choice, developed, worlds, touch)
    write_text(folder / "validation.json", json.dumps(json_values(validation), indent=1) + "\n")
    write_text(folder / "fitted.json", fitted.to_json() + "\n")
    return validation


def result_of(
    choice: Mapping[str, Any],
    developed: Sequence[Mapping[str, Any]],
    worlds: Sequence[Mapping[str, Any]],
    touch: Mapping[str, Any],
) -> tuple[dict[str, Any], FittedReadiness]:
    """The validation, and the fitted score with its tau and its prediction errors on the test worlds.

    Args:
        choice: the frozen choice.
        developed: worlds to fit.
        worlds: test worlds.
        touch: time and commit of the start of the test.
    """
    fits = {
        algorithm: fit_outcome(developed, terms_of(choice, algorithm), fit["ridge"], algorithm)
        for algorithm, fit in choice["fits"].items()
    }
    validation, tested = validate(fits, choice, worlds), {}
    for algorithm, fit in fits.items():
        outcome, terms = OUTCOMES[algorithm][0], terms_of(choice, algorithm)
        errors = np.concatenate([column(world, outcome) - predicted(fit, world, terms) for world in worlds])
        tested[algorithm] = replace(
            fit, residual_std=float(np.sqrt((errors**2).mean())), tau=tau_of(validation, SCORE, outcome)["tau"]
        )
    provenance = FitProvenance(
        wording=WORDING,
        fitted_worlds=tuple(world["seed"] for world in developed),
        tested_worlds=tuple(world["seed"] for world in worlds),
        num_fitted=sum(len(world["models"]) for world in developed),
        num_tested=validation["num_models"],
        frozen_commit=touch["commit"] or "unknown",
        created=touch["time"],
        versions=versions(),
    )
    version = f"readiness-{provenance.frozen_commit[:8]}"
    return validation, FittedReadiness(version=version, outcomes=tested, provenance=provenance)


def tau_of(validation: Mapping[str, Any], predictor: str, outcome: str) -> Mapping[str, Any]:
    """The entry of a predictor and an outcome."""
    entries = validation["taus"]
    return next(each for each in entries if (each["predictor"], each["outcome"]) == (predictor, outcome))


def show(validation: Mapping[str, Any]) -> None:
    """Print tau of every predictor and outcome, the score's difference from accuracy, and what bounds a predictor."""
    console = output_console()
    title = f"Kendall's tau with gold, mean over {len(validation['worlds'])} worlds, {validation['num_models']} models"
    table = new_table(title, "predictor", *JUDGED.values(), "regret at 6 nats")
    for name in dict.fromkeys(each["predictor"] for each in validation["taus"]):
        cells = [f"{tau_of(validation, name, outcome)['tau'].value:.2f}" for outcome in JUDGED]
        table.add_row(name, *cells, f"{tau_of(validation, name, 'rloo_kl_6')['regret']:.2f}")
    console.print(table)
    table = new_table("The score's tau less accuracy's", "outcome", "over", "models drawn anew", "over worlds")
    for each in validation["differences"]:
        intervals = (f"{each[name]:.3f}" for name in ("over_models", "over_worlds"))
        table.add_row(JUDGED[each["outcome"]], each["baseline"], *intervals)
    console.print(table)
    fallen, below = validation["over_optimized"]
    print(f"RLOO without a penalty: {fallen:.0%} of policies end more than 0.3 below their peak, {below:.0%} below 0")
    for name, found in validation["agreement"].items():
        print(f"tau between {name}: {found:.3f}")


def draw(validation: Mapping[str, Any], folder: Path) -> Path:
    """Write a picture with tau of the score and of accuracy for every outcome, and return its path."""
    caption = f"{validation['num_models']} reward models of {len(validation['worlds'])} worlds; bars: 95% over worlds"
    figure, (axes,) = new_figure("Rank correlation with gold rewards", caption)
    for shift, (name, color) in enumerate({SCORE: BLUE, MATCHED: VERMILION, EIGHTFOLD: GRAY}.items()):
        found = [tau_of(validation, name, outcome)["tau"] for outcome in JUDGED]
        bars = [[each.value - each.low for each in found], [each.high - each.value for each in found]]
        places = np.arange(len(found)) + 0.2 * (shift - 1)
        axes.errorbar([each.value for each in found], places, xerr=bars, fmt="o", color=color, label=name)
    axes.set_yticks(range(len(JUDGED)), [*JUDGED.values()])
    axes.invert_yaxis()
    axes.set(xlim=(-1.02, 1.02), xlabel="Kendall's tau")
    draw_legend(axes)
    return save_figure(figure, folder / "readiness.png")[0]


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of worlds, choice and result")
    parser.add_argument("--worlds", choices=("all", "development", "test"), default="all")
    parser.add_argument("--models", type=int, default=MODELS, help="reward models in each world, at least 6")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of each policy, at least 10")
    given = parser.parse_args()
    if given.models < 6 or given.steps < 10:
        parser.error("--models must be at least 6 and --steps at least 10")
    size = {"models": given.models, "steps": given.steps, "architectures": ARCHITECTURES}
    torch.set_num_threads(1)
    try:
        if given.worlds != "test":
            for algorithm, fit in develop(given.folder, size)["fits"].items():
                terms = " and ".join(term["measured"] for term in fit["terms"])
                print(f"frozen for {algorithm}: {terms}, ridge {fit['ridge']:g}, tau {max(fit['tau'].values()):.3f}")
        if given.worlds != "development":
            validation = judge_once(given.folder, size)
            show(validation)
            print(f"picture: {draw(validation, given.folder)}; all of this is {WORDING}")
    except RMOptimizerError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
