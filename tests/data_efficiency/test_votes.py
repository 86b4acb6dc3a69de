"""Votes of annotators beside a model: closed forms, a calibrated model, and what the commands print of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.special import logit
from typer.testing import CliRunner

from rm_optimizer import PreferencePair
from rm_optimizer.data_efficiency.votes import VoteCalibration, Votes, vote_calibration, votes_of
from rm_optimizer.errors import DataError
from rm_optimizer.interfaces.cli import app
from tests.builders import tiny_reward_model


def pair(number: int, chosen: object, rejected: object) -> PreferencePair:
    votes = {"votes_chosen": chosen, "votes_rejected": rejected}
    return PreferencePair(f"q {number}", "a", "b", metadata=votes)


def test_votes_of_some_pairs_are_found_and_pairs_without_one_left_out():
    pairs = [pair(0, 3, 1), PreferencePair("q", "a", "b"), pair(2, 0, 0), pair(3, "2", 2.0)]
    found = votes_of(pairs)
    assert found is not None
    assert found.positions.tolist() == [0, 3]
    assert (found.chosen.tolist(), found.rejected.tolist()) == ([3, 2], [1, 2])
    assert votes_of(pairs[1:3]) is None


@pytest.mark.parametrize("bad", [-1, "many", float("nan")])
def test_what_is_no_number_of_votes_is_refused_with_its_pair(bad):
    with pytest.raises(DataError, match=r"pair 2 has .* in votes_chosen and votes_rejected; expected numbers of votes"):
        votes_of([pair(0, 1, 1), pair(1, 2, bad)])


def test_two_pairs_have_their_closed_forms():
    votes = Votes(np.arange(2), np.array([3.0, 1.0]), np.array([1.0, 1.0]), ("p", "q"))
    found = vote_calibration(np.array([-logit(0.8) / 2, 0.0]), votes, beta=2.0, num_bootstrap=0)
    assert (found.num_pairs, found.num_votes) == (2, 6)
    assert found.vote_accuracy.value == pytest.approx((1 + 2 / 2) / 6)
    assert found.majority_accuracy.value == 0  # the second pair has no majority
    assert found.vote_nll.value == pytest.approx(-(3 * np.log(0.2) + np.log(0.8) + 2 * np.log(0.5)) / 6)
    assert found.correlation == pytest.approx(-1)
    assert found.temperature is None
    assert VoteCalibration.from_json(found.to_json()) == found


def test_a_model_that_knows_the_shares_is_calibrated_and_reaches_the_ceiling():
    generator = np.random.default_rng(0)
    shares = generator.beta(0.8, 0.8, size=6000)
    margins, chosen = logit(shares), generator.binomial(5, shares).astype(float)
    votes = Votes(np.arange(6000), chosen, 5 - chosen, tuple(map(str, range(6000))))
    found = vote_calibration(margins, votes, num_bootstrap=0)
    assert found.ece < 0.02
    assert found.temperature == pytest.approx(1, abs=0.05)
    assert found.ceiling is not None
    assert found.vote_accuracy.value == pytest.approx(found.ceiling.vote_ceiling, abs=0.01)
    assert found.majority_accuracy.value == pytest.approx(found.ceiling.majority_ceiling, abs=0.01)
    assert found.ceiling.one_by_others.value < found.ceiling.vote_ceiling
    sharp = vote_calibration(3 * margins, votes, num_bootstrap=0)
    assert sharp.ece > 0.05
    assert sharp.temperature == pytest.approx(3, abs=0.15)
    assert sharp.vote_accuracy == found.vote_accuracy


def test_evaluate_and_data_check_print_votes_where_there_are_any(tmp_path):
    rows = [
        {
            "prompt": f"ask {n % 6}",
            "chosen": f"yes {n}",
            "rejected": f"no {n}",
            "votes_chosen": 3,
            "votes_rejected": n % 3,
        }
        for n in range(24)
    ]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny_reward_model("llama", max_length=64).save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    options = ["--data", str(data), "--output", str(out), "--bootstrap", "20"]
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path / "model"), *options])
    assert result.exit_code == 0, result.output
    assert "a vote agrees with the model" in result.output
    assert json.loads((out / "votes.json").read_text())["num_votes"] == 24 * 3 + 24
    assert (out / "plots" / "votes.png").stat().st_size > 10_000
    checked = CliRunner().invoke(app, ["data", "check", str(data)])
    assert checked.exit_code == 0, checked.output
    assert "two votes of a pair agree" in checked.output
