"""One conversation has one reward: through every door, or the door says that it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.builders import fresh_reward_model
from tests.serving.doors import FAMILIES, crossings

QUICK = ("ChatML", "BERT")
SOME = [pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in FAMILIES]


# transformers' DeBERTa calls torch.jit.script when it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", SOME)
def test_every_door_gives_the_models_reward_or_refuses(family: str, tmp_path: Path):
    found = crossings(family, tmp_path)
    assert [each for each in found if each.is_wrong] == []
    refused = {(each.door, each.number) for each in found if each.refusal}
    # Nothing tells where such an answer begins: after other turns, or before the turn that it spells.
    unknown = {("/get_reward without prompts", 2), ("/get_reward without prompts", 7), ("/get_reward whole text", 7)}
    assert refused == (unknown if family == "think block" else set())
    assert all("send `prompts` with the text up to the answer" in each.refusal for each in found if each.refusal)
    assert len({round(each.expected, 4) for each in found}) >= 6  # rewards that tell conversations apart


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_exported_tokenizer_adds_nothing_to_a_text_and_is_else_as_before(family: str, tmp_path: Path):
    architecture, tokenizer = FAMILIES[family]
    model = fresh_reward_model(architecture, tokenizer(), max_length=192)
    model.save_pretrained(tmp_path / "export")
    AutoTokenizer.from_pretrained(tmp_path / "export").save_pretrained(tmp_path / "again")
    for name in ("export", "again"):
        stored = AutoTokenizer.from_pretrained(tmp_path / name)
        assert stored("How?")["input_ids"] == stored("How?", add_special_tokens=False)["input_ids"]
        assert stored.model_input_names == model.tokenizer.model_input_names
        for pair in (("How?", "So."), ("Boil an egg", "for seven minutes")):
            assert dict(stored(*pair)) == dict(model.tokenizer(*pair))
