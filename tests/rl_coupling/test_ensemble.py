"""An ensemble combines its members' rewards in one scale and flags what they disagree on at the stated rate."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair, Prompt
from rm_optimizer.errors import CheckpointError, ConfigError, DataError
from rm_optimizer.rl_coupling import RewardModelEnsemble, load_ensemble
from rm_optimizer.rl_coupling.ensemble_folder import reference_responses, save_ensemble
from tests.builders import tiny_reward_model


class Linear(Scorer):
    """Reward `shift + scale (length + noise of this member)`; NaN for responses that say so."""

    def __init__(self, shift: float, scale: float, seed: int) -> None:
        self.shift, self.scale, self.seed = shift, scale, seed

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> torch.Tensor:
        noise = [np.random.default_rng([self.seed, *text.encode()]).normal() for text in responses]
        rewards = [
            float("nan") if text == "nan" else self.shift + self.scale * (len(text) + own)
            for text, own in zip(responses, noise, strict=True)
        ]
        return torch.tensor(rewards)


MEMBERS = [Linear(100.0, 2.0, 0), Linear(-5.0, 0.5, 1), Linear(0.0, 30.0, 2)]
TEXTS = ["x" * (k % 17 + 1) + str(k) for k in range(400)]
PROMPTS = ["p"] * len(TEXTS)


def fitted(**options) -> RewardModelEnsemble:
    ensemble = RewardModelEnsemble(MEMBERS, **options)
    ensemble.fit_reference(PROMPTS, TEXTS, false_positive_rate=0.1)
    return ensemble


def test_standardized_rewards_do_not_depend_on_shift_and_scale_of_a_member():
    others = [Linear(-7.0, 0.25, member.seed) for member in MEMBERS]
    same = RewardModelEnsemble(others)
    same.fit_reference(PROMPTS, TEXTS, false_positive_rate=0.1)
    ours, theirs = (np.array([p.individual_rewards for p in e.predict_batch(PROMPTS, TEXTS)]) for e in (fitted(), same))
    assert np.abs(ours - theirs).max() < 1e-4
    assert np.abs(ours.mean(axis=0)).max() < 0.2
    assert np.abs(ours.std(axis=0) - 1).max() < 0.1


def test_uncertainty_is_high_above_its_threshold():
    ensemble = fitted(uncertainty_threshold=0.0)
    found = ensemble.predict("p", "abc")
    assert found.is_high_uncertainty is True
    assert fitted(uncertainty_threshold=1e9).predict("p", "abc").is_high_uncertainty is False


@pytest.mark.parametrize("threshold", [None, 0.0, 0.2, 1e9])
def test_out_of_distribution_is_what_predict_flags(threshold):
    ensemble = fitted(uncertainty_threshold=threshold)
    found = ensemble.detect_ood(PROMPTS, TEXTS)
    assert found.is_ood == tuple(one.is_high_uncertainty for one in ensemble.predict_batch(PROMPTS, TEXTS))
    assert found.false_positive_rate == (0.1 if threshold is None else None)


def test_references_that_repeat_count_once_and_a_reversed_member_is_named(caplog):
    once, twice = RewardModelEnsemble(MEMBERS), RewardModelEnsemble(MEMBERS)
    expected = once.fit_reference(PROMPTS, TEXTS, false_positive_rate=0.1)
    assert twice.fit_reference([*PROMPTS, *PROMPTS], [*TEXTS, *TEXTS], false_positive_rate=0.1) == expected
    assert not caplog.records
    RewardModelEnsemble([*MEMBERS, Linear(0.0, -1.0, 9)]).fit_reference(PROMPTS, TEXTS)
    assert "member 4 of the ensemble (Linear) ranks the reference responses against the others" in caplog.text


def test_margins_do_not_change_with_a_member_s_shift():
    shifted = [Linear(member.shift + 1000.0, member.scale, member.seed) for member in MEMBERS]
    first, second = (RewardModelEnsemble(m).predict_margins(["p"], ["aaaa"], ["b"])[0] for m in (MEMBERS, shifted))
    assert first.individual_margins == pytest.approx(second.individual_margins, abs=1e-3)
    assert first.std_margin == pytest.approx(np.std(first.individual_margins, ddof=1))


def test_responses_like_the_reference_are_flagged_at_the_stated_rate_at_most():
    shares = []
    for start in range(20):
        ensemble = RewardModelEnsemble(MEMBERS)
        texts = [f"{'y' * (k % 17)}{start} {k}" for k in range(500)]
        ensemble.fit_reference(["p"] * 100, texts[:100], false_positive_rate=0.1, seed=start)
        shares.append(np.mean(ensemble.detect_ood(["p"] * 400, texts[100:]).is_ood))
    error = np.std(shares, ddof=1) / np.sqrt(20)
    assert np.mean(shares) < 0.1 + 3 * error
    assert np.mean(shares) > 0.03


def test_members_that_disagree_are_out_of_distribution():
    class Opposed(Scorer):
        def score(self, prompts, responses):
            return torch.tensor([-1.0 if "far" in text else 1.0 for text in responses]) * MEMBERS[0].score(
                prompts, responses
            )

    ensemble = RewardModelEnsemble([*MEMBERS, Opposed()])
    ensemble.fit_reference(PROMPTS, TEXTS)
    assert ensemble.detect_ood(["p"], ["far away"]).is_ood == (True,)


def test_without_a_reference_a_log_says_that_scales_are_mixed_and_min_is_refused(caplog):
    ensemble = RewardModelEnsemble(MEMBERS, 0.5)
    with caplog.at_level(logging.WARNING, "rm_optimizer"):
        assert ensemble.predict("p", "abc").is_high_uncertainty is True
        ensemble.predict("p", "abc")
    assert [record for record in caplog.records if "not standardized" in record.message] == caplog.records[:1]
    with pytest.raises(ConfigError, match=r"aggregation=min .* call fit_reference"):
        RewardModelEnsemble(MEMBERS, aggregation="min").score(["p"], ["abc"])
    with pytest.raises(ConfigError, match=r"detect_ood needs a threshold; call fit_reference.* or give the ensemble"):
        RewardModelEnsemble(MEMBERS).detect_ood(["p"], ["abc"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"models": MEMBERS[:1]}, "at least 2 models, got 1"),
        ({"models": MEMBERS, "uncertainty_threshold": -1.0}, "uncertainty_threshold must not be negative"),
        ({"models": MEMBERS, "aggregation": "men"}, "did you mean 'mean'"),
        ({"models": MEMBERS, "penalty": float("nan")}, "penalty must be finite"),
    ],
)
def test_a_wrong_option_is_refused(arguments, says):
    with pytest.raises(ConfigError, match=says):
        RewardModelEnsemble(**arguments)


def test_wrong_input_is_refused():
    ensemble = fitted()
    with pytest.raises(ValueError, match="2 prompts and 1 responses"):
        ensemble.predict_batch(["p", "q"], ["a"])
    with pytest.raises(CheckpointError, match=r"nan for response 2 by member 1 of the ensemble \(Linear\)"):
        ensemble.score(["p", "p"], ["a", "nan"])
    with pytest.raises(DataError, match="needs at least 38 reference responses"):
        ensemble.fit_reference(PROMPTS[:20], TEXTS[:20])
    with pytest.raises(DataError, match="gives every reference response the same reward"):
        RewardModelEnsemble([MEMBERS[0], Linear(3.0, 0.0, 0)]).fit_reference(PROMPTS, TEXTS)
    with pytest.raises(ConfigError, match=r"false_positive_rate must lie in \(0, 1\)"):
        ensemble.fit_reference(PROMPTS, TEXTS, false_positive_rate=1.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("members")
    found = []
    for seed in range(3):
        model = tiny_reward_model("llama", seed=seed)
        model.save_pretrained(root / f"seed-{seed}")
        found.append(root / f"seed-{seed}")
    return found


def test_members_loaded_in_turn_score_as_those_that_are_kept(folders: list[Path]):
    loads: list[str] = []

    def load(source: str) -> BradleyTerryRM:
        loads.append(source)
        return BradleyTerryRM.from_pretrained(source)

    size = sum(p.numel() * p.element_size() for p in load(str(folders[0])).parameters())
    rewards, counts = [], []
    for budget in (None, 0, 2 * size):
        ensemble = RewardModelEnsemble(folders, memory_bytes=budget, load=load)
        loads.clear()
        rewards += [ensemble.member_rewards(PROMPTS[:4], TEXTS[:4]) for _ in range(2)]
        counts.append(len(loads))
    assert counts == [3, 6, 4]
    assert all((found == rewards[0]).all() for found in rewards)


def test_what_any_member_cuts_is_counted(folders: list[Path]):
    ensemble = RewardModelEnsemble(folders)
    counted = ensemble.score_counted(["Hi", "one two three " * 100, "Hi"], ["Yes.", "No.", "a b c " * 300])
    assert (counted.num_prompt_cut, counted.num_response_cut) == (2, 1)
    whole = RewardModelEnsemble(folders, token_budget=8).score_counted(["Hi"], ["Yes."])
    assert whole.rewards == pytest.approx(counted.rewards[:1], abs=1e-5)
    assert (whole.num_prompt_cut, whole.num_response_cut) == (0, 0)


def test_a_folder_of_an_ensemble_gives_the_same_rewards_after_it_is_moved(folders: list[Path], tmp_path: Path):
    ensemble = RewardModelEnsemble(folders)
    reference = ensemble.fit_reference(PROMPTS, TEXTS)
    save_ensemble(folders[0].parent, [str(path) for path in folders], reference)
    moved = tmp_path / "moved"
    moved.symlink_to(folders[0].parent)
    again = load_ensemble(moved, aggregation="uwo")
    assert again.reference == reference
    assert again.predict("p", "abc") == ensemble.predict("p", "abc")
    assert again.digest() != ensemble.digest()
    (tmp_path / "ensemble.json").write_text('{"members": ["a"')
    with pytest.raises(CheckpointError, match=r"ensemble.json is damaged"):
        load_ensemble(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no ensemble.json"):
        load_ensemble(tmp_path / "nowhere")


def test_the_reference_takes_each_prompt_once_and_both_sides():
    pairs = [PreferencePair(f"p{k % 50}", f"a{k}", f"b{k}") for k in range(100)]
    prompts, texts = reference_responses(pairs, seed=0)
    assert sorted(map(str, prompts)) == sorted(f"p{k}" for k in range(50))
    assert {text[0] for text in texts} == {"a", "b"}
