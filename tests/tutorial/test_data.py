"""Chapters 5.1, 5.4 and 11.1: pairs, data sets with tokens, and data larger than memory."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from rm_optimizer import PreferenceDataset, PreferencePair, RayPreferenceDataset, register_layout
from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.inputs import PairOptions
from tests.builders import fresh_reward_model

KEYS = {"chosen_input_ids", "chosen_attention_mask", "rejected_input_ids", "rejected_attention_mask"}
ROWS = [
    {"prompt": f"What is {number}?", "chosen": f"{number} is a number.", "rejected": "I do not know."}
    for number in range(5)
]


@pytest.fixture(scope="module")
def model():
    return fresh_reward_model("llama")


def test_a_pair_and_what_it_refuses():
    pair = PreferencePair(prompt="Capital of France?", chosen="Paris.", rejected="London.", margin=0.95)
    assert (pair.to_dict()["margin"], pair.metadata) == (0.95, {})
    assert PreferencePair("a?", "b", "c").margin is None
    for wrong in ({"prompt": ""}, {"chosen": ""}, {"rejected": ""}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PreferencePair(**{"prompt": "a?", "chosen": "b", "rejected": "c", **wrong})
    with pytest.raises(FrozenInstanceError):
        pair.margin = 1.0


@pytest.mark.parametrize("form", ["path", "Path", "frame", "dataset", "table", "list", "iterator"])
def test_a_data_set_of_any_form_has_items_with_four_tensors(form, model, tmp_path):
    frame = pd.DataFrame(ROWS)
    frame.to_parquet(path := tmp_path / "pairs.parquet")
    given = {
        "path": str(path),
        "Path": path,
        "frame": frame,
        "dataset": Dataset.from_list(ROWS),
        "table": pa.Table.from_pylist(ROWS),
        "list": ROWS,
        "iterator": iter(ROWS),
    }
    data = PreferenceDataset(given[form], model.tokenizer)
    assert len(data) == 5
    item = data[2]
    assert set(item) >= KEYS
    for side, response in (("chosen", item.chosen), ("rejected", item.rejected)):
        ids, mask = item[f"{side}_input_ids"], item[f"{side}_attention_mask"]
        assert ids.shape == mask.shape == (model.max_length,)
        assert tuple(ids[mask.bool()].tolist()) == model.encode([item.prompt], [response])[0].ids


def test_items_are_pairs_stack_and_pickle(model):
    data = PreferenceDataset(ROWS, model.tokenizer, max_length=16)
    item = pickle.loads(pickle.dumps(PreferenceDataset(ROWS)[0]))
    assert item == PreferenceDataset(ROWS)[0]
    assert isinstance(data[0], PreferencePair)
    assert not isinstance(data.pairs[0], dict)
    batch = next(iter(DataLoader(data, batch_size=3)))
    assert batch["rejected_attention_mask"].shape == (3, 16)
    assert torch.equal(batch["label"], torch.ones(3))
    assert set(data[:2][0]) == set(data[0])


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ((ROWS, "gpt2"), TypeError, "tokenizer must be a transformers tokenizer or a BradleyTerryRM, got str"),
        ((ROWS, None, 16), TypeError, "max_length is for tokens, which need a tokenizer"),
        ((7,), TypeError, "data must be a list, tuple, generator, array or column, got int"),
    ],
)
def test_wrong_arguments_are_one_sentence(given, kind, said):
    with pytest.raises(kind, match=said):
        PreferenceDataset(*given)
    with pytest.raises(TypeError, match=r"unknown argument of PreferenceDataset 'colums'.*columns"):
        PreferenceDataset(ROWS, colums={"prompt": "q"})


VOTES = {
    "columns": {"prompt": "question", "response_a": "left", "response_b": "right", "winner": "vote"},
    "winner": "l,r,both",
    "label": 0.9,
}
VOTED = [{"question": "2 + 2?", "left": "4", "right": "5", "vote": side} for side in ("l", "both")]
VOTED_PAIRS = [PreferencePair("2 + 2?", "4", "5"), PreferencePair("2 + 2?", "4", "5", label=0.5)]


def test_a_registered_layout_reads_a_table_in_python_and_on_the_command_line(tmp_path):
    for _ in range(2):  # a cell of a notebook runs again
        register_layout("tutorial_votes", VOTES, rows=VOTED, pairs=VOTED_PAIRS)
    pd.DataFrame(VOTED).to_parquet(path := tmp_path / "votes.parquet")
    for data in (
        PreferenceDataset(VOTED, format="tutorial_votes"),
        PreferenceDataset({"path": path, "format": "tutorial_votes"}),
        PairOptions(format="tutorial_votes").load(str(path)),
    ):
        assert [(pair.chosen, pair.label) for pair in data] == [("4", 1.0), ("4", 0.5)]
    other = [{**row, "q": row.pop("question")} for row in map(dict, VOTED)]
    assert len(PreferenceDataset(other, format="tutorial_votes", columns={"prompt": "q"})) == 2
    with pytest.raises(ConfigError, match=r"unknown data\.format 'tutorial_vote'; did you mean 'tutorial_votes'"):
        PreferenceDataset(VOTED, format="tutorial_vote")


@pytest.mark.parametrize(
    ("name", "change", "pairs", "said"),
    [
        ("auto", {}, VOTED_PAIRS, "the layout 'auto' is registered already"),
        ("mine", {"column": {}}, VOTED_PAIRS, "unknown option of a layout 'column'; did you mean 'columns'"),
        ("mine", {}, VOTED_PAIRS[:1], "layout 'mine' must read its rows as the given pairs, but pair 2 is .*not None"),
        ("mine", {"winner": "r,l,both"}, VOTED_PAIRS, "but pair 1 is .*'chosen': '5'.*not .*'chosen': '4'"),
    ],
)
def test_a_layout_must_read_its_example(name, change, pairs, said):
    with pytest.raises(ConfigError, match=said):
        register_layout(name, VOTES | change, rows=VOTED, pairs=pairs)


@pytest.mark.slow
def test_ray_streams_one_pass_of_batches_by_name(model, tmp_path):
    pd.DataFrame(ROWS).to_parquet(path := tmp_path / "pairs.parquet")
    batches = list(RayPreferenceDataset(str(path), model.tokenizer).to_torch_dataloader(batch_size=2))
    assert [len(batch["chosen_input_ids"]) for batch in batches] == [2, 2, 1]
    assert sorted(index for batch in batches for index in batch.pair_index.tolist()) == list(range(5))
    with pytest.raises(TypeError, match="to_torch_dataloader needs a tokenizer"):
        RayPreferenceDataset(str(path)).to_torch_dataloader()
