"""Best-of-n, over-optimization, ensembles, outliers and the readiness score by brute force over small cases."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn.covariance import LedoitWolf
from torch import Tensor

from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.evaluation.list_rules import best_of_n
from rm_optimizer.rl_coupling.best_of_n_curve import BestOfNCurve
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from rm_optimizer.rl_coupling.out_of_distribution import MahalanobisDetector
from rm_optimizer.rl_coupling.overoptimization import OveroptimizationCurve
from rm_optimizer.rl_coupling.rl_readiness import RLReadinessScorer
from tests.oracles.formulas import student, wilson


def test_best_of_n_of_lists_whose_every_pair_is_known():
    rng, pairs, rewards, right = np.random.default_rng(0), [], [], []
    for number in range(9):
        prompt, size = f"prompt {number % 4}", int(rng.integers(2, 6))
        texts = [f"{number} {'word ' * int(rng.integers(1, 4))}{i}" for i in range(size)]
        quality, reward = rng.integers(0, 3, size), rng.integers(0, 4, size).astype(float)
        metadata = {"group": f"list {number}", "source": "s", "subset": "ab"[number % 2]}
        for i, j in itertools.combinations(range(size), 2):
            label = (quality[i] > quality[j]) * 0.9 + (quality[i] < quality[j]) * 0.2 + (quality[i] == quality[j]) * 0.5
            pairs.append(PreferencePair(prompt, texts[i], texts[j], label=float(label), metadata=metadata))
            rewards.append((reward[i], reward[j]))
        known = [i for i in range(size) if any(quality[i] != quality[j] for j in range(size))]
        if len(known) < 3:
            continue
        best = {i for i in known if quality[i] == max(quality[j] for j in known)}
        longest = max(len(texts[i]) for i in known)
        groups = [i for i in known if reward[i] == max(reward[j] for j in known)], known
        shares = [len(best & set(group)) / len(group) for group in groups]
        long = [i for i in known if len(texts[i]) == longest]
        decided = [(i, j) for i, j in itertools.permutations(known, 2) if quality[i] > quality[j]]
        signs = [np.sign(reward[i] - reward[j]) for i, j in decided]
        tau = sum(signs) / max(1, math.sqrt(np.count_nonzero(signs) * len(signs)))
        leads = all(reward[i] > reward[j] for i in best for j in set(known) - best)
        right.append((prompt, "ab"[number % 2], len(known), *shares, len(best & set(long)) / len(long), leads, tau))
    chosen, rejected = np.array(rewards).T
    found = best_of_n(pairs, chosen, rejected, num_bootstrap=10, seed=0)
    assert found is not None
    assert (found.num_lists, found.mean_responses) == (len(right), pytest.approx(np.mean([r[2] for r in right])))
    values = (found.accuracy.value, found.random, found.longest, found.every_best.value, found.tau.value)
    for column, value in enumerate(values, 3):
        assert value == pytest.approx(np.mean([r[column] for r in right]))
    prompts = sorted({r[0] for r in right})
    left = [np.mean([r[3] for r in right if r[0] != prompt]) for prompt in prompts]
    error, low, high = student(found.accuracy.value, left)
    assert found.accuracy.standard_error == pytest.approx(error)
    assert (found.accuracy.low, found.accuracy.high) == pytest.approx((max(low, 0), min(high, 1)))
    assert {name: part.accuracy.value for name, part in found.by_subset.items()} == {
        name: pytest.approx(np.mean([r[3] for r in right if r[1] == name])) for name in "ab"
    }


def test_lists_that_are_all_right_have_wilsons_interval_over_their_prompts():
    """Three prompts of one, one and four lists count as 36 / 18 (Kish, 1965)."""
    pairs = [
        PreferencePair(f"p{min(i, 2)}", "best", worse, metadata={"group": f"list {i}"})
        for i in range(6)
        for worse in ("bad", "worse")
    ]
    found = best_of_n(pairs, np.ones(12), np.zeros(12), num_bootstrap=10, seed=0)
    assert found is not None
    assert (found.accuracy.value, [found.accuracy.low, found.accuracy.high]) == (1.0, pytest.approx(wilson(1.0, 2)))


def selected(proxy: np.ndarray, value: np.ndarray, draws: list[tuple[int, ...]]) -> float:
    """Mean over draws of the value of the response with the highest proxy; ties are broken at random."""
    found = []
    for draw in draws:
        top = [i for i in draw if proxy[i] == max(proxy[j] for j in draw)]
        found.append(np.mean([value[i] for i in top]))
    return float(np.mean(found))


def test_the_curve_of_best_of_n_is_the_mean_over_all_subsets():
    rng = np.random.default_rng(1)
    proxy, gold = rng.integers(0, 5, (6, 7)).astype(float), rng.normal(size=(6, 7))
    sizes = [1, 2, 3, 5, 7]
    curve = BestOfNCurve.measure(proxy, gold, sizes=sizes, num_bootstrap=10)
    for point, n in zip(curve.points, sizes, strict=True):
        subsets = list(itertools.combinations(range(7), n))
        for kind, estimate in ((proxy, point.proxy), (gold, point.gold)):
            each = [selected(p, v, subsets) for p, v in zip(proxy, kind, strict=True)]
            assert estimate is not None
            assert estimate.value == pytest.approx(np.mean(each))
            error, low, high = student(np.mean(each), [np.mean(np.delete(each, i)) for i in range(6)])
            assert (estimate.standard_error, estimate.low, estimate.high) == pytest.approx((error, low, high))
        assert point.kl_bound == pytest.approx(math.log(n) - 1 + 1 / n)
    point, divergences = curve.points[2], []
    for row in proxy:  # selection among all draws of three with replacement against a random response
        share = Counter(max(row[list(draw)]) for draw in itertools.product(range(7), repeat=3))
        policy = Counter(row)
        divergences.append(sum(c / 343 * math.log(c / 343 / (policy[v] / 7)) for v, c in share.items()))
    assert point.kl_pool == pytest.approx(np.mean(divergences))


def half_of(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    first = np.sort(np.random.default_rng([seed, count]).permutation(count)[: count // 2])
    return first, np.setdiff1d(np.arange(count), first)


@pytest.mark.parametrize("is_rl", [False, True])
def test_an_overoptimization_curve_in_every_number(is_rl: bool):
    rng, prompts = np.random.default_rng(3), 14
    if is_rl:
        nats = [0.0, 0.3, 1.1, 0.9, 2.5, 4.0, 6.0]  # the fourth comes back and counts for the fall alone
        d = np.sqrt(nats[1:])
        shape = d * (1.0 - 0.9 * np.log(d)) + 0.05 * rng.normal(size=6)
        proxy, gold = (3 + np.pad(f * shape + 0.1 * rng.normal(size=(prompts, 6)), ((0, 0), (1, 0))) for f in (2, 1))
        curve = OveroptimizationCurve.of_checkpoints(nats, proxy, gold, scales=(0.5, 2.0), num_bootstrap=9, seed=4)
        gains = [(proxy[:, 1:] - proxy[:, :1]) / 0.5, (gold[:, 1:] - gold[:, :1]) / 2.0]
        kept = [0, 1, 3, 4, 5]
    else:
        proxy = rng.normal(size=(prompts, 16))
        gold = 0.7 * proxy - 0.3 * np.maximum(proxy - 0.8, 0) * 4 + 0.5 * rng.normal(size=(prompts, 16))
        curve = OveroptimizationCurve.of_best_of_n(proxy, gold, num_bootstrap=9, seed=4)
        order = np.argsort(proxy, axis=1)
        gains = []
        for kind in (proxy, gold):
            ranked, means = np.take_along_axis(kind, order, axis=1), []
            for n in (1, 2, 4, 8, 16):
                share = np.array([math.comb(i, n - 1) for i in range(16)]) / math.comb(16, n)
                means.append(ranked @ share)
            table = np.stack(means, axis=1)
            gains.append((table[:, 1:] - table[:, :1]) / math.sqrt(kind.var(axis=1, ddof=1).mean()))
        d, kept = np.sqrt([math.log(n) - 1 + 1 / n for n in (2, 4, 8, 16)]), [0, 1, 2, 3]

    def gain(x: np.ndarray, fit: np.ndarray) -> np.ndarray:
        return x * (fit[0] - fit[1] * (np.log(np.maximum(x, 1e-300)) if is_rl else x))

    points, fits = d[kept], []
    loss = points * np.log(points) if is_rl else points**2
    for kind, names in ((gains[0], ("proxy_alpha", "proxy_beta")), (gains[1], ("alpha", "beta"))):
        fit = np.linalg.lstsq(np.stack([points, -loss], axis=1), kind[:, kept].mean(axis=0))[0]
        fits.append(fit)
        assert [getattr(curve.fit, name).value for name in names] == pytest.approx(fit)
    residual = gains[1][:, kept].mean(axis=0) - gain(points, fits[1])
    assert curve.fit.residual == pytest.approx(math.sqrt((residual**2).mean()))
    assert [point.distance for point in curve.points] == pytest.approx([0, *points])
    for name, kind in (("proxy", gains[0]), ("gold", gains[1])):
        for i, place in enumerate(kept):
            estimate, column = getattr(curve.points[i + 1], name), kind[:, place]
            assert estimate.value == pytest.approx(column.mean())
            assert estimate.standard_error == pytest.approx(stats.sem(column))
            half = stats.t.ppf(0.975, prompts - 1) * stats.sem(column)
            assert (estimate.low, estimate.high) == pytest.approx((column.mean() - half, column.mean() + half))
    grid = np.linspace(0, points[-1], 200001)
    heights = gain(grid, fits[1])
    assert curve.peak_gain.value == pytest.approx(heights.max(), abs=1e-6)
    assert curve.peak_distance.value == pytest.approx(grid[heights.argmax()], abs=2e-3)
    apart = integrate.quad(lambda x: abs(gain(x, fits[1]) - gain(x, fits[0])), 0, points[-1], limit=200)[0]
    assert curve.gamma.value == pytest.approx(apart / integrate.quad(gain, 0, points[-1], fits[1])[0], rel=2e-3)
    choosing, measuring = half_of(prompts, 4)
    table = np.pad(gains[1], ((0, 0), (1, 0)))
    highest = int(table[choosing].mean(axis=0).argmax())
    fall = table[measuring, highest] - table[measuring, -1]
    assert curve.fall.value == pytest.approx(fall.mean())
    if highest < table.shape[1] - 1:
        half = stats.t.ppf(0.975, len(fall) - 1) * stats.sem(fall)
        assert (curve.fall.low, curve.fall.high) == pytest.approx((fall.mean() - half, fall.mean() + half))
        has_fallen = fall.mean() - half > 0
        assert curve.turning_point == (pytest.approx([0, *d][highest]) if has_fallen else None)


class Table:
    """Scorer whose reward of a response is the number that it names, on a scale of its own."""

    def __init__(self, seed: int, scale: float, shift: float) -> None:
        own = scale * np.random.default_rng(seed).normal(size=200)
        self.rewards = scale * np.sin(np.arange(200)) + 0.4 * own + shift

    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Tensor:
        return torch.tensor([self.rewards[int(response)] for response in responses], dtype=torch.float64)


def test_an_ensemble_in_every_number():
    members = [Table(0, 1.0, 0.0), Table(1, 5.0, -3.0), Table(2, 0.2, 10.0)]
    ensemble = RewardModelEnsemble(members, aggregation="uwo", penalty=0.7)
    known = [str(i) for i in range(90)]
    ensemble.fit_reference([f"prompt {i}" for i in known], known, false_positive_rate=0.1, seed=6)
    raw = np.array([member.rewards for member in members])
    scaling, held = half_of(90, 6)
    means, stds = raw[:, scaling].mean(axis=1), raw[:, scaling].std(axis=1, ddof=1)
    z = (raw - means[:, None]) / stds[:, None]
    threshold = sorted(z[:, held].std(axis=0, ddof=1))[math.ceil(46 * 0.9) - 1]
    assert ensemble.reference is not None
    assert (*ensemble.reference.means, *ensemble.reference.stds) == pytest.approx((*means, *stds))
    assert ensemble.threshold == pytest.approx(threshold)
    new = [str(i) for i in range(90, 200)]
    prompts, own = ["prompt"] * len(new), z[:, 90:]
    spread = own.std(axis=0, ddof=1)
    for kind, expected in (
        ("uwo", own.mean(axis=0) - 0.7 * spread),
        ("min", own.min(axis=0)),
        ("mean", own.mean(axis=0)),
    ):
        other = RewardModelEnsemble(members, aggregation=kind, penalty=0.7, reference=ensemble.reference)
        np.testing.assert_allclose(other.score(prompts, new), expected, rtol=1e-5)
    for each, i in zip(ensemble.predict_batch(prompts, new), range(len(new)), strict=True):
        assert (each.mean_reward, each.std_reward) == pytest.approx((own[:, i].mean(), spread[i]))
        assert (each.individual_rewards, each.is_high_uncertainty) == (pytest.approx(own[:, i]), spread[i] > threshold)
    assert ensemble.detect_ood(prompts, new).is_ood == tuple(spread > threshold)
    margins = (raw[:, 90:95] - raw[:, 95:100]) / stds[:, None]
    for each, column in zip(ensemble.predict_margins(prompts[:5], new[:5], new[5:10]), margins.T, strict=True):
        assert (each.mean_margin, each.std_margin) == pytest.approx((column.mean(), column.std(ddof=1)))
        assert each.individual_margins == pytest.approx(column)


def test_distances_of_features_by_ledoit_and_wolf():
    rng = np.random.default_rng(2)
    reference, new = rng.normal(size=(80, 4)) * [1, 3, 0.1, 2] + 1, rng.normal(size=(9, 4)) * 3
    detector = MahalanobisDetector(reference, false_positive_rate=0.2, seed=5)
    fitted, held = half_of(80, 5)
    mean, scale = reference[fitted].mean(axis=0), reference[fitted].std(axis=0)
    inverse = np.linalg.inv(LedoitWolf().fit((reference[fitted] - mean) / scale).covariance_)

    def distances(rows: np.ndarray) -> list[float]:
        return [math.sqrt(row @ inverse @ row / 4) for row in (rows - mean) / scale]

    threshold = sorted(distances(reference[held]))[math.ceil(41 * 0.8) - 1]
    assert detector.distances(new) == pytest.approx(distances(new))
    assert detector.threshold == pytest.approx(threshold)
    assert detector.detect(new).is_ood == tuple(each > threshold for each in distances(new))


@pytest.mark.parametrize("given", [(0.87, 0.05, 1.2, 150.0), (1.4, 0.0, 0.1, -5.0), (0.6, 0.3, 9.0, 900.0)])
def test_the_readiness_score(given: tuple[float, float, float, float]):
    accuracy, ece, variance, top = given
    parts = [min(accuracy, 1), *(min(max(x, 0), 1) for x in (1 - 5 * ece, (3 - variance) / 2.5, (500 - top) / 450))]
    found = RLReadinessScorer().compute_score(*given)
    assert list(found.parts.values()) == pytest.approx(parts)
    score = 0.35 * parts[0] + 0.25 * parts[1] + 0.25 * parts[2] + 0.15 * parts[3]
    assert found.overall_score == pytest.approx(score)
    words = "ready" if score > 0.8 else "acceptable with monitoring" if score >= 0.6 else "not recommended"
    assert found.verdict.value == words
