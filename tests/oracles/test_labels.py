"""Choice of pairs, order of pairs, wrong labels, votes and learning curves by brute force and planted truths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from scipy.special import comb, expit, log_expit, xlogy
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.data_efficiency import ActiveLearner, CurriculumSampler, Pool, acquisition_function
from rm_optimizer.data_efficiency.margin_analysis import held_out_chances, suspected_labels, text_differences
from rm_optimizer.data_efficiency.scaling import scaling_report
from rm_optimizer.data_efficiency.votes import Votes, noise_ceiling, vote_calibration
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from tests.builders import tiny_reward_model
from tests.oracles.formulas import ends, hidden, jackknifed, student

POOL = [
    PreferencePair(f"ask {i % 7}", f"yes {i} {'word ' * (i % 5)}", f"no {i * i} {'and ' * (i % 3)}", label=0.5)
    for i in range(30)
]


class Member(Scorer):
    """Rewards by the text, other ones for each seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def reward(self, text: str) -> float:
        return self.seed * math.sin(self.seed * sum(map(ord, text)))

    def score(self, prompts: Sequence[Any], responses: Sequence[str]) -> Tensor:
        return torch.tensor([self.reward(text) for text in responses], dtype=torch.float64)


def entropy(p: np.ndarray) -> np.ndarray:
    return np.asarray(-xlogy(p, p) - xlogy(1 - p, 1 - p))


def test_rules_over_members():
    members = [Member(seed) for seed in (1, 2, 3)]
    m = np.array([[each.reward(pair.chosen) - each.reward(pair.rejected) for pair in POOL] for each in members])
    p = expit(m)
    scores = {
        "margin": -abs(m.mean(axis=0)),
        "entropy": entropy(p.mean(axis=0)),
        "uncertainty": m.var(axis=0, ddof=1),
        "large_gap": abs(m.mean(axis=0)) + m.std(axis=0, ddof=1),
        "bald": entropy(p.mean(axis=0)) - entropy(p).mean(axis=0),
    }
    ensemble = RewardModelEnsemble(members)
    for name, expected in scores.items():
        best = [POOL[i] for i in np.argsort(-expected)]
        assert acquisition_function(name).score(POOL, ensemble) == pytest.approx(expected), name
        assert ActiveLearner(ensemble, name, seed=3).select(POOL, 9) == best[:9], name
    assert ActiveLearner(ensemble).select(POOL, 9) == [POOL[i] for i in np.argsort(-scores["uncertainty"])[:9]]


def test_rounds_of_a_loop_ask_the_best_pairs_left_and_end_with_the_budget():
    ensemble, asked = RewardModelEnsemble([Member(1), Member(2)]), []

    def answer(questions: Sequence[Any]) -> list[float]:
        asked.append([question.prompt + min(question.response_a, question.response_b) for question in questions])
        return [0.9 if question.response_a.startswith("yes") else 0.1 for question in questions]

    learner = ActiveLearner(ensemble, "large_gap", seed=5)
    rounds = learner.run_active_loop(POOL, answer, 9, k=4, budget=11)
    assert [each.num_labels for each in rounds] == [4, 8, 11]
    value = acquisition_function("large_gap").score(POOL, ensemble)
    best = [POOL[i].prompt + POOL[i].rejected for i in np.argsort(-value)]
    assert asked == [best[:4], best[4:8], best[8:11]]
    assert all(pair.chosen.startswith("yes") and pair.label == pytest.approx(0.9) for pair in learner.labeled_data)
    assert len(learner.labeled_data) == 11


def test_a_design_from_hidden_states_counts_the_pairs_that_were_asked_before():
    """The mean variance of margins by dense inverses, with features read from plain transformers."""
    model = tiny_reward_model("llama", max_length=64)
    z = np.array([np.subtract(*(hidden(model, p.prompt, text) for text in (p.chosen, p.rejected))) for p in POOL])
    p = expit(z @ model.reward_head.weight.detach().double().numpy()[0])
    moments = z.T @ z / len(z)
    prior = np.trace(moments) / z.shape[1] * np.eye(z.shape[1])
    chosen: list[int] = []
    for _ in range(6):
        spread = [
            np.trace(
                moments @ np.linalg.inv(prior + sum(p[j] * (1 - p[j]) * np.outer(z[j], z[j]) for j in [*chosen, i]))
            )
            if i not in chosen
            else math.inf
            for i in range(len(z))
        ]
        chosen.append(int(np.argmin(spread)))
    margin = z @ model.reward_head.weight.detach().double().numpy()[0]
    assert acquisition_function("large_gap").score(POOL, model) == pytest.approx(abs(margin), abs=1e-5)
    learner, found = ActiveLearner(model, "v_optimal", pool=POOL), []
    for _ in range(2):
        questions = learner.ask(3)
        found += [question.prompt + min(question.response_a, question.response_b) for question in questions]
        learner.tell({question.pair_id: "A" for question in questions})
    assert found == [POOL[i].prompt + POOL[i].rejected for i in chosen]


def test_gradients_are_drawn_by_their_squared_distances():
    """From the chosen ones and from zero, where answers that the model is sure of have their gradients."""
    rng = np.random.default_rng(2)
    z, m = rng.normal(size=(7, 3)), rng.normal(size=(2, 7))
    mean = m.mean(axis=0)
    gradient = -np.where(mean >= 0, expit(-mean), -expit(mean))[:, None] * z
    pool = Pool(m, np.zeros(7), np.arange(7) == 5, z)
    length = np.where(pool.is_labeled, 0, np.linalg.norm(gradient, axis=1))
    rule = acquisition_function("badge")
    assert rule.scores(pool) == pytest.approx(np.linalg.norm(gradient, axis=1))
    picks = np.array([rule.select(pool, 3, seed=seed) for seed in range(3000)])
    assert set(picks[:, 0]) == {int(length.argmax())}
    far = [((gradient - center) ** 2).sum(axis=1) * ~pool.is_labeled for center in (0, gradient[length.argmax()])]
    to_first = np.min(far, axis=0)
    shares = to_first / to_first.sum()
    seconds = np.bincount(picks[:, 1], minlength=7) / 3000
    assert (abs(seconds - shares) <= 4 * np.sqrt(shares * (1 - shares) / 3000)).all()
    second = int(np.bincount(picks[:, 1]).argmax())
    nearest = np.minimum(to_first, ((gradient - gradient[second]) ** 2).sum(axis=1)) * ~pool.is_labeled
    thirds = picks[picks[:, 1] == second, 2]
    shares, found = nearest / nearest.sum(), np.bincount(thirds, minlength=7) / len(thirds)
    assert (abs(found - shares) <= 4 * np.sqrt(shares * (1 - shares) / len(thirds))).all()


def rounded(shares: Sequence[float], num: int) -> list[int]:
    """Integers of the largest remainders; of equal ones the first."""
    counts = [math.floor(share * num + 1e-9) for share in shares]
    rest = sorted(range(len(shares)), key=lambda i: (-round(shares[i] * num - counts[i], 9), i))
    return [count + (i in rest[: num - sum(counts)]) for i, count in enumerate(counts)]


STAGES = ((0.3, (0.5, 0.4, 0.1)), (0.7, (0.2, 0.6, 0.2)), (math.inf, (0.1, 0.5, 0.4)))


def stage(progress: float) -> tuple[float, ...]:
    return next(shares for end, shares in STAGES if progress < end)


@pytest.mark.parametrize("by_share", [False, True])
def test_a_curriculum_in_every_count(by_share: bool):
    margins = np.random.default_rng(1).normal(size=97)
    ordered = np.sort(abs(margins))
    high, low = (ordered[int(0.75 * 96)], ordered[int(0.25 * 96)]) if by_share else (1.1, 0.4)
    given = {"easy_above": 0.75, "hard_below": 0.25} if by_share else {"easy_above": 1.1, "hard_below": 0.4}
    settings = {"quantiles": by_share, "num_epochs": 3.0, "segments": 4, "seed": 8, **given}
    sets = [
        [i for i, m in enumerate(margins) if abs(m) > high],
        [i for i, m in enumerate(margins) if low <= abs(m) <= high],
        [i for i, m in enumerate(margins) if abs(m) < low],
    ]
    sampler = CurriculumSampler(margins, covers=False, num_samples=50, **settings)
    assert [each.tolist() for each in (sampler.easy_idx, sampler.medium_idx, sampler.hard_idx)] == sets
    bin_of = {i: place for place, members in enumerate(sets) for i in members}
    ends_of = [0, 12, 25, 38, 50]  # 12.5 and 37.5 to even
    for epoch in range(4):
        sampler.set_epoch(epoch)
        positions = list(sampler)
        assert positions == sampler.order().positions(epoch).tolist()
        for segment in range(4):
            part = [bin_of[i] for i in positions[ends_of[segment] : ends_of[segment + 1]]]
            expected = rounded(stage((epoch + segment / 4) / 3), len(part))
            assert [part.count(place) for place in range(3)] == expected, (epoch, segment)
        times = Counter(positions)
        assert all(max(times[i] for i in each) - min(times[i] for i in each) <= 1 for each in sets)
    for epoch, whole, progress in ((None, None, 0.5), (1, None, 1 / 3), (9, 10.0, 0.9)):
        drawn = [bin_of[i] for i in sampler.sample(41, epoch, whole).tolist()]
        assert [drawn.count(place) for place in range(3)] == rounded(stage(progress), 41)
    assert sampler.sample(41, 1).tolist() != sampler.sample(41, 2).tolist()
    whole = CurriculumSampler(margins, **settings)
    for epoch in range(3):
        assert sorted(whole.positions(epoch)) == list(range(97))
    first = [bin_of[i] for i in whole.positions(0)[:24]]
    assert [first.count(place) for place in range(3)] == rounded(stage(0.0), 24)


def test_held_out_chances_with_each_conversation_left_out():
    """Folds of one conversation each depend on no seed; scikit-learn fits every penalty."""
    rng = np.random.default_rng(4)
    z, groups = rng.normal(size=(26, 3)) * [1, 20, 0.1], np.arange(26) // 2
    y = (expit(z @ [1.0, 0.05, 8.0]) > rng.random(26)).astype(float)
    y[[3, 8]] = 0.3, 0.8
    scaled = z / np.sqrt((z**2).mean(axis=0))
    best = (math.inf, np.zeros(26))
    for ridge in 10 ** np.arange(-2, 4.1, 0.5):
        margin = np.zeros(26)
        for held in range(13):
            kept = groups != held
            rows, sides = np.concatenate([scaled[kept]] * 2), np.repeat([1, 0], kept.sum())
            weight = np.concatenate([y[kept], 1 - y[kept]])  # a soft label is two weighted ones
            fit = LogisticRegression(C=1 / ridge, fit_intercept=False, tol=1e-12, max_iter=5000)
            fit.fit(rows, sides, sample_weight=weight)
            margin[~kept] = scaled[~kept] @ fit.coef_[0]
        nll = -(y * log_expit(margin) + (1 - y) * log_expit(-margin)).mean()
        best = min(best, (nll, margin), key=lambda pair: pair[0])
    expected = y * expit(best[1]) + (1 - y) * expit(-best[1])
    found = held_out_chances(z, y, groups, num_folds=13, num_repeats=2, seed=9)
    np.testing.assert_allclose(found.chances, [expected] * 2, atol=1e-4)
    assert found.confidence == pytest.approx(expected, abs=1e-4)
    assert held_out_chances(z, y, groups, num_folds=3, num_repeats=2, seed=9).variability.min() > 0  # of other folds


def test_suspected_labels_by_the_likelihood_of_flips():
    rng = np.random.default_rng(6)
    margin = abs(rng.normal(size=3000)) * 3
    is_wrong = rng.random(3000) < 0.22
    right = np.where(rng.random(3000) < expit(margin), margin, -margin)
    chances = expit(np.where(is_wrong, -right, right) / 2)
    z = np.log(chances / (1 - chances))

    def loss(x: np.ndarray) -> float:
        return float(-np.log((1 - 2 * x[0]) * expit(np.exp(x[1]) * z) + x[0]).mean())

    share, sharpness = optimize.minimize(loss, [0.1, 0.5], bounds=[(0, 0.45), (-0.5, 2.5)]).x
    q = expit(np.exp(sharpness) * z)
    flipped = share * (1 - q) / ((1 - 2 * share) * q + share)
    found = suspected_labels(chances, false_positive_rate=0.03)
    assert found.flipped_share == pytest.approx(share, abs=0.011)  # of a grid of hundredths
    order, num = np.argsort(chances, kind="stable"), len(found.positions)
    assert list(found.positions) == order[:num].tolist()
    assert found.threshold == chances[order[num]]
    assert found.num_wrong == pytest.approx(flipped[order[:num]].sum(), rel=0.05)
    lost = (1 - flipped[order]).cumsum() / (1 - flipped).sum()
    assert found.false_positive_rate == pytest.approx(lost[num - 1], rel=0.2)
    assert lost[num - 1] < 0.03 * 1.2
    assert lost[min(int(num * 1.2), 2999)] > 0.03


def majority(lead: np.ndarray) -> np.ndarray:
    return np.where(lead > 0, 1.0, np.where(lead < 0, 0.0, 0.5))


def test_agreement_of_annotators_vote_by_vote():
    rng = np.random.default_rng(3)
    total = np.repeat([1, 2, 3, 5], 12).astype(float)
    yes = rng.binomial(total.astype(int), rng.beta(0.7, 0.7, size=len(total))).astype(float)
    prompts = np.array([f"p{i % 11}" for i in range(len(total))])
    found = noise_ceiling(yes, total - yes, prompts.tolist(), num_bootstrap=9, seed=2)
    same, one, couples, agreed = [], [], 0, 0
    for n, k in zip(total[total > 1].astype(int), yes[total > 1].astype(int), strict=True):
        votes = [1] * k + [0] * (n - k)
        pairs = [votes[i] == votes[j] for i in range(n) for j in range(n) if i != j]
        same.append(np.mean(pairs))
        others = [sum(1 if v == votes[i] else -1 for j, v in enumerate(votes) if j != i) for i in range(n)]
        one.append(majority(np.array(others)).mean())
        couples, agreed = couples + len(pairs), agreed + sum(pairs)
    kept = prompts[total > 1]
    for estimate, each in ((found.agreement, np.array(same)), (found.one_by_others, np.array(one))):
        left = jackknifed(lambda rows, each=each: each[rows].mean(), kept)
        assert ends(estimate) == pytest.approx((each.mean(), *student(each.mean(), left)))
    assert found.num_pairs == 36
    a = optimize.brentq(lambda a: (a + 1) / (2 * a + 1) - agreed / couples, 1e-6, 1e6)  # of a Beta(a, a)

    def mean(function: Any) -> float:
        return float(integrate.quad(lambda p: function(p) * stats.beta.pdf(p, a, a), 0, 0.5, limit=400)[0] * 2)

    def chance(p: float, n: int, wins: Any) -> float:
        return float(sum(comb(n, k) * p**k * (1 - p) ** (n - k) * wins(k) for k in range(n + 1)))

    again, hits, split = [], 0.0, 0.0
    for n in (2, 3, 5):

        def alike(p: float, n: int = n) -> float:
            up_once, tie = chance(p, n, lambda k: 2 * k > n), chance(p, n, lambda k: 2 * k == n)
            down = 1 - up_once - tie
            return up_once**2 + down**2 + tie * (2 - tie) / 2

        again.append(mean(alike))
        hits += mean(lambda p, n=n: chance(p, n, lambda k: 2 * k < n))
        split += mean(lambda p, n=n: chance(p, n, lambda k: 2 * k == n))
    assert found.majority == pytest.approx(np.mean(again), abs=0.006)
    assert found.vote_ceiling == pytest.approx(mean(lambda p: max(p, 1 - p)), abs=0.004)
    assert found.majority_ceiling == pytest.approx(hits / (3 - split), abs=0.006)


def test_votes_beside_a_model():
    rng = np.random.default_rng(7)
    n, beta = 44, 1.7
    margin = np.round(rng.normal(size=n), 1)
    margin[5] = 0.0
    yes = rng.integers(0, 4, n).astype(float)
    no = rng.integers(0, 4, n) + 1.0 * (yes == 0)
    yes[3::13], no[3::13] = 2.0, 2.0  # a prompt without a majority
    total, prompts = yes + no, [f"p{i % 13}" for i in range(n)]
    found = vote_calibration(margin, Votes(np.arange(n), yes, no, tuple(prompts)), beta=beta, num_bootstrap=4, seed=1)
    p = expit(beta * margin)
    agree = np.where(margin > 0, yes, np.where(margin < 0, no, total / 2))
    nll = -(yes * np.log(p) + no * np.log(1 - p))
    right, decided = majority(margin * (yes - no)) * (yes != no), yes != no
    for estimate, top, under in (
        (found.vote_accuracy, agree, total),
        (found.vote_nll, nll, total),
        (found.majority_accuracy, right, decided),
    ):
        kept = np.flatnonzero(under)
        ratio = lambda rows, top=top[kept], under=under[kept]: top[rows].sum() / under[rows].sum()  # noqa: E731
        left = jackknifed(ratio, [prompts[i] for i in kept])
        value = top.sum() / under.sum()
        assert ends(estimate) == pytest.approx((value, *student(value, left)))
    assert (found.num_pairs, found.num_votes) == (n, total.sum())
    both = np.array([[p[i], v] for i in range(n) for v in [1.0] * int(yes[i]) + [0.0] * int(no[i])])
    shares = np.array([[p[i], yes[i] / total[i], total[i]] for i in range(n)])
    mirrored = np.concatenate([shares, shares * [-1, -1, 1] + [1, 1, 0]])
    weighted = np.cov(mirrored[:, 0], mirrored[:, 1], aweights=mirrored[:, 2])
    assert found.correlation == pytest.approx(weighted[0, 1] / math.sqrt(weighted[0, 0] * weighted[1, 1]))

    def loss(inverse: float) -> float:
        z = inverse * np.log(both[:, 0] / (1 - both[:, 0]))
        return float(-(both[:, 1] * log_expit(z) + (1 - both[:, 1]) * log_expit(-z)).mean())

    best = optimize.minimize_scalar(loss, bounds=(0, 50), method="bounded", options={"xatol": 1e-9}).x
    assert best < 1e-3 if found.temperature is None else found.temperature == pytest.approx(1 / best, rel=1e-4)
    assert sum(each.num_pairs for each in found.bins) == n


def test_a_learning_curve_and_the_pairs_that_a_gain_needs():
    sizes, rng = [50, 100, 200, 400, 800], np.random.default_rng(2)
    n = np.array(sizes, dtype=float)
    accuracy = 0.8 - 1.1 * n**-0.5 + 0.002 * rng.normal(size=(4, 5))
    nll = 0.45 + 2 * n**-0.6 + 0.004 * rng.normal(size=(4, 5))
    report = scaling_report(sizes, accuracy, nll, gain=0.015, num_draws=1500, seed=3)

    def fitted(values: np.ndarray) -> np.ndarray:
        """Least squares by scipy; the code's exponents are a grid of fiftieths."""
        start = [values[-1], (values[-1] - values[0]) * 8, 0.5]
        return optimize.curve_fit(lambda x, a, b, c: a - b * x**-c, n, values, p0=start, maxfev=9999)[0]

    for name, table, sign in (("accuracy", accuracy, 1), ("nll", -nll, -1)):
        law, means = fitted(table.mean(axis=0)), table.mean(axis=0)
        error = math.sqrt(((table - means) ** 2).sum() / 15 / 4)
        draws = [fitted(means + error * rng.standard_t(15, 5)) for _ in range(300)]
        for point, size, values in zip(report.measured, sizes, table.T, strict=True):
            half = stats.t.ppf(0.975, 3) * stats.sem(values)
            expected = np.array([values.mean() - half, values.mean() + half])[::sign] * sign
            estimate = getattr(point, name)
            assert (point.num_pairs, estimate.value) == (size, pytest.approx(sign * values.mean()))
            assert (estimate.low, estimate.high) == pytest.approx(tuple(expected))
        for point, size in zip(report.predicted, (1600, 3200), strict=True):
            estimate, ahead = getattr(point, name), np.array([a - b * size**-c for a, b, c in draws]) * sign
            assert (point.num_pairs, estimate.value) == (
                size,
                pytest.approx(sign * (law[0] - law[1] * size ** -law[2]), abs=6e-4),
            )
            assert estimate.standard_error == pytest.approx(ahead.std(), rel=0.25)
            assert (estimate.low, estimate.high) == pytest.approx(
                np.quantile(ahead, [0.025, 0.975]), abs=0.6 * ahead.std()
            )
    a, b, c = fitted(accuracy.mean(axis=0))
    target = a - b * 800**-c + 0.015
    assert (report.num_seeds, report.more.gain) == (4, 0.015)
    assert report.more.pairs == pytest.approx((b / (a - target)) ** (1 / c) - 800, rel=0.05)
    assert report.more.most is None or report.more.fewest < report.more.pairs < report.more.most


def test_features_of_texts_by_scikit_learn():
    rng = np.random.default_rng(0)
    words = ["red", "apple", "blue", "sky", "it's", "why", "Tree"]
    texts = [" ".join(rng.choice(words, size=rng.integers(2, 7))) + "?" * int(rng.integers(0, 3)) for _ in range(40)]
    pairs = [PreferencePair("q", texts[2 * i], texts[2 * i + 1]) for i in range(20)]
    counts = Counter(word for text in texts for word in set(text.lower().replace("?", "").split()))
    kept = [word for word, count in counts.items() if count >= 9]
    assert 3 < len(kept) <= len(words)
    tfidf = TfidfVectorizer(vocabulary=sorted(kept), smooth_idf=False, token_pattern=r"[a-z]+(?:'[a-z]+)?")
    _, _, directions = np.linalg.svd(tfidf.fit_transform(texts).toarray(), full_matrices=False)
    features = np.concatenate(
        [tfidf.transform(texts).toarray() @ directions[:3].T, [[math.log(len(t)), t.count("?")] for t in texts]], axis=1
    )
    expected = features[0::2] - features[1::2]
    found = text_differences(pairs, num_directions=3, fewest=9)
    np.testing.assert_allclose(abs(found), abs(expected / expected.std(axis=0)), atol=1e-6)
    np.testing.assert_allclose(found[:, 3:], (expected / expected.std(axis=0))[:, 3:], atol=1e-9)
    np.testing.assert_array_equal(text_differences(pairs, num_directions=3, fewest=9), found)
