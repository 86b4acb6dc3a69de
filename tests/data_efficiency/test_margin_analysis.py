"""Wrong labels, training dynamics and annotators: known worlds, stated rates, closed forms."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

from rm_optimizer.core.metrics.calibration import flipped_labels
from rm_optimizer.data_efficiency.margin_analysis import (
    Cartography,
    held_out_chances,
    suspected_labels,
)
from rm_optimizer.data_efficiency.votes import noise_ceiling
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.interfaces.cli import app


def world(seed: int, num: int = 1500):
    """Pairs whose right label is the better response, a fifth of them turned around."""
    generator = np.random.default_rng(seed)
    differences = generator.normal(size=(num, 24)) * np.arange(1, 25) ** -0.5
    is_wrong = np.isin(np.arange(num), generator.permutation(num)[: num // 5])
    return differences, ((differences @ generator.normal(size=24) > 0) != is_wrong).astype(float), is_wrong


@pytest.mark.parametrize("seed", [0, 1])
def test_wrong_labels_of_a_synthetic_world_are_found(seed):
    differences, label, is_wrong = world(seed)
    found = held_out_chances(differences, label, np.arange(len(label)), num_repeats=2)
    assert roc_auc_score(is_wrong, -found.confidence) >= 0.95
    suspects = suspected_labels(found.confidence, false_positive_rate=0.05)
    flagged = np.isin(np.arange(len(label)), suspects.positions)
    assert flagged[~is_wrong].mean() <= 0.05
    assert flagged[is_wrong].mean() >= 0.4
    assert suspects.num_wrong == pytest.approx(is_wrong[flagged].sum(), rel=0.15)
    assert suspects.flipped_share == pytest.approx(0.2, abs=0.04)


def test_probabilities_are_of_models_that_have_not_seen_the_conversation():
    generator = np.random.default_rng(0)
    label = (generator.random(60) < 0.5).astype(float)
    groups = np.arange(60) // 2
    differences = np.eye(30)[groups]  # a feature a conversation: nothing can be known of one that was not seen
    found = held_out_chances(differences, label, groups, num_repeats=1)
    np.testing.assert_allclose(found.chances, 0.5)


def test_dynamics_have_their_closed_forms():
    found = Cartography(np.array([[0.9, 0.2, 0.5], [0.7, 0.6, 0.5]]))
    assert found.confidence == pytest.approx([0.8, 0.4, 0.5])
    assert found.variability == pytest.approx([0.1, 0.2, 0.0])
    assert found.correctness == pytest.approx([1.0, 0.5, 0.5])
    for chances in ([[np.nan]], [[2.8]]):
        with pytest.raises(DataError, match=r"a probability in \[0, 1\] of every pair"):
            Cartography(np.array(chances))


def test_no_label_is_suspected_where_the_model_expects_the_noise():
    generator = np.random.default_rng(4)
    margins = np.abs(generator.normal(size=3000) * 2)
    chances = expit(np.where(generator.random(3000) < expit(margins), margins, -margins))
    assert (chances < 0.2).any()
    assert suspected_labels(chances, false_positive_rate=0.9).positions == ()
    with pytest.raises(ConfigError, match="false_positive_rate"):
        suspected_labels(np.array([0.5]), false_positive_rate=0.0)


def test_annotators_who_agree_and_who_guess():
    every = noise_ceiling(np.array([3.0, 0.0]), np.array([0.0, 3.0]), ["a", "b"], num_bootstrap=0)
    assert every.agreement.value == every.one_by_others.value == 1.0
    assert every.majority == pytest.approx(1.0, abs=1e-3)
    votes = np.random.default_rng(0).binomial(4, 0.5, size=5000).astype(float)
    guess = noise_ceiling(votes, 4 - votes, [str(n) for n in range(5000)], num_bootstrap=0)
    assert guess.agreement.value == pytest.approx(0.5, abs=0.02)
    assert guess.majority == pytest.approx(0.5, abs=0.02)
    with pytest.raises(DataError, match="at least two votes"):
        noise_ceiling(np.array([1.0]), np.array([0.0]), ["a"])


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_the_share_of_flips_is_found_and_right_labels_are_suspected_at_their_rate(share):
    generator = np.random.default_rng(3)
    margins = np.abs(generator.normal(size=50_000) * 3)
    sides = np.where(generator.random(50_000) < expit(margins), margins, -margins)
    is_wrong = generator.random(50_000) < share
    chances = expit(np.where(is_wrong, -sides, sides) / 2)  # a model that random flips made half as sure
    assert flipped_labels(chances)[0] == pytest.approx(share, abs=0.02)
    for rate in (0.01, 0.05, 0.2):
        found = suspected_labels(chances, false_positive_rate=rate)
        flagged = np.isin(np.arange(50_000), found.positions)
        assert flagged[~is_wrong].mean() == pytest.approx(found.false_positive_rate, abs=0.005)
        assert found.num_wrong == pytest.approx(is_wrong[flagged].sum(), rel=0.08)
        assert found.false_positive_rate <= rate


def test_data_clean_takes_flipped_pairs_out_and_says_how_many(tmp_path):
    generator = np.random.default_rng(0)
    rows = []
    for number in range(240):
        sides = [f"polite answer {generator.integers(50)} please", f"rude answer {generator.integers(50)} idiot"]
        turned = number % 10 == 0
        chosen, rejected = sides[::-1] if turned else sides
        rows.append({"prompt": f"ask {number}", "chosen": chosen, "rejected": rejected})
        if number % 6 == 5:
            rows.append({"prompt": f"tie {number}", "chosen": "one", "rejected": "other", "label": 0.5})
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["data", "clean", str(data), "--out", str(tmp_path / "kept.jsonl")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    suspects = [json.loads(line) for line in (tmp_path / "kept.jsonl.suspects.jsonl").read_text().splitlines()]
    assert len(kept) + len(suspects) == 280
    assert sum(row["label"] == 0.5 for row in kept) == 40
    assert "40 pairs with a tie or a soft label stay, and are not judged" in result.output
    places = json.loads((tmp_path / "kept.jsonl.report.json").read_text())["positions"]
    assert [rows[place]["prompt"] for place in places] == [row["prompt"] for row in suspects]
    assert all(row["chance"] < 0.5 for row in suspects)
    found, wrong = {row["prompt"] for row in suspects}, {f"ask {number}" for number in range(0, 240, 10)}
    assert wrong <= found
    assert len(found - wrong) <= 0.05 * 216
    assert "estimated share of wrong labels: 10%" in result.output
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2
    assert "is there already" in again.stderr
