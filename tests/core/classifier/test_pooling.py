"""The decoder's reward stands at the last attended token, for every family, padding side and pad id."""

from __future__ import annotations

import pytest
import torch

from rm_optimizer.core.classifier.pooling import (
    decoder_logits,
    last_attended,
    mask_position_ids,
    own_logits,
    pools_last_token,
)
from tests.builders import DECODERS, tiny_model

LENGTHS = (3, 9, 6, 1)


def padded(side: str, pad_id: int, extra: int = 4) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 200, (length,), generator=generator) for length in LENGTHS]
    width = max(LENGTHS) + extra
    ids, mask = torch.full((len(rows), width), pad_id), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, where], mask[i, where] = row, 1
    return ids, mask, rows


def test_last_attended_finds_the_last_one_of_any_mask():
    generator = torch.Generator().manual_seed(0)
    mask = torch.randint(0, 2, (200, 7), generator=generator)
    mask[:, 3] = 1
    expected = [max(i for i, value in enumerate(row) if value) for row in mask.tolist()]
    assert last_attended(mask).tolist() == expected


def test_a_row_of_zeros_is_refused():
    with pytest.raises(ValueError, match="at least one token in every sequence"):
        last_attended(torch.tensor([[1, 1], [0, 0]]))


def test_positions_of_attended_tokens_do_not_depend_on_the_padding_side():
    for side in ("left", "right"):
        _, mask, rows = padded(side, 0)
        positions = mask_position_ids(mask)
        for i, row in enumerate(rows):
            assert positions[i][mask[i] == 1].tolist() == list(range(len(row)))


@pytest.mark.parametrize("pad_id", [2, 7], ids=["pad", "ordinary"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", DECODERS)
def test_padding_changes_no_reward(family: str, side: str, pad_id: int):
    model = tiny_model(family).double()
    assert pools_last_token(model)
    ids, mask, rows = padded(side, pad_id)
    with torch.no_grad():
        batch = decoder_logits(model, ids, mask)
        alone = torch.cat([model.score(model.base_model(row[None]).last_hidden_state[:, -1]) for row in rows])
    # Rotary angles and norms are computed in float32 inside some families, whatever the weights' type.
    torch.testing.assert_close(batch, alone, rtol=1e-5, atol=1e-5)
    assert batch.std() > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_plain_transformers_pools_one_token_early_when_the_last_token_is_the_pad_id(family: str):
    model = tiny_model(family)
    ids = torch.tensor([[0, 10, 11, 2], [0, 10, 2, 2]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    with torch.no_grad():
        ours, theirs = decoder_logits(model, ids, mask), model(ids, attention_mask=mask).logits
    assert (ours - theirs).abs().min() > 1e-3


def test_an_encoder_refuses_left_padding():
    model = tiny_model("bert")
    ids, mask, _ = padded("left", 0)
    with pytest.raises(ValueError, match="pad on the right"):
        own_logits(model, ids, mask)
    assert not pools_last_token(model)
