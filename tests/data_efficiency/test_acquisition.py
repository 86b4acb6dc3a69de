"""Choice of pairs to label: invariances, closed forms, and greedy designs against brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from rm_optimizer import PreferencePair, RewardModelEnsemble
from rm_optimizer.core.base import Scorer
from rm_optimizer.data_efficiency import Pool, acquisition_function, pool, read_pool
from rm_optimizer.data_efficiency.acquisition import BALD, LengthStratified, StochasticBALD
from rm_optimizer.data_efficiency.feature_rules import (
    RULES,
    BoundaryOptimal,
    DOptimal,
    LastLayerInformation,
    VOptimal,
    density_at_zero,
)
from rm_optimizer.errors import ConfigError, DataError
from tests.builders import tiny_reward_model

PAIRS = [PreferencePair(f"question {n % 5}", f"answer {n}", f"reply {n * n} at length") for n in range(14)]


def random_pool(num: int = 60, hidden: int = 5, members: int = 4, seed: int = 0) -> Pool:
    generator = np.random.default_rng(seed)
    differences = generator.normal(size=(num, hidden)) * generator.exponential(size=hidden)
    margins = differences @ generator.normal(size=(hidden, members)) + generator.normal(size=(num, members))
    return Pool(margins.T, generator.normal(size=num), generator.random(num) < 0.2, differences)


def exchanged(pool: Pool, signs: np.ndarray) -> Pool:
    assert pool.differences is not None
    return Pool(pool.margins * signs, pool.lengths * signs, pool.is_labeled, pool.differences * signs[:, None])


@pytest.mark.parametrize("name", RULES)
def test_the_order_of_a_pairs_responses_changes_no_choice(name):
    rule, found = acquisition_function(name), random_pool()
    signs = np.random.default_rng(1).choice([-1.0, 1.0], size=len(found))
    chosen = rule.select(found, 12, seed=3)
    assert chosen.tolist() == rule.select(exchanged(found, signs), 12, seed=3).tolist()
    assert rule.scores(found) == pytest.approx(rule.scores(exchanged(found, signs)))
    assert len(set(chosen.tolist())) == 12
    assert not found.is_labeled[chosen].any()


@pytest.mark.parametrize("name", RULES)
def test_a_choice_of_all_is_all_and_more_is_refused(name):
    rule, found = acquisition_function(name), random_pool(num=9)
    left = len(found.unlabeled)
    assert sorted(rule.select(found, left)) == found.unlabeled.tolist()
    with pytest.raises(ConfigError, match=rf"k must lie in \[1, {left}\]"):
        rule.select(found, left + 1)


@pytest.mark.parametrize("name", RULES)
def test_the_seed_alone_decides_what_is_random(name):
    found = random_pool()
    first = acquisition_function(name).select(found, 8, seed=5)
    assert first.tolist() == acquisition_function(name).select(found, 8, seed=5).tolist()


@pytest.mark.parametrize(
    ("rule", "criterion"), [(DOptimal(0.3), "logdet"), (VOptimal(0.3), "trace"), (BoundaryOptimal(0.3), "boundary")]
)
def test_a_greedy_design_is_that_of_brute_force(rule, criterion):
    found = random_pool(num=40)
    z = found.differences
    chance = 1 / (1 + np.exp(-found.margins.mean(axis=0)))
    weight = chance * (1 - chance)
    moments = z.T @ z / len(z)
    prior = 0.3 * np.trace(moments) / z.shape[1] * np.eye(z.shape[1])
    known = prior + (z * (weight * found.is_labeled)[:, None]).T @ z
    if criterion == "boundary":
        beliefs = norm(found.margins.mean(axis=0), np.sqrt(np.einsum("nd,nd->n", z @ np.linalg.inv(known), z)))
        moments = (z * beliefs.pdf(0)[:, None]).T @ z

    def value(members: list[int]) -> float:
        information = prior + (z[members] * weight[members, None]).T @ z[members]
        if criterion == "logdet":
            return float(np.linalg.slogdet(information)[1])
        return -float(np.trace(moments @ np.linalg.inv(information)))

    members, expected = np.flatnonzero(found.is_labeled).tolist(), []
    for _ in range(10):
        gains = [value([*members, j]) if j not in members else -np.inf for j in range(len(z))]
        members.append(int(np.argmax(gains)))
        expected.append(members[-1])
    assert rule.select(found, 10).tolist() == expected


def test_the_weight_of_a_margin_is_the_slope_of_its_expected_loss():
    def loss(mean: float, variance: float) -> float:
        """``E[|t| / 2; t and its mean on different sides]`` by quadrature."""
        belief, side = norm(mean, variance**0.5), np.sign(mean)
        return quad(lambda t: abs(t) / 2 * belief.pdf(-side * t), 0, 40)[0]

    means, variances = np.array([0.3, -1.0, 2.0, -0.1]), np.array([1.0, 0.5, 3.0, 0.2])
    step = 1e-3
    slopes = [(loss(m, v + step) - loss(m, v - step)) / (2 * step) for m, v in zip(means, variances, strict=True)]
    weights = density_at_zero(means, variances)
    assert weights == pytest.approx(np.array(slopes) / max(slopes), rel=1e-4)
    assert slopes == pytest.approx(norm(means, np.sqrt(variances)).pdf(0) / 4, rel=1e-4)


def test_margins_without_a_variance_weigh_nothing_and_far_ones_do_not_underflow():
    assert density_at_zero(np.array([0.0, 500.0, 501.0]), np.array([0.0, 1.0, 1.0])).tolist() == [
        0.0,
        1.0,
        np.exp(-500.5),
    ]
    assert density_at_zero(np.zeros(3), np.zeros(3)).tolist() == [1.0, 1.0, 1.0]


def test_the_boundary_counts_for_nothing_while_all_margins_are_uncertain_alike():
    found = random_pool()
    z = found.differences / np.linalg.norm(found.differences, axis=1, keepdims=True)
    alike = Pool(np.zeros((1, len(z))), found.lengths, np.zeros(len(z), dtype=bool), z)
    assert BoundaryOptimal().select(alike, 12).tolist() == VOptimal().select(alike, 12).tolist()
    assert BoundaryOptimal().select(found, 12).tolist() != VOptimal().select(found, 12).tolist()


def test_rank_one_updates_are_those_of_a_new_inverse():
    found = random_pool(num=30)
    information = LastLayerInformation(found, found.differences)
    added = found.unlabeled[:6]
    for position in added:
        information.add(int(position))
    known = found.is_labeled.copy()
    known[added] = True
    anew = LastLayerInformation(replace(found, is_labeled=known), found.differences)
    np.testing.assert_allclose(information.variances, anew.variances, rtol=1e-10)
    np.testing.assert_allclose(information.reductions, anew.reductions, rtol=1e-9)


def test_a_coreset_is_that_of_brute_force_up_to_sign():
    found = random_pool(num=40)
    z, centers, expected = found.differences, np.flatnonzero(found.is_labeled).tolist(), []
    for _ in range(8):
        far = [
            -1 if j in centers else min(np.linalg.norm(row - sign * z[c]) for c in centers for sign in (1, -1))
            for j, row in enumerate(z)
        ]
        centers.append(int(np.argmax(far)))
        expected.append(centers[-1])
    assert acquisition_function("coreset").select(found, 8).tolist() == expected


def test_powered_bald_draws_in_proportion_to_its_scores():
    margins = np.array([[3.0, 1.0, 0.5], [-3.0, -1.0, -0.5]])
    found = Pool(margins, np.zeros(3), np.zeros(3, dtype=bool))
    scores = BALD().scores(found)
    firsts = np.bincount([StochasticBALD().select(found, 1, seed=seed)[0] for seed in range(4000)], minlength=3) / 4000
    assert firsts == pytest.approx(scores / scores.sum(), abs=4 * 0.5 / 4000**0.5)


def test_length_strata_give_the_same_number_each():
    found = Pool(np.zeros((1, 100)), np.arange(100.0), np.zeros(100, dtype=bool))
    chosen = LengthStratified().select(found, 20)
    assert np.bincount(chosen // 10).tolist() == [2] * 10


@pytest.mark.parametrize("scale", [0.0, 0.3])
@pytest.mark.parametrize("name", sorted(set(RULES) - {"random", "length_stratified"}))
def test_equal_scores_are_drawn_and_said(name, scale, caplog):
    alike = np.full((50, 7), scale)
    found = Pool(np.full((2, 50), scale), np.zeros(50), np.zeros(50, dtype=bool), alike)
    chosen = acquisition_function(name).select(found, 5)
    assert caplog.text.count("every pair the same score, so these pairs are a random draw") == 1
    assert chosen.tolist() != acquisition_function(name).select(found, 5, seed=1).tolist()


@pytest.mark.parametrize("name", ["v_optimal", "boundary_optimal", "d_optimal", "coreset", "badge"])
def test_batches_that_differ_are_no_random_draw_though_each_pair_alone_is_worth_the_same(name, caplog):
    z = np.repeat(np.eye(3), 5, axis=0)
    chosen = acquisition_function(name).select(Pool(np.zeros((1, 15)), np.zeros(15), np.zeros(15, dtype=bool), z), 3)
    assert sorted(chosen // 5) == [0, 1, 2]
    assert not caplog.text


@pytest.mark.parametrize("name", ["uncertainty", "bald", "stochastic_bald"])
def test_rules_over_members_refuse_one(name):
    found = random_pool(members=1)
    with pytest.raises(ConfigError, match="needs an ensemble"):
        acquisition_function(name).select(found, 2)


@pytest.mark.parametrize("name", ["d_optimal", "v_optimal", "coreset", "badge"])
def test_rules_over_features_refuse_a_pool_without(name):
    with pytest.raises(ConfigError, match="name one saved model"):
        acquisition_function(name).select(replace(random_pool(), differences=None), 2)


def test_what_is_not_finite_is_refused_by_the_pairs_number():
    found = random_pool()
    found.margins[1, 7] = np.nan
    with pytest.raises(DataError, match="pair 8 of the pool has a margin that is not finite"):
        replace(found, lengths=found.lengths)
    clean = random_pool()
    clean.differences[3, 0] = np.inf
    with pytest.raises(DataError, match="pair 4 of the pool has a feature"):
        replace(clean, lengths=clean.lengths)


def test_an_unknown_rule_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'v_optimal'"):
        acquisition_function("v_optimum")


class Lengths(Scorer):
    """Reward by the length of the response, on a scale and from a zero of its own."""

    def __init__(self, scale: float, shift: float) -> None:
        self.scale, self.shift = scale, shift

    def score(self, prompts, responses):
        return torch.tensor([self.scale * len(text) + self.shift for text in responses])


def test_uncertainty_is_of_margins_and_a_members_constant_changes_nothing():
    plain = RewardModelEnsemble([Lengths(1.0, 0.0), Lengths(2.0, 0.0)])
    shifted = RewardModelEnsemble([Lengths(1.0, 0.0), Lengths(2.0, 64.0)])
    rule = acquisition_function("uncertainty")
    gaps = np.array([len(pair.chosen) - len(pair.rejected) for pair in PAIRS])
    assert rule.score(PAIRS, plain) == pytest.approx(gaps**2 / 2)
    assert rule.score(PAIRS, plain).tolist() == rule.score(PAIRS, shifted).tolist()


def test_margins_of_a_pool_are_the_heads_of_its_differences(tmp_path):
    model = tiny_reward_model("llama")
    found = read_pool(PAIRS, model, folder=tmp_path / "pool")
    scores = model.score([p.prompt for p in PAIRS], [p.chosen for p in PAIRS])
    others = model.score([p.prompt for p in PAIRS], [p.rejected for p in PAIRS])
    assert found.margins[0] == pytest.approx((scores - others).numpy(), abs=1e-5)
    weight = model.reward_head.weight.detach().numpy()[0]
    assert found.differences @ weight == pytest.approx(found.margins[0], abs=1e-5)


def test_a_pool_goes_on_after_a_kill_and_computes_nothing_again(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "BLOCK_PAIRS", 5)
    model, done = tiny_reward_model("llama"), []

    def stop(pairs: int) -> None:
        done.append(pairs)
        if pairs == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_pool(PAIRS, model, folder=tmp_path / "pool", on_progress=stop)
    with pytest.raises(DataError, match="holds features of other pairs or another model"):
        read_pool(PAIRS[1:], model, folder=tmp_path / "pool")
    found = read_pool(PAIRS, model, folder=tmp_path / "pool", on_progress=done.append)
    whole = read_pool(PAIRS, model)
    assert done == [0, 5, 10, 10, 14]
    np.testing.assert_array_equal(found.margins, whole.margins)
    np.testing.assert_array_equal(found.differences, whole.differences)
    assert isinstance(found.differences, np.memmap)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # options that Ray Data itself sets
def test_features_of_ray_workers_are_those_of_this_process(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(pool, "BLOCK_PAIRS", 3)
    model = tiny_reward_model("llama", max_length=64)
    try:
        here, there = read_pool(PAIRS, model), read_pool(PAIRS, model, folder=tmp_path, ray_workers=2)
    finally:
        ray.shutdown()
    np.testing.assert_allclose(there.margins, here.margins, atol=1e-6)
    np.testing.assert_allclose(there.differences, here.differences, atol=1e-6)
