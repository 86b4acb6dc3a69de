"""Coverage of the 95 % intervals that are printed, at few prompts and at few seeds.

Rewards are drawn with an effect of each prompt beside that of each pair, so that pairs of a prompt are alike. A line
`accuracy_8` is the share of data sets of eight prompts whose interval of the accuracy holds the true accuracy; a line
`seeds_2_of_1.0` is that of the mean of two seeds whose effects vary by 1.0. `false_verdicts_2` is the share of families
of four equal arms, with two seeds each, in which Holm's rule calls any arm different. Nominal are 0.95 and 0.05.
"""

from __future__ import annotations

import argparse
from functools import cache

import numpy as np
from scipy.special import expit, ndtr

from rm_optimizer.core.metrics.effects import PairedScores, holm_adjusted
from rm_optimizer.core.metrics.pairwise import evaluate_pairs
from rm_optimizer.rl_coupling.best_of_n_curve import BestOfNCurve

PROMPTS = (2, 3, 5, 8, 30, 40)
SEEDS = (2, 3, 5)
PAIRS = 12
"""Pairs of a prompt."""
CENTER = 0.5
"""Mean margin."""
OF_PROMPTS = 0.7
"""Deviation of the prompts' margins beside 1 of the pairs'."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=400)
    args = parser.parse_args()
    print(f"{args.repetitions} repetitions; a share of 0.95 has a standard error of {0.22 / args.repetitions**0.5:.3f}")
    lines = {}
    for prompts in PROMPTS:
        lines |= {f"{name}_{prompts}": value for name, value in of_prompts(prompts, args.repetitions).items()}
        lines[f"best_of_8_{prompts}"] = of_best_of_n(prompts, args.repetitions)
    for seeds in SEEDS:
        for spread in (0.0, 0.1, 1.0):
            lines[f"seeds_{seeds}_of_{spread}"] = of_seeds(seeds, spread, args.repetitions)
        lines[f"false_verdicts_{seeds}"] = false_verdicts(seeds, args.repetitions)
    for name, value in lines.items():
        print(f"{name}: {value:.3f}")


@cache
def _truth() -> dict[str, float]:
    """Values of the population."""
    many = CENTER + np.random.default_rng(1).normal(0, np.hypot(1, OF_PROMPTS), 500_000)
    names = list(map(str, range(len(many))))
    found = evaluate_pairs(many, np.zeros_like(many), beta=1.0, prompt_ids=names, num_bootstrap=0, seed=0)
    return {
        "accuracy": float(ndtr(CENTER / np.hypot(1, OF_PROMPTS))),
        "mean_margin": CENTER,
        "nll": float(np.logaddexp(0, -many).mean()),
        "brier": float(((1 - expit(many)) ** 2).mean()),
        "ece": found.ece.value,
    }


def of_prompts(num_prompts: int, repetitions: int) -> dict[str, float]:
    """Coverage of the intervals of accuracy, mean margin, NLL, Brier score and calibration error."""
    truth = _truth()
    held = dict.fromkeys(truth, 0)
    prompts = np.repeat(np.arange(num_prompts), PAIRS).astype(str)
    for seed in range(repetitions):
        rng = np.random.default_rng([2, num_prompts, seed])
        margin = CENTER + np.repeat(rng.normal(0, OF_PROMPTS, num_prompts), PAIRS) + rng.normal(0, 1, len(prompts))
        zeros = np.zeros_like(margin)
        metrics = evaluate_pairs(margin, zeros, beta=1.0, prompt_ids=prompts.tolist(), num_bootstrap=500, seed=seed)
        for name, value in truth.items():
            estimate = getattr(metrics, name)
            held[name] += estimate.low <= value <= estimate.high
    return {name: count / repetitions for name, count in held.items()}


def of_best_of_n(num_prompts: int, repetitions: int) -> float:
    """Coverage of the expected gold reward of the best of eight, with skewed effects of prompts."""
    draws = 16
    best = float(np.random.default_rng(5).normal(0, 1, (400_000, 8)).max(axis=1).mean()) / 2
    held = 0
    for seed in range(repetitions):
        rng = np.random.default_rng([6, num_prompts, seed])
        proxy = rng.normal(0, 1, (num_prompts, draws))
        gold = proxy / 2 + rng.normal(0, 1, (num_prompts, draws)) + rng.exponential(1, (num_prompts, 1)) - 1
        point = BestOfNCurve.measure(proxy, gold, sizes=[8], num_bootstrap=500, seed=seed).points[0].gold
        held += point.low <= best <= point.high
    return held / repetitions


def _arms(rng: np.random.Generator, seeds: int, spread: float, arms: int) -> tuple[np.ndarray, list[str]]:
    """Margins of arms that are equal but for effects of seed, prompt and both."""
    prompts, pairs = 60, 3
    shape = (arms, seeds, prompts, pairs)
    margin = rng.normal(0, 1, shape) + rng.normal(0, 1, (1, 1, prompts, 1)) + rng.normal(0, 0.5, (*shape[:3], 1))
    margin += rng.normal(0, spread, (arms, seeds, 1, 1))
    return margin.reshape(arms, seeds, -1), np.repeat(np.arange(prompts), pairs).astype(str).tolist()


def of_seeds(seeds: int, spread: float, repetitions: int) -> float:
    """Coverage of the difference of two equal arms in the NLL, which is 0."""
    held = 0
    for seed in range(repetitions):
        (better, worse), prompts = _arms(np.random.default_rng([3, seeds, seed]), seeds, spread, 2)
        estimate = PairedScores(better, worse, prompts).effect("nll")
        held += estimate.low <= 0 <= estimate.high
    return held / repetitions


def false_verdicts(seeds: int, repetitions: int) -> float:
    """Share of families of four challengers, equal to their reference, with any difference by Holm's rule."""
    found = 0
    for seed in range(repetitions):
        (reference, *others), prompts = _arms(np.random.default_rng([4, seeds, seed]), seeds, 0.3, 5)
        p_values = [PairedScores(arm, reference, prompts).crossed("nll").p_different for arm in others]
        found += holm_adjusted(np.array(p_values)).min() < 0.05
    return found / repetitions


if __name__ == "__main__":
    main()
