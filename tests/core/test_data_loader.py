from __future__ import annotations

import itertools
import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rm_optimizer.core.data_loader import (
    PreferenceDataset,
    TrainVal,
    load_pairs,
    load_training_data,
    prompt_ids,
    require_disjoint_prompts,
)
from rm_optimizer.core.pairs.pair import Message, PreferencePair, conversation_groups, folded_prompt_id, prompt_keys
from rm_optimizer.core.tokens.splits import num_leaked_pairs
from rm_optimizer.errors import DataError
from rm_optimizer.schema import DataConfig
from rm_optimizer.schema.data import KwiseRule, OnBadRow, SyntheticConfig

REAL_DATA = Path(os.environ.get("RM_OPTIMIZER_REAL_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_real_data = pytest.mark.skipif(
    not REAL_DATA.is_dir(), reason="needs the real preference data; RM_OPTIMIZER_REAL_DATA names its folder"
)


def dataset(num_prompts: int, pairs_each: int = 2) -> PreferenceDataset:
    return PreferenceDataset(
        PreferencePair(f"prompt {i}", f"good {j}", "bad") for i in range(num_prompts) for j in range(pairs_each)
    )


def write(path: Path, data: PreferenceDataset) -> str:
    path.write_text("".join(json.dumps(pair.to_dict()) + "\n" for pair in data))
    return str(path)


def test_a_dataset_is_a_sequence_that_pickles():
    data = dataset(3)
    assert list(data) == list(data.pairs)
    assert data[-1].prompt == "prompt 2"
    assert data[1:3].pairs == data.pairs[1:3]
    assert pickle.loads(pickle.dumps(data)).pairs == data.pairs
    assert repr(data) == "PreferenceDataset(6 pairs, 0 skipped rows)"


def test_text_and_a_single_user_message_are_one_prompt():
    pairs = [PreferencePair("Hi", "a", "b"), PreferencePair((Message("user", "Hi"),), "a", "c")]
    assert len(set(prompt_ids(pairs))) == 1
    assert prompt_ids(pairs) == tuple(pair.prompt_id for pair in pairs)


@pytest.mark.parametrize(
    "change", [{"prompt": "x"}, {"chosen": "x"}, {"rejected": "x"}, {"margin": 1.0}, {"label": 0.5}, {"weight": 2.0}]
)
def test_the_fingerprint_depends_on_all_that_training_reads(change: dict[str, Any]):
    first, second = PreferencePair("Hi", "a", "b"), PreferencePair("Bye", "c", "d")
    changed = PreferencePair(**({"prompt": "Hi", "chosen": "a", "rejected": "b"} | change))
    fingerprint = PreferenceDataset([first, second]).fingerprint
    assert fingerprint == PreferenceDataset((first, second)).fingerprint
    assert fingerprint != PreferenceDataset((changed, second)).fingerprint
    assert fingerprint != PreferenceDataset((second, first)).fingerprint


def test_a_smaller_subset_lies_within_a_larger_one():
    data = dataset(20)
    small, large = data.subset(5, seed=3), data.subset(30, seed=3)
    assert (len(small), len(large)) == (5, 30)
    assert set(map(id, small)) < set(map(id, large))
    assert [pair for pair in data if pair in small.pairs] == list(small)
    assert data.subset(40, seed=3) is data
    assert small.pairs != data.subset(5, seed=4).pairs


@given(st.integers(2, 30), st.floats(0.01, 0.99), st.integers(0, 5))
def test_a_split_shares_no_prompt_and_loses_no_pair(num_prompts: int, fraction: float, seed: int):
    data = dataset(num_prompts)
    train, val = data.split_by_prompt(fraction, seed)
    require_disjoint_prompts(train, val)
    assert sorted(pair.pair_id for pair in (*train, *val)) == sorted(pair.pair_id for pair in data)
    wanted = min(max(1, round(fraction * num_prompts)), num_prompts - 1)
    assert len(set(val.prompt_ids)) == wanted


def test_a_split_does_not_depend_on_the_order_of_rows():
    data = dataset(20)
    _, val = data.split_by_prompt(0.3, seed=1)
    _, other = PreferenceDataset(data.pairs[::-1]).split_by_prompt(0.3, seed=1)
    assert set(val.prompt_ids) == set(other.prompt_ids)
    assert set(val.prompt_ids) != set(data.split_by_prompt(0.3, seed=2)[1].prompt_ids)


def test_one_prompt_cannot_be_split():
    with pytest.raises(DataError, match=r"at least 2 different prompts, got 1; .* data\.val"):
        dataset(1).split_by_prompt(0.5, seed=0)


def test_shared_prompts_are_refused_with_count_example_and_option():
    with pytest.raises(DataError, match=r"2 of 3 validation prompts .* 'prompt 1'; .* data\.allow_prompt_overlap=true"):
        require_disjoint_prompts(dataset(3)[2:], dataset(3))
    require_disjoint_prompts(dataset(3)[:2], dataset(3)[2:])


def test_sources_are_mixed_in_the_order_given(tmp_path: Path):
    first, second = write(tmp_path / "a.jsonl", dataset(4)), write(tmp_path / "b.jsonl", dataset(4))
    data = PreferenceDataset([first, {"path": second, "weight": 0.5}], seed=1)
    assert [pair.metadata["source"] for pair in data] == ["a"] * 8 + ["b"] * 4
    with pytest.raises(DataError, match="raise the sources' weights"):
        PreferenceDataset({"path": first, "weight": 0.01})


def test_load_pairs_reads_as_the_options_say(tmp_path: Path):
    rows = [{"q": "Hi", "responses": ["a", "b", "c"], "scores": [0, 1, 2]}, {"q": "Hi", "responses": "a", "scores": 0}]
    (tmp_path / "k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(columns={"prompt": "q"}, kwise_rule=KwiseRule.best_worst, on_bad_row=OnBadRow.drop)
    data = load_pairs(str(tmp_path / "k.jsonl"), config)
    assert [(pair.chosen, pair.rejected, pair.margin) for pair in data] == [("c", "a", 2.0)]
    assert [row.row for row in data.skipped] == [2]


def test_without_files_training_reads_the_synthetic_world():
    data = load_training_data(DataConfig(synthetic=SyntheticConfig(num_train=40, num_val=20), max_pairs=30))
    assert (len(data.train), len(data.val)) == (30, 20)
    assert data.val_origin == "the synthetic world's held-out prompts"
    assert data.ceiling is not None
    assert 0.5 < data.ceiling <= 1.0


def test_without_validation_training_prompts_are_held_out(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", dataset(10))
    data = load_training_data(DataConfig(train=path, val_fraction=0.3, max_pairs=5))
    assert (len(data.train), len(data.val)) == (5, 6)
    assert data.val_origin == "30% of the training prompts, held out with split_seed=0"
    assert data.ceiling is None
    require_disjoint_prompts(data.train, data.val)


def test_validation_on_training_data_must_be_allowed_by_name(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", dataset(10))
    with pytest.raises(DataError, match=r"10 of 10 validation prompts are also in the training data"):
        load_training_data(DataConfig(train=path, val=path))
    assert load_training_data(DataConfig(train=path, val=path, allow_prompt_overlap=True)).val_origin == path


def test_overlap_is_judged_before_the_subset_is_drawn(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", dataset(50))
    with pytest.raises(DataError, match="50 of 50"):
        load_training_data(DataConfig(train=path, val=path, max_pairs=1))


@needs_real_data
@pytest.mark.parametrize(
    ("name", "num_pairs", "num_prompts"),
    [
        ("pairs_train.parquet", 15320, 4448),
        ("pairs_val.parquet", 2518, 600),
        ("hh_train.jsonl.gz", 2770, 2770),
        ("hh_val.jsonl.gz", 361, 360),
        ("ukp_convarg1.parquet", 9436, 24),
        ("ukp_convarg1_ties.parquet", 3016, 24),
        ("kwise_gsm8k_solutions.parquet", 1637, 494),
        ("kwise_oasst_en100.parquet", 703, 200),
        ("kwise_ukp_convarg1_rank.parquet", 12697, 24),
    ],
)
def test_every_real_file_loads_as_it_is(name: str, num_pairs: int, num_prompts: int):
    data = PreferenceDataset(REAL_DATA / name)
    assert (len(data), len(set(data.prompt_ids))) == (num_pairs, num_prompts)


@needs_real_data
@pytest.mark.parametrize("split", ["train", "val"])
def test_raw_transcripts_and_framed_prompts_give_the_same_pairs(split: str):
    raw = PreferenceDataset(REAL_DATA / f"hh_{split}.jsonl.gz")
    table = PreferenceDataset(REAL_DATA / f"pairs_{split}.parquet")
    framed = {pair.pair_id for pair in table if pair.metadata["source"] == "hh_rlhf_test"}
    assert {pair.pair_id for pair in raw} == framed
    assert not any(isinstance(pair.prompt, str) and pair.prompt.endswith("Assistant:") for pair in table)


@needs_real_data
def test_the_real_splits_share_no_prompt():
    config = DataConfig(train=str(REAL_DATA / "pairs_train.parquet"), val=str(REAL_DATA / "pairs_val.parquet"))
    assert len(load_training_data(config).train) == 15320


def conversation(*texts: str) -> PreferencePair:
    roles = itertools.cycle(("user", "assistant"))
    messages = tuple(Message(role, text) for role, text in zip(roles, texts, strict=False))
    return PreferencePair(messages, f"good {texts}", f"bad {texts}")


def test_a_split_keeps_conversations_together():
    pairs = [
        pair
        for i in range(40)
        for pair in (
            conversation(f"Question {i}?"),
            conversation(f"question {i}? ", f"Answer {i}", "Why?"),
            conversation(f"Question {i}?", f"Answer {i}", "Why?", "Because.", "Really?"),
        )
    ]
    train, val = PreferenceDataset(pairs).split_by_prompt(0.25, seed=0)
    assert (len(train), len(val)) == (90, 30)
    assert num_leaked_pairs(train, val) == 0
    require_disjoint_prompts(train, val)


def test_prompts_of_one_conversation_cannot_be_split():
    data = PreferenceDataset([conversation("Hi"), conversation("Hi", "Hello!", "Bye")])
    with pytest.raises(DataError, match=r"at least 2 different prompts, got 1; prompts of one conversation"):
        data.split_by_prompt(0.5, seed=0)


def test_validation_prompts_that_differ_in_case_and_blanks_are_the_same():
    train, val = (PreferenceDataset([PreferencePair(text, "a", "b")]) for text in ("Why so?", " why  SO?"))
    with pytest.raises(DataError, match="1 of 1 validation prompts are also in the training data"):
        require_disjoint_prompts(train, val)


def test_conversations_in_both_splits_are_told_with_their_share(tmp_path: Path):
    early, late = PreferencePair("Hi", "a", "b"), conversation("Hi", "Hello!", "Bye")
    fresh = PreferencePair("Other?", "a", "b", label=0.0, margin=1.0)
    for train, val in (([early, fresh], [late]), ([late, fresh], [early])):
        data = TrainVal(PreferenceDataset(train), PreferenceDataset(val), "given")
        labels, margins, leak = data.notes(uses_margins=False)
        assert labels == "training: labels: 1 ones, 1 zeros, 0 between; chosen loses in 1 of 2 pairs"
        assert margins.startswith("1 training pairs have a margin, which is not used")
        assert leak.startswith("1 of 1 validation pairs (100.0%) are of conversations")
        assert len(data.notes(uses_margins=True)) == 2


def test_many_prompts_are_grouped_in_linear_time():
    prompts = [f"Question {i % 5000}?\n" * (1 + i % 3) for i in range(20_000)]
    started = time.perf_counter()
    groups = conversation_groups(prompts)
    assert len(set(groups)) == 5000
    assert time.perf_counter() - started < 60


def test_a_prompts_key_and_its_folded_identity_ignore_the_same():
    prompts = ["Why so?", " why  SO?\n", "why\nso?", "why so", "how so", (Message("user", "WHY so?"),)]
    prompts += [
        (Message("system", "Why so?"), Message("user", "b")),
        (Message("user", "Why so?"), Message("user", "b")),
        (Message("system", ""), Message("user", "why so?")),
        (Message("user", "why"), Message("user", "so?")),
    ]
    keys, ids = prompt_keys(prompts), [folded_prompt_id(prompt) for prompt in prompts]
    assert [[a == b for b in keys] for a in keys] == [[a == b for b in ids] for a in ids]
    assert len(set(ids)) == len(prompts) - 4
