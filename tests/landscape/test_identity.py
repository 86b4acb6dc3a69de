"""What an interrupted measurement continues on is what it began on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.landscape.operators.objective import measuring
from rm_optimizer.landscape.operators.single_pairs import identity_of, pairs_digest
from tests.landscape.worlds import EVERYTHING, PLAIN, micro_batches, pairs, reward_model


def changed(index: int, **fields: object) -> list[PreferencePair]:
    data = list(pairs())
    data[index] = replace(data[index], **fields)  # type: ignore[arg-type]
    return data


def test_the_split_and_the_layout_change_no_digest():
    model = reward_model("llama")
    whole = pairs_digest(micro_batches(model))
    assert pairs_digest(micro_batches(model, 60)) == whole
    assert pairs_digest(micro_batches(model, packed=True)) == whole


@pytest.mark.parametrize(
    "data",
    [
        changed(2, label=0.5),
        changed(2, margin=0.25),
        changed(2, weight=5),
        changed(2, prompt="the dog"),
        changed(2, chosen=pairs()[2].rejected, rejected=pairs()[2].chosen),
        list(pairs())[:-1],
    ],
    ids=["label", "margin", "weight", "prompt", "swapped", "fewer"],
)
def test_whatever_changes_the_loss_changes_the_digest(data):
    model = reward_model("bert")
    assert pairs_digest(micro_batches(model, data=data)) != pairs_digest(micro_batches(model))


def test_weights_loss_parameters_and_type_belong_to_the_identity():
    model = reward_model("bert")
    batches = micro_batches(model)

    def identity(loss=PLAIN, **options):
        with measuring(model, batches, loss, **options) as objective:
            return identity_of(objective)

    first = identity()
    others = {identity(EVERYTHING), identity(params="head"), identity(dtype=torch.float64)}
    with torch.no_grad():
        model.reward_head.weight.neg_()
    others.add(identity())
    assert len(others | {first}) == 5
    with torch.no_grad():
        model.reward_head.weight.neg_()
    assert identity() == first
