"""`data.curriculum`: where margins come from, exact resumes, and refusals."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from rm_optimizer.core.data_loader import PreferenceDataset, TrainVal
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.training.data.run_data import order_of, training_margins
from rm_optimizer.training.run import run_training
from tests.builders import tiny_reward_model
from tests.training.folder.test_resume import assert_same_outcome, stopped_after
from tests.training.test_from_python import FEW, REVERSED, Steps

PAIRS = [PreferencePair(f"Say {i}", f"{i} it is", "no", margin=i / 24) for i in range(24)]
DATA = TrainVal(PreferenceDataset(PAIRS), PreferenceDataset([*PAIRS[:4]]))
OVERLAP = "data.allow_prompt_overlap=true"


def test_a_run_shows_every_pair_once_easy_ones_first_and_resumes_in_its_order(small_config, tmp_path, monkeypatch):
    options = [*FEW, OVERLAP, "data.curriculum=margin"]
    whole, cut, steps = tmp_path / "whole", tmp_path / "cut", Steps()
    result = run_training(small_config(whole, *options), data=DATA, callbacks=[steps])
    assert sorted(position for pairs in steps.pairs for position in pairs) == list(range(24))
    assert np.mean(steps.pairs[0]) > np.mean(steps.pairs[-1]) + 5
    assert result.data.order.startswith("curriculum-")
    stopped_after(2, small_config(cut, *options), monkeypatch, data=DATA, callbacks=[Steps()])
    run_training(small_config(cut, *options, "resume=auto"), data=DATA, callbacks=[Steps()])
    assert_same_outcome(whole, cut)
    again = run_training(small_config(cut, *options, "resume=auto"), data=DATA)  # has ended
    assert again.data.order == result.data.order


def test_margins_come_from_a_file_or_a_model_and_those_against_the_label_are_hardest(tmp_path):
    path, pairs = tmp_path / "margins.jsonl", DATA.train
    rows = [{"pair_id": pair.pair_id, "chosen": number - 4.0, "rejected": 0} for number, pair in enumerate(PAIRS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert training_margins(pairs, str(path)).tolist() == [max(number - 4.0, 0) for number in range(24)]
    model = tiny_reward_model("llama", max_length=64)
    model.save_pretrained(tmp_path / "model")
    sides = ([getattr(pair, side) for pair in PAIRS] for side in ("chosen", "rejected"))
    chosen, rejected = (model.score([pair.prompt for pair in PAIRS], side).numpy() for side in sides)
    found = training_margins(pairs, str(tmp_path / "model"))
    assert found == pytest.approx(np.maximum(chosen - rejected, 0), abs=1e-6)
    with pytest.raises(ConfigError, match="may round apart in 2 processes"):
        training_margins(pairs, str(tmp_path / "model"), num_processes=2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"pair_id": "0", "margin": 1.0}, "needs a row for every training pair, but 24 of 24 have none"),
        ({"pair_id": "0"}, "line 1: expected pair_id and margin, or the rewards chosen and rejected"),
        ({"pair_id": "0", "margin": None}, "line 1: expected pair_id and margin"),
        ({"pair_id": "0", "margin": math.nan}, "line 1: expected a finite margin of pair 0, got nan"),
        ({"pair_id": "0", "margin": math.inf}, "line 1: expected a finite margin of pair 0, got inf"),
    ],
)
def test_a_file_that_lacks_margins_is_refused(tmp_path, row, message):
    path = tmp_path / "margins.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        training_margins(DATA.train, str(path))


def test_two_margins_of_a_pair_are_refused(tmp_path):
    path = tmp_path / "margins.jsonl"
    path.write_text("".join(json.dumps({"pair_id": "0", "margin": margin}) + "\n" for margin in (1.0, 1.0, 3.0)))
    with pytest.raises(DataError, match="line 3: expected one margin of pair 0, got 1 and 3"):
        training_margins(DATA.train, str(path))


def test_a_pair_whose_rejected_response_is_better_is_easy_where_that_one_leads(tmp_path):
    labels = (1.0, 0.0, 0.2, 0.5)
    pairs = PreferenceDataset(replace(PAIRS[place], label=label) for place, label in enumerate(labels))
    rows = [{"pair_id": pair.pair_id, "chosen": 0.0, "rejected": 2.0} for pair in pairs]
    path = tmp_path / "margins.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    assert training_margins(pairs, str(path)).tolist() == [0, 2, 2, 0]
    tiny_reward_model("llama", max_length=64).save_pretrained(tmp_path / "model")
    turned = PreferenceDataset(replace(pair, label=0.0) for pair in PAIRS)
    both = [training_margins(data, str(tmp_path / "model")) for data in (DATA.train, turned)]
    assert ((both[0] > 0) != (both[1] > 0)).all()


def test_what_is_no_curriculum_is_refused(small_config, tmp_path):
    config = small_config(tmp_path / "run", *FEW, "data.curriculum=margin")
    bare = PreferenceDataset([*PAIRS[:20], *(replace(pair, margin=None) for pair in PAIRS[20:])])
    with pytest.raises(DataError, match="4 of 24 have none, the first is pair 21"):
        order_of(TrainVal(bare, DATA.val), config)
    alike = PreferenceDataset(replace(pair, margin=3.0) for pair in PAIRS)
    with pytest.raises(ConfigError, match="finds all 24 pairs easy"):
        order_of(TrainVal(alike, DATA.val), config)
    with pytest.raises(ConfigError, match=r"gives an order, so data\.curriculum must not be set"):
        order_of(DATA, config, REVERSED)


def test_an_epoch_that_repeats_pairs_needs_all_of_them(small_config, tmp_path):
    config = small_config(tmp_path / "run", *FEW, OVERLAP, "data.curriculum=margin", "data.curriculum_covers=false")
    much = "much " * 300
    alike = PreferencePair("Say", f"{much} a {much}", f"{much} b {much}", margin=0.5)
    data = TrainVal(PreferenceDataset([*PAIRS, alike]), DATA.val)
    with pytest.raises(DataError, match=r"equal after truncation, so data\.curriculum_covers=false cannot count"):
        run_training(config, data=data)
