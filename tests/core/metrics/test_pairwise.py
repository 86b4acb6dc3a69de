"""Metrics equal a brute-force count, whatever the order, the batches, the weights' form or the side called chosen."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import brier_score_loss, log_loss

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.pairwise import PairwiseMetrics, evaluate_pairs
from rm_optimizer.core.metrics.separation import detect_collapse


def world(num_pairs: int = 200, seed: int = 0, num_prompts: int = 60) -> dict[str, Any]:
    """Rewards in eighths, so that sums are exact, with ties, labels of every kind, weights, and shared prompts."""
    rng = np.random.default_rng(seed)
    chosen, rejected = np.round(8 * rng.normal(size=(2, num_pairs)) + np.array([[3], [0]])) / 8
    rejected[:9] = chosen[:9]
    label = rng.choice([0.0, 0.2, 0.5, 0.9, 1.0], size=num_pairs)
    return {
        "chosen": chosen,
        "rejected": rejected,
        "label": label,
        "weight": rng.integers(1, 4, size=num_pairs).astype(np.float64),
        "prompt_ids": [f"prompt-{k}" for k in rng.integers(num_prompts, size=num_pairs)],
        "groups": {"source": [("hh", "ukp", "toolrm")[k % 3] for k in range(num_pairs)]},
    }


def taken(columns: dict[str, Any], index: np.ndarray) -> dict[str, Any]:
    result = {
        name: value[index] if isinstance(value, np.ndarray) else [value[i] for i in index]
        for name, value in columns.items()
        if name != "groups"
    }
    return result | {"groups": {"source": [columns["groups"]["source"][i] for i in index]}}


def evaluated(
    columns: dict[str, Any], *, beta: float = 1.3, num_bootstrap: int = 100, seed: int = 0
) -> PairwiseMetrics:
    return evaluate_pairs(**columns, beta=beta, num_bootstrap=num_bootstrap, seed=seed)


def plain(chosen: list[float], rejected: list[float], **options: Any) -> PairwiseMetrics:
    prompts = [str(k) for k in range(len(chosen))]
    columns = {"chosen": np.array(chosen), "rejected": np.array(rejected), "prompt_ids": prompts}
    return evaluate_pairs(**{"beta": 1.0, "num_bootstrap": 0, "seed": 0, **columns, **options})


def test_every_number_equals_a_count_pair_by_pair():
    columns = world()
    metrics = evaluated(columns)
    sums = dict.fromkeys(("right", "tied", "wrong", "margin", "square", "nll", "brier"), 0.0)
    decided = total = 0.0
    for c, r, y, w in zip(*(columns[name] for name in ("chosen", "rejected", "label", "weight")), strict=True):
        q = 1 / (1 + math.exp(-1.3 * (c - r)))
        total += w
        sums["nll"] -= w * (y * math.log(q) + (1 - y) * math.log(1 - q))
        sums["brier"] += w * (y * (1 - q) ** 2 + (1 - y) * q**2)
        if y == 0.5:
            continue
        margin = c - r if y > 0.5 else r - c
        decided += w
        sums["right"] += w * (margin > 0)
        sums["tied"] += w * (margin == 0)
        sums["wrong"] += w * (margin < 0)
        sums["margin"] += w * margin
        sums["square"] += w * margin**2
    mean = sums["margin"] / decided
    assert metrics.accuracy.value == pytest.approx((sums["right"] + sums["tied"] / 2) / decided, rel=1e-12)
    assert metrics.tie_rate == pytest.approx(sums["tied"] / decided, rel=1e-12)
    assert metrics.negative_margin_rate == pytest.approx(sums["wrong"] / decided, rel=1e-12)
    assert metrics.mean_margin.value == pytest.approx(mean, rel=1e-12)
    assert metrics.margin_std == pytest.approx(math.sqrt(sums["square"] / decided - mean**2), rel=1e-9)
    assert metrics.nll.value == pytest.approx(sums["nll"] / total, rel=1e-12)
    assert metrics.brier.value == pytest.approx(sums["brier"] / total, rel=1e-12)
    assert metrics.num_undecided == int((columns["label"] == 0.5).sum())
    assert metrics.num_prompts == len(set(columns["prompt_ids"]))


def test_matches_scikit_learn_on_hard_labels():
    columns = world() | {"label": np.random.default_rng(1).integers(2, size=200).astype(np.float64)}
    metrics = evaluated(columns)
    p, y, w = expit(1.3 * (columns["chosen"] - columns["rejected"])), columns["label"], columns["weight"]
    assert metrics.nll.value == pytest.approx(log_loss(y, p, sample_weight=w), rel=1e-12)
    assert metrics.brier.value == pytest.approx(brier_score_loss(y, p, sample_weight=w), rel=1e-12)


def test_ties_count_one_half_and_are_reported():
    metrics = plain([1.0, 0.0, 2.0, 3.0], [1.0, 1.0, 2.0, 0.0])
    assert metrics.accuracy.value == 0.5
    assert (metrics.tie_rate, metrics.negative_margin_rate) == (0.5, 0.25)


def test_accuracy_is_what_is_neither_wrong_nor_half_of_a_tie():
    metrics = evaluated(world())
    assert metrics.accuracy.value == pytest.approx(1 - metrics.negative_margin_rate - metrics.tie_rate / 2, rel=1e-12)


def test_a_label_below_one_half_turns_the_pair_round():
    columns = world()
    turned = columns | {
        "chosen": columns["rejected"],
        "rejected": columns["chosen"],
        "label": 1 - columns["label"],
    }
    straight, other = evaluated(columns).flat(), evaluated(turned).flat()
    assert straight.keys() == other.keys()
    for name, value in straight.items():
        # The noise floor's draws fall on the pairs in their own order, which turning them changes.
        if not name.endswith("ece_noise_floor"):
            assert other[name] == pytest.approx(value, rel=1e-9), name


def test_pairs_labeled_one_half_count_in_likelihood_only():
    metrics = plain([1.0, 2.0, 9.0], [0.0, 3.0, 0.0], label=np.array([1.0, 1.0, 0.5]))
    assert metrics.accuracy.value == 0.5
    assert metrics.mean_margin.value == 0.0
    decided_only = plain([1.0, 2.0], [0.0, 3.0])
    undecided = -0.5 * math.log(expit(9.0)) - 0.5 * math.log(expit(-9.0))
    assert metrics.nll.value == pytest.approx((2 * decided_only.nll.value + undecided) / 3, rel=1e-12)


@pytest.mark.parametrize("num_prompts", [6, 60])
def test_prompts_without_a_decided_pair_are_no_samples_of_the_accuracy(num_prompts: int):
    rng = np.random.default_rng(2)
    chosen, rejected, gap = rng.normal(size=(3, 2 * num_prompts))
    names, label = np.repeat(np.arange(num_prompts), 2).astype(str).tolist(), np.ones(2 * num_prompts)
    alone = plain(chosen, rejected, label=label, prompt_ids=names, length_gap=gap, num_bootstrap=50)
    more = [f"undecided {i}" for i in range(50)]
    both = plain(
        *(np.append(side, np.ones(50)) for side in (chosen, rejected)),
        label=np.append(label, np.full(50, 0.5)),
        prompt_ids=[*names, *more],
        length_gap=np.append(gap, np.ones(50)),
        num_bootstrap=50,
    )
    for name in ("accuracy", "mean_margin", "longer_wins", "over_length", "roc_auc"):
        assert getattr(both, name) == getattr(alone, name), name
    assert both.nll.num_samples == num_prompts + 50


def test_nothing_decided_has_no_accuracy_and_says_so():
    metrics = plain([1.0, 2.0], [0.0, 0.0], label=np.array([0.5, 0.5]), num_bootstrap=100)
    assert math.isnan(metrics.accuracy.value)
    assert str(metrics.accuracy) == "n/a"
    assert "NaN" not in metrics.to_json()
    assert math.isnan(PairwiseMetrics.from_json(metrics.to_json()).margin_std)


def test_identical_to_the_last_bit_in_any_order():
    columns = world()
    shuffled = taken(columns, np.random.default_rng(9).permutation(200))
    assert evaluated(shuffled) == evaluated(columns)


def test_weight_is_repetition():
    columns = world()
    repeated = taken(columns, np.repeat(np.arange(200), columns["weight"].astype(int)))
    repeated["weight"] = np.ones(len(repeated["chosen"]))
    weighted, by_copies = evaluated(columns), evaluated(repeated)
    # A copy is a pair of its own to a simulation, so the noise floor differs; and it is counted as a pair.
    for name, value in weighted.flat().items():
        if not name.endswith(("ece_noise_floor", "num_pairs")):
            assert by_copies.flat()[name] == pytest.approx(value, rel=1e-12), name
    for name in ("accuracy", "nll", "brier", "mean_margin", "ece"):
        ours, theirs = getattr(weighted, name), getattr(by_copies, name)
        *numbers, kind = dataclasses.astuple(ours)
        *others, other_kind = dataclasses.astuple(theirs)
        assert numbers == pytest.approx(others, rel=1e-9)
        assert kind == other_kind
    assert by_copies.margin_quantiles == weighted.margin_quantiles


def test_invariant_to_a_shift_of_all_rewards_of_a_prompt():
    columns = world()
    shift = np.array([64.0 * int(name.split("-")[1]) for name in columns["prompt_ids"]])
    moved = columns | {"chosen": columns["chosen"] + shift, "rejected": columns["rejected"] + shift}
    # Eighths shifted by multiples of 64 are exact.
    for name in ("accuracy", "nll", "brier", "mean_margin"):
        assert getattr(evaluated(moved), name).value == pytest.approx(
            getattr(evaluated(columns), name).value, rel=1e-12
        )


def test_a_group_has_the_metrics_of_its_own_pairs():
    columns = world()
    metrics = evaluated(columns)
    for name in ("hh", "ukp", "toolrm"):
        members = np.array([source == name for source in columns["groups"]["source"]])
        alone = taken(columns, np.flatnonzero(members))
        alone.pop("groups")
        assert metrics.groups["source"][name] == evaluated(alone)
        assert metrics.flat()[f"source/{name}/accuracy"] == metrics.groups["source"][name].accuracy.value


def test_intervals_hold_the_value_and_narrow_with_data():
    few, many = (evaluated(world(size, num_prompts=size), num_bootstrap=400) for size in (100, 10_000))
    for name in ("accuracy", "nll", "brier", "ece", "mean_margin"):
        small, large = getattr(few, name), getattr(many, name)
        assert small.low <= small.value <= small.high
        assert large.high - large.low < 0.3 * (small.high - small.low)


def test_interval_of_the_calibration_error_covers_the_true_error():
    # The model doubles the true logit, so its true error is the mean of |sigmoid(2 z) - sigmoid(z)|.
    rng = np.random.default_rng(0)
    z = rng.normal(scale=1.5, size=400_000)
    truth = np.abs(expit(2 * z) - expit(z)).mean()
    covered, num_trials = 0, 150
    for trial in range(num_trials):
        z = rng.normal(scale=1.5, size=600)
        wins = rng.random(600) < expit(z)
        ece = plain((2 * z).tolist(), [0.0] * 600, label=wins.astype(np.float64), num_bootstrap=200, seed=trial).ece
        covered += ece.low <= truth <= ece.high
    # Binomial error of a coverage of 0.95 over 150 trials is 0.018; three of them.
    assert covered / num_trials >= 0.95 - 3 * 0.018


def test_all_pairs_right_still_has_an_interval_with_width():
    metrics = plain([1.0] * 20, [0.0] * 20, num_bootstrap=100)
    assert metrics.accuracy.value == 1.0
    assert metrics.accuracy.low == pytest.approx(20 / (20 + 1.959963984540054**2))
    assert metrics.accuracy.high == 1.0


@pytest.mark.parametrize("result", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)], ids=["right", "wrong", "tied"])
def test_equal_results_of_every_prompt_still_have_an_interval_with_width(result: tuple[float, float]):
    metrics = plain([result[0]] * 4, [result[1]] * 4, num_bootstrap=100, length_gap=np.ones(4))
    for estimate in (metrics.accuracy, metrics.longer_wins, metrics.over_length):
        assert estimate.high - estimate.low > 0.4
        assert estimate.low <= estimate.value <= estimate.high
    assert metrics.nll.low is None, "a loss has no bound, so equal values say nothing of its error"
    assert metrics.mean_margin.standard_error is None


def test_one_right_and_one_wrong_pair_in_every_prompt_is_not_certainty():
    metrics = plain([1.0, 0.0] * 4, [0.0, 1.0] * 4, prompt_ids=list("aabbccdd"), num_bootstrap=200)
    assert (metrics.accuracy.low, metrics.accuracy.high) == pytest.approx((0.15, 0.85), abs=0.001)
    without_bootstrap = plain([1.0, 0.0] * 4, [0.0, 1.0] * 4, prompt_ids=list("aabbccdd"))
    assert without_bootstrap.accuracy.standard_error > 0.1


def test_one_prompt_has_no_interval_even_if_others_have_undecided_pairs():
    metrics = plain([1.0] * 3, [0.0] * 3, label=np.array([1.0, 0.5, 0.5]), num_bootstrap=100)
    assert (metrics.accuracy.value, metrics.accuracy.low) == (1.0, None)


def test_the_interval_of_mostly_equal_results_covers_the_truth():
    rng = np.random.default_rng(0)
    covered, num_trials = 0, 200
    for trial in range(num_trials):  # two pairs a prompt: one right in nine prompts of ten, else both or none
        both = rng.choice([1, 0, 2], p=[0.9, 0.05, 0.05], size=8)
        right = np.stack([both > 0, both > 1], axis=1).ravel().astype(float)
        prompts = [str(k // 2) for k in range(16)]
        accuracy = plain(right.tolist(), [0.5] * 16, prompt_ids=prompts, num_bootstrap=100, seed=trial).accuracy
        covered += accuracy.low <= 0.5 <= accuracy.high
    # Binomial error of a coverage of 0.95 over 200 trials is 0.015; three of them.
    assert covered / num_trials >= 0.95 - 3 * 0.015


def test_the_length_baseline_is_counted_as_the_accuracy_is():
    metrics = plain(
        [1.0, 0.0, 1.0, 1.0],
        [0.0, 1.0, 0.0, 0.0],
        label=np.array([1.0, 1.0, 0.0, 0.5]),
        weight=np.array([1.0, 1.0, 2.0, 1.0]),
        length_gap=np.array([3.0, 0.0, -1.0, 9.0]),
    )
    assert metrics.longer_wins.value == pytest.approx((1 + 0.5 + 2) / 4)
    assert metrics.over_length.value == pytest.approx(metrics.accuracy.value - metrics.longer_wins.value)
    assert math.isnan(plain([1.0], [0.0]).longer_wins.value)


def test_a_model_that_counts_characters_is_not_above_length():
    gap = np.random.default_rng(0).normal(size=60)
    metrics = plain(gap.tolist(), [0.0] * 60, length_gap=gap, num_bootstrap=100)
    assert metrics.over_length.value == 0.0
    assert metrics.over_length.low < 0 < metrics.over_length.high


def test_few_prompts_that_carry_half_of_the_weight_are_counted():
    prompts = ["big"] * 10 + [f"small {k}" for k in range(10)]
    metrics = plain([1.0] * 20, [0.0] * 20, prompt_ids=prompts)
    assert metrics.num_prompts_of_half == 1
    assert metrics.num_effective_prompts == pytest.approx(20**2 / (10**2 + 10))


def test_the_macro_average_counts_each_source_alike():
    names = ["large"] * 8 + ["small"] * 2
    metrics = plain([1.0] * 8 + [0.0] * 2, [0.5] * 10, groups={"source": names})
    assert metrics.accuracy.value == 0.8
    assert metrics.macro_accuracy is not None
    assert metrics.macro_accuracy.value == 0.5
    assert plain([1.0], [0.0]).macro_accuracy is None
    assert json.loads(metrics.to_json())["macro_accuracy"]["value"] == 0.5


def test_no_bootstrap_gives_errors_without_intervals():
    metrics = evaluated(world(), num_bootstrap=0)
    assert metrics.accuracy.standard_error is not None
    assert metrics.accuracy.low is None
    assert metrics.accuracy.standard_error == pytest.approx(
        evaluated(world(), num_bootstrap=4_000).accuracy.standard_error, rel=0.1
    )


def test_margins_of_ten_thousand_are_exact():
    metrics = plain([1e4, -1e4], [0.0, 0.0])
    assert metrics.nll.value == 5e3
    assert metrics.brier.value == 0.5
    assert metrics.ece.value == pytest.approx(0.5)


def test_metrics_survive_json():
    metrics = evaluated(world())
    assert PairwiseMetrics.from_json(metrics.to_json()) == metrics
    json.loads(metrics.to_json(), parse_constant=pytest.fail)


@pytest.mark.parametrize("constant", [0.0, 5.5, -300.0])
def test_constant_rewards_are_collapse_whatever_rounding_does(constant: float):
    noise = np.random.default_rng(0).normal(scale=1e-7, size=(2, 50))
    metrics = plain((constant + noise[0]).tolist(), (constant + noise[1] - 1e-7).tolist())
    assert metrics.collapse.collapsed
    assert metrics.headline.startswith("collapsed: ")
    assert "accuracy" not in metrics.headline
    assert metrics.flat()["collapsed"] == 1.0


def test_rewards_that_depend_on_the_prompt_alone_are_collapse():
    rewards = np.random.default_rng(0).normal(size=50).tolist()
    metrics = plain(rewards, rewards)
    assert metrics.collapse.reason.startswith("collapsed: 100% of pairs have tied rewards")
    assert metrics.temperature.temperature is None


def test_a_model_that_ranks_is_not_collapse_however_weakly():
    rng = np.random.default_rng(0)
    chosen, rejected = rng.normal(scale=0.01, size=(2, 500))
    weak = plain((chosen + 0.005).tolist(), rejected.tolist())
    assert weak.nll.value == pytest.approx(math.log(2), rel=0.02)
    assert not weak.collapse.collapsed
    assert weak.headline.startswith("accuracy 0.")
    assert not detect_collapse(np.ones(4), np.ones(4), np.ones(4), nll=2.0).collapsed


def test_bad_columns_are_named():
    good = world()
    bad = {
        "chosen": ({"chosen": np.full(200, np.nan)}, "chosen must be finite, got nan"),
        "prompt_ids": ({"prompt_ids": ["a"]}, "prompt_ids must name a prompt for each of 200 pairs, got 1"),
        "label": ({"label": np.full(200, 1.5)}, "label must lie in"),
        "weight": ({"weight": np.zeros(200)}, "weight must be positive"),
        "groups": ({"groups": {"source": ["hh"]}}, "groups\\['source'\\] must have a value for each of 200"),
    }
    for change, message in bad.values():
        with pytest.raises(ValueError, match=message):
            evaluated(good | change)
    with pytest.raises(ValueError, match="beta must be positive"):
        evaluated(good, beta=0.0)
    with pytest.raises(ValueError, match="at least one pair"):
        plain([], [])


def test_estimates_name_the_prompts_behind_them():
    columns = world()
    metrics = evaluated(columns)
    assert isinstance(metrics.accuracy, Estimate)
    assert metrics.nll.num_samples == metrics.num_prompts == len(set(columns["prompt_ids"]))
    decided = zip(columns["prompt_ids"], columns["label"], strict=True)
    assert metrics.accuracy.num_samples == len({prompt for prompt, label in decided if label != 0.5})
