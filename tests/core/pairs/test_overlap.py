"""A model's record of its training pairs finds them again in any order, case and spacing."""

from __future__ import annotations

from pathlib import Path

import pytest

from rm_optimizer.core.pairs.pair import Message, PreferencePair, pair_fingerprints
from rm_optimizer.core.storage.model_files import TRAINED_PAIRS_FILE, TrainedPairs
from rm_optimizer.errors import CheckpointError

PAIRS = [PreferencePair(f"What is {i}?", f"It is {i}.", "Unknown.") for i in range(20)]
TRAINED = TrainedPairs.of(pair_fingerprints(PAIRS[:10]), pair_fingerprints(PAIRS[5:12]))


def test_pairs_that_were_trained_on_are_counted_and_others_are_not():
    found = TRAINED.count(PAIRS[9:15])
    assert (found.num_pairs, found.num_pairs_of_prompts, found.num_prompts) == (3, 3, 3)
    assert TRAINED.count(PAIRS[12:]).num_pairs_of_prompts == 0


@pytest.mark.parametrize(
    "pair",
    [
        PreferencePair("  what IS 3? \n", "it is\t3.", "unknown."),
        PreferencePair("What is 3?", "Unknown.", "It is 3."),
        PreferencePair((Message("user", "What is 3?"),), "It is 3.", "Unknown.", label=0.5, weight=2.0),
    ],
)
def test_case_blanks_and_order_make_no_new_pair(pair: PreferencePair):
    assert TRAINED.count([pair]).num_pairs == 1


def test_other_responses_to_a_prompt_of_training_are_counted_by_prompt():
    found = TRAINED.count([PreferencePair("What is 3?", f"{i}", "no") for i in range(4)])
    assert (found.num_pairs, found.num_pairs_of_prompts, found.num_prompts) == (0, 4, 1)


def test_the_record_is_found_from_every_kind_of_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for folder in ("run/best", "run/checkpoints", "alone"):
        (tmp_path / folder).mkdir(parents=True)
    TRAINED.write(tmp_path / "run" / TRAINED_PAIRS_FILE)
    for file in ("run/best/config.json", "run/checkpoints/best.ckpt", "alone/config.json"):
        (tmp_path / file).touch()
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "run" / "checkpoints" / "best.ckpt")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "run" / "checkpoints")
    for source in ("best.ckpt", "../best/", "..", "~/run/best", "~/link.ckpt", tmp_path / "run"):
        found = TrainedPairs.recorded(source)
        assert found is not None, source
        assert found.count(PAIRS).num_pairs == 12
    assert TrainedPairs.recorded("~/alone") is None
    assert TrainedPairs.recorded("org/name") is None


def test_a_torn_record_is_refused_by_name(tmp_path: Path):
    path = TRAINED.write(tmp_path / TRAINED_PAIRS_FILE)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"trained_pairs\.npz is damaged"):
        TrainedPairs.read(path)
