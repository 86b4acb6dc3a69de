"""Savings of labels: known curves, the placebo, the exact fit, and a small study from the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner

from rm_optimizer import PreferencePair
from rm_optimizer.data_efficiency.linear_reward import fit_linear_reward
from rm_optimizer.data_efficiency.savings import label_pools, label_study
from rm_optimizer.data_efficiency.savings.label_pools import LabeledFeatures, SyntheticPool, synthetic_split
from rm_optimizer.data_efficiency.savings.label_savings import fitted, label_savings, labels_needed
from rm_optimizer.data_efficiency.text_features import text_differences
from rm_optimizer.errors import DataError
from rm_optimizer.interfaces.cli import app
from tests.builders import tiny_reward_model

LABELS = np.arange(64, 1025, 64)


def power_law(labels: np.ndarray, factor: float = 1.0) -> np.ndarray:
    return 0.7 - 0.9 * (labels * factor) ** -0.4


@pytest.mark.parametrize("factor", [1.5, 2.0, 0.75])
def test_a_rule_that_needs_a_share_of_the_labels_saves_the_rest(factor):
    curves = {"random": power_law(LABELS), "rule": power_law(LABELS, factor), "again": power_law(LABELS)}
    splits = {name: np.tile(curve, (3, 1)) for name, curve in curves.items()}
    found = label_savings("p", [*LABELS], splits, splits, budget=512, reference="random", placebo="again")
    saving = {rule.rule: rule.saving.value for rule in found.rules}
    assert saving["rule"] == pytest.approx(1 - 1 / factor, abs=0.01)
    assert saving["again"] == pytest.approx(0, abs=1e-9)
    assert found.is_accepted


def test_a_rule_that_never_gets_there_saves_minus_all():
    flat = np.tile(np.linspace(0.55, 0.56, len(LABELS)), (3, 1))
    good = np.tile(power_law(LABELS), (3, 1))
    splits = {"random": good, "rule": flat, "again": good}
    found = label_savings("p", [*LABELS], splits, splits, budget=512, reference="random", placebo="again")
    assert found.rules[-1].rule == "rule"
    assert found.rules[-1].saving.value == -1.0


def test_a_placebo_that_saves_is_no_accepted_study():
    splits = {name: np.tile(power_law(LABELS, f), (3, 1)) for name, f in [("random", 1), ("again", 1.4), ("rule", 1.2)]}
    found = label_savings("p", [*LABELS], splits, splits, budget=512, reference="random", placebo="again")
    assert not found.is_accepted


def test_intervals_of_a_placebo_hold_zero_at_their_rate():
    generator, held = np.random.default_rng(0), 0
    for _ in range(60):
        noise = 0.01 * generator.normal(size=(2, 20, len(LABELS)))
        splits = dict(zip(("random", "again"), power_law(LABELS) + noise, strict=True))
        found = label_savings(
            "p", [*LABELS], splits, splits, budget=512, reference="random", placebo="again", num_bootstrap=100
        )
        held += found.rules[0].saving.low <= 0 <= found.rules[0].saving.high
    assert held >= 52  # 57 expected; three standard deviations below it


def test_a_falling_curve_is_fitted_monotonely():
    falling = np.linspace(0.6, 0.5, len(LABELS))[None]
    assert fitted(LABELS.astype(float), falling)[0] == pytest.approx(0.55)


def test_labels_between_two_numbers_lie_on_a_line_over_their_logarithms():
    needed = labels_needed(np.array([100.0, 400.0]), np.array([[0.5, 0.6]] * 3), np.array([0.55, 0.4, 0.7]))
    assert needed == pytest.approx([200, 100, np.inf])


@pytest.mark.parametrize("num", [3, 40, 400])
def test_the_fit_is_that_of_scikit_learn(num):
    generator = np.random.default_rng(num)
    z = generator.normal(size=(num, 6)) * 4
    y = (generator.random(num) < expit(z[:, 0])).astype(float)
    y[:2] = 0, 1
    model = fit_linear_reward(z, y, ridge=0.5)
    peer = LogisticRegression(C=2.0, fit_intercept=False, tol=1e-10, max_iter=2000).fit(z, y)
    np.testing.assert_allclose(model.weights, peer.coef_[0], rtol=1e-4, atol=1e-6)


def test_members_have_the_covariance_of_the_inverse_hessian():
    generator = np.random.default_rng(0)
    z = generator.normal(size=(50, 3))
    model = fit_linear_reward(z, (z[:, 0] > 0).astype(float), ridge=1.0)
    chances = expit(z @ model.weights)
    hessian = (z * (chances * (1 - chances))[:, None]).T @ z + np.eye(3)
    drawn = model.sampled_margins(np.eye(3), 40_000, generator)
    np.testing.assert_allclose(np.cov(drawn.T), np.linalg.inv(hessian), atol=0.02)
    np.testing.assert_allclose(drawn.mean(axis=0), model.weights, atol=0.02)


@pytest.mark.parametrize("pool", SyntheticPool)
def test_a_synthetic_pool_is_that_of_its_seed_and_its_labels_follow_the_oracle(pool):
    split = synthetic_split(pool, 4)
    np.testing.assert_array_equal(split.differences, synthetic_split(pool, 4).differences)
    assert not np.array_equal(split.differences, synthetic_split(pool, 5).differences)
    model = fit_linear_reward(split.differences, split.labels, ridge=1.0)
    right = (model.margins(split.test_differences) > 0) == (split.test_chances > 0.5)
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


def test_text_features_tell_words_lengths_and_questions_apart():
    pairs = [
        PreferencePair("q", f"red apple pie number {n % 3}", f"blue sky today? number {n % 3}{' and' * (n % 4)}")
        for n in range(30)
    ]
    differences = text_differences(pairs, num_directions=4)
    assert differences.shape == (30, 6)
    exchanged = text_differences([PreferencePair("q", pair.rejected, pair.chosen) for pair in pairs], num_directions=4)
    np.testing.assert_allclose(np.abs(exchanged), np.abs(differences), atol=1e-6)
    with pytest.raises(DataError, match="give more pairs"):
        text_differences([PreferencePair("q", "one", "two")])


def test_a_small_study_runs_goes_on_and_writes_tables_and_pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(label_pools, "NUM_POOL", 150)
    monkeypatch.setattr(label_study, "TUNING_SPLITS", 1)
    options = ["--splits", "2", "--budget", "32", "--start", "16", "--batch", "16", "--bootstrap", "50"]
    options += ["--pool", "iid", "--pool", "duplicated"]

    def run():
        return CliRunner().invoke(app, ["study", "labels", str(tmp_path / "s"), *options])

    first = run()
    assert first.exit_code == 0, first.output
    assert "iid: labels saved at 32 labels, 2 splits" in first.output
    assert "random_again (placebo)" in first.output
    found = json.loads((tmp_path / "s" / "savings.json").read_text())
    assert [pool["pool"] for pool in found] == ["iid", "duplicated"]
    assert (tmp_path / "s" / "iid.curves.png").stat().st_size > 10_000
    results = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").glob("trials/*/result.json")}
    assert len(results) == 4
    again = run()
    assert json.loads((tmp_path / "s" / "savings.json").read_text()) == found
    assert again.exit_code == 0
    assert results == {path: path.stat().st_mtime_ns for path in (tmp_path / "s").glob("trials/*/result.json")}
    options[3] = "48"
    mixed = run()
    assert mixed.exit_code == 2
    assert "the folder holds a pool 'iid' of other pairs, features or options" in mixed.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--pool", "reduntant"], "did you mean 'redundant'"),
        (["--pool", "iid", "--data", "pairs.jsonl"], "leave one out"),
        (["--model", "x"], "--model and --name are for --data"),
        (["--flips", "0.5"], "--flips must lie in [0, 0.5)"),
        (["--budget", "100"], "--budget must be --start and a multiple of --batch"),
        (["--budget", "1600"], "fewer than twice --budget 1600; lower it"),
    ],
)
def test_bad_options_of_the_study_are_one_sentence_and_leave_nothing(tmp_path, options, expected):
    result = CliRunner().invoke(app, ["study", "labels", str(tmp_path / "s"), *options])
    assert result.exit_code == 2
    assert expected in result.stderr
    assert not (tmp_path / "s").exists()


def test_length_strata_of_a_study_are_of_the_texts_and_not_of_a_feature():
    pairs = [PreferencePair(f"q {n}", "a" * (1 + n % 7), "b" * (1 + n % 5) + "c") for n in range(100)]
    split = LabeledFeatures.of(pairs, np.ones((100, 2))).split(0)
    ratios = {round(abs(np.log(len(pair.chosen) / len(pair.rejected))), 9) for pair in pairs}
    assert {round(abs(length), 9) for length in split.lengths} <= ratios
    assert len(split.lengths) == len(split.labels)


def test_features_are_those_of_the_weights_under_a_path(tmp_path):
    rows = [{"prompt": f"q {n}", "chosen": f"yes {n}", "rejected": f"no {n * n}"} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--budget", "8", "--start", "4", "--batch", "4", "--splits", "2", "--bootstrap", "10"]
    for seed in (0, 1):
        tiny_reward_model("llama", seed=seed, max_length=64).save_pretrained(tmp_path / "model")
        command = [
            "study",
            "labels",
            str(tmp_path / "s"),
            "--data",
            str(tmp_path / "pairs.jsonl"),
            "--name",
            f"p{seed}",
        ]
        result = CliRunner().invoke(app, [*command, "--model", str(tmp_path / "model"), *options])
        assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "s" / "features").glob("*.npz"))) == 2
