"""Chapter 5.4: `create_dataloader`, its batches by name, and its epochs."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from rm_optimizer import create_dataloader
from tests.builders import fresh_reward_model

ROWS = [{"prompt": f"What is {n}?", "chosen": f"{n} is a number.", "rejected": "No. " * (n + 1)} for n in range(7)]


@pytest.fixture(scope="module")
def model():
    return fresh_reward_model("llama")


def test_a_loader_of_a_file_gives_each_pair_once_an_epoch(model, tmp_path):
    pd.DataFrame(ROWS).to_parquet(path := tmp_path / "pairs.parquet")
    loader = create_dataloader(str(path), model.tokenizer, batch_size=3)
    first, second = ([index for batch in loader for index in batch["pair_index"].tolist()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert len(loader) == 3
    assert loader.renderer is model.renderer
    again = create_dataloader(str(path), model, batch_size=3)
    assert [index for batch in again for index in batch["pair_index"].tolist()] == first


@pytest.mark.parametrize("budget", [None, 60])
def test_tensors_by_name_are_the_tokens_of_each_side(model, budget):
    loader = create_dataloader(ROWS, model.tokenizer, 4, shuffle=False, micro_token_budget=budget)
    for batch in loader:
        rows = [ROWS[index] for index in batch["pair_index"].tolist()]
        for side in ("chosen", "rejected"):
            ids, mask = batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"]
            found = [tuple(row[kept.bool()].tolist()) for row, kept in zip(ids, mask, strict=True)]
            texts = model.encode([row["prompt"] for row in rows], [row[side] for row in rows])
            assert found == [encoding.ids for encoding in texts]
    with pytest.raises(KeyError, match="chosen_ids"):
        batch["chosen_ids"]


def test_the_loss_of_a_batch_is_the_tutorial_s(model):
    batch = next(iter(create_dataloader(ROWS, model.tokenizer, 7)))
    tensors = [batch[f"{s}_{n}"] for s in ("chosen", "rejected") for n in ("input_ids", "attention_mask")]
    margin = model(*tensors[:2]) - model(*tensors[2:])
    by_name = {name: each.to("cpu") for name, each in batch.items()}
    assert tuple(by_name) == batch.keys()
    assert all(torch.equal(each, batch[name]) for name, each in by_name.items())
    torch.testing.assert_close(model.compute_loss(*tensors), -torch.nn.functional.logsigmoid(margin).mean())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((ROWS, "gpt2"), "tokenizer must be a transformers tokenizer or a BradleyTerryRM, got str"),
        ((ROWS, None), "got NoneType"),
    ],
)
def test_wrong_arguments_are_one_sentence(model, given, said):
    with pytest.raises(TypeError, match=said):
        create_dataloader(*given)
    with pytest.raises(TypeError, match="batch_size must be a whole number, got str"):
        create_dataloader(ROWS, model.tokenizer, "4")
    with pytest.raises(TypeError, match="shuffel"):
        create_dataloader(ROWS, model.tokenizer, shuffel=True)
