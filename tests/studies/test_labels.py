"""Savings of labels: known curves, the placebo, and a small study from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import labels
import numpy as np
import pytest
from labels import (
    PLACEBO,
    LabeledFeatures,
    SyntheticPool,
    fitted,
    label_savings,
    labels_needed,
    sampled_margins,
    synthetic_split,
)
from scipy.special import expit

from rm_optimizer import PreferencePair
from rm_optimizer.data_efficiency.margin_analysis import fit_linear_reward
from rm_optimizer.errors import DataError
from tests.builders import tiny_reward_model

LABELS = np.arange(64, 1025, 64)


def power_law(labels: np.ndarray, factor: float = 1.0) -> np.ndarray:
    return 0.7 - 0.9 * (labels * factor) ** -0.4


@pytest.mark.parametrize("factor", [1.5, 2.0, 0.75])
def test_a_rule_that_needs_a_share_of_the_labels_saves_the_rest(factor):
    curves = {"random": power_law(LABELS), "rule": power_law(LABELS, factor), PLACEBO: power_law(LABELS)}
    splits = {name: np.tile(curve, (3, 1)) for name, curve in curves.items()}
    found = label_savings("p", [*LABELS], splits, splits)
    saving = {rule.rule: rule.saving.value for rule in found.rules}
    assert saving["rule"] == pytest.approx(1 - 1 / factor, abs=0.01)
    assert saving[PLACEBO] == pytest.approx(0, abs=1e-9)
    assert found.is_accepted


def test_a_rule_that_never_gets_there_saves_minus_all():
    flat = np.tile(np.linspace(0.55, 0.56, len(LABELS)), (3, 1))
    good = np.tile(power_law(LABELS), (3, 1))
    splits = {"random": good, "rule": flat, PLACEBO: good}
    found = label_savings("p", [*LABELS], splits, splits)
    assert found.rules[-1].rule == "rule"
    assert found.rules[-1].saving.value == -1.0


def test_a_placebo_that_saves_is_no_accepted_study():
    splits = {name: np.tile(power_law(LABELS, f), (3, 1)) for name, f in [("random", 1), (PLACEBO, 1.4), ("rule", 1.2)]}
    found = label_savings("p", [*LABELS], splits, splits)
    assert not found.is_accepted


def test_intervals_of_a_placebo_hold_zero_at_their_rate():
    generator, held = np.random.default_rng(0), 0
    for _ in range(60):
        noise = 0.01 * generator.normal(size=(2, 20, len(LABELS)))
        splits = dict(zip(("random", PLACEBO), power_law(LABELS) + noise, strict=True))
        found = label_savings("p", [*LABELS], splits, splits, num_bootstrap=100)
        held += found.rules[0].saving.low <= 0 <= found.rules[0].saving.high
    assert held >= 52  # 57 expected; three standard deviations below it


def test_a_falling_curve_is_fitted_monotonely():
    falling = np.linspace(0.6, 0.5, len(LABELS))[None]
    assert fitted(LABELS.astype(float), falling)[0] == pytest.approx(0.55)


def test_labels_between_two_numbers_lie_on_a_line_over_their_logarithms():
    needed = labels_needed(np.array([100.0, 400.0]), np.array([[0.5, 0.6]] * 3), np.array([0.55, 0.4, 0.7]))
    assert needed == pytest.approx([200, 100, np.inf])


def test_members_have_the_covariance_of_the_inverse_hessian():
    generator = np.random.default_rng(0)
    z = generator.normal(size=(50, 3))
    weights = fit_linear_reward(z, (z[:, 0] > 0).astype(float), ridge=1.0)
    chances = expit(z @ weights)
    hessian = (z * (chances * (1 - chances))[:, None]).T @ z + np.eye(3)
    drawn = sampled_margins(weights, z, 1.0, np.eye(3), 40_000, generator)
    np.testing.assert_allclose(np.cov(drawn.T), np.linalg.inv(hessian), atol=0.02)
    np.testing.assert_allclose(drawn.mean(axis=0), weights, atol=0.02)


@pytest.mark.parametrize("pool", SyntheticPool)
def test_a_synthetic_pool_is_that_of_its_seed_and_its_labels_follow_the_oracle(pool):
    split = synthetic_split(pool, 4)
    np.testing.assert_array_equal(split.differences, synthetic_split(pool, 4).differences)
    assert not np.array_equal(split.differences, synthetic_split(pool, 5).differences)
    weights = fit_linear_reward(split.differences, split.labels, ridge=1.0)
    right = (split.test_differences @ weights > 0) == (split.test_chances > 0.5)
    assert right.mean() > 0.85
    flipped = split.flipped(0.2, seed=1)
    assert np.mean(flipped.labels != split.labels) == pytest.approx(0.2, abs=0.03)


def test_splits_of_real_pairs_keep_conversations_together_and_hide_which_was_chosen():
    generator = np.random.default_rng(0)
    pairs = [PreferencePair(f"question {n // 2}", f"good {n}", f"bad {n}") for n in range(200)]
    features = LabeledFeatures.of(pairs, generator.normal(size=(200, 3)) + 5)
    split = features.split(0)
    assert len(split.labels) + len(split.test_chances) == 200
    assert 0.3 < split.labels.mean() < 0.7
    signs = np.sign(split.differences[:, 0])
    np.testing.assert_array_equal(signs > 0, split.labels > 0.5)
    kept = {tuple(np.abs(row)) for row in split.differences}
    groups = [features.groups[n] for n in range(200) if tuple(np.abs(features.differences[n])) in kept]
    assert len(groups) == len(split.labels)
    assert all(groups.count(group) == 2 for group in groups)


def test_labels_that_are_no_plain_preferences_are_refused():
    pairs = [PreferencePair("q", "a", "b"), PreferencePair("q", "a", "c", label=0.5)]
    with pytest.raises(DataError, match=r"pair 2 has the label 0\.5"):
        LabeledFeatures.of(pairs, np.zeros((2, 1)))


def test_length_strata_of_a_study_are_of_the_texts_and_not_of_a_feature():
    pairs = [PreferencePair(f"q {n}", "a" * (1 + n % 7), "b" * (1 + n % 5) + "c") for n in range(100)]
    split = LabeledFeatures.of(pairs, np.ones((100, 2))).split(0)
    ratios = {round(abs(np.log(len(pair.chosen) / len(pair.rejected))), 9) for pair in pairs}
    assert {round(abs(length), 9) for length in split.lengths} <= ratios
    assert len(split.lengths) == len(split.labels)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["labels.py", str(folder), *options])
    labels.main()


def test_a_small_study_is_read_again_from_its_trials_and_prints_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(labels, "NUM_POOL", 150)
    monkeypatch.setattr(labels, "TUNING_SPLITS", 1)
    options = ["--splits", "2", "--budget", "32", "--start", "16", "--batch", "16", "--bootstrap", "50"]
    options += ["--pool", "iid", "--pool", "duplicated"]
    run(monkeypatch, tmp_path, *options)
    first = capsys.readouterr().out
    assert "iid: labels saved at 32 labels, 2 splits" in first
    assert "random_again (placebo)" in first
    found = json.loads((tmp_path / "savings.json").read_text())
    assert [pool["pool"] for pool in found] == ["iid", "duplicated"]
    assert len(list(tmp_path.glob("trials/*.json"))) == 2 * (1 + 2)
    monkeypatch.setattr(labels, "fit_linear_reward", None)
    run(monkeypatch, tmp_path, *options)
    assert (json.loads((tmp_path / "savings.json").read_text()), capsys.readouterr().out) == (found, first)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--pool", "reduntant"], "invalid choice: 'reduntant'"),
        (["--pool", "iid", "--data", "pairs.jsonl"], "leave one out"),
        (["--model", "x"], "--model and --name are for --data"),
        (["--flips", "0.5"], "--flips must lie in [0, 0.5)"),
        (["--budget", "100"], "--budget must be --start and a multiple of --batch"),
        (["--budget", "1600"], "fewer than twice --budget 1600; lower it"),
    ],
)
def test_bad_options_of_the_study_are_one_sentence_and_leave_nothing(tmp_path, monkeypatch, capsys, options, expected):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, tmp_path / "s", *options)
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_trials_are_those_of_the_weights_under_a_path(tmp_path, monkeypatch):
    rows = [{"prompt": f"q {n}", "chosen": f"yes {n}", "rejected": f"no {n * n}"} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--budget", "8", "--start", "4", "--batch", "4", "--splits", "2", "--bootstrap", "10"]
    for seed in (0, 1):
        tiny_reward_model("llama", seed=seed, max_length=64).save_pretrained(tmp_path / "model")
        pairs = ["--data", str(tmp_path / "pairs.jsonl"), "--model", str(tmp_path / "model")]
        run(monkeypatch, tmp_path / "s", *pairs, *options)
    assert len(list((tmp_path / "s" / "trials").glob("*.json"))) == 2 * (1 + 2)
