"""Chapters 5.2 and 5.3: a reward model of one's own, and `BradleyTerryRM` from a name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rm_optimizer import BaseRewardModel, BradleyTerryRM, CheckpointError
from tests.builders import fresh_reward_model, tiny_model

PROMPT, RESPONSES = "What is chess?", ["A game.", "Water."]


class Words(BaseRewardModel):
    """A model as the tutorial's abstract class asks for it."""

    def __init__(self, model_name: str = "words", device: str = "cpu") -> None:
        super().__init__(model_name, device)
        self.rewards = nn.Embedding(256, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (self.rewards(input_ids)[..., 0] * attention_mask).sum(1)

    def compute_loss(self, chosen_ids: Tensor, chosen_mask: Tensor, rejected_ids: Tensor, rejected_mask: Tensor) -> Any:
        margin = self(chosen_ids, chosen_mask) - self(rejected_ids, rejected_mask)
        return -nn.functional.logsigmoid(margin).mean()

    def tokenize(self, prompt: str, response: str) -> dict[str, Tensor]:
        ids = torch.tensor([list(f"Prompt: {prompt}\n\nResponse: {response}".encode())])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "best"
    model = fresh_reward_model("llama")
    model.save_pretrained(folder)
    return model, folder


def test_a_subclass_with_the_three_methods_scores_and_has_a_device():
    model = Words()
    rewards = model.score(PROMPT, RESPONSES)
    alone = [model(**model.tokenize(PROMPT, response)).item() for response in RESPONSES]
    assert rewards.tolist() == pytest.approx(alone)
    assert model.score(PROMPT, RESPONSES[0]).item() == pytest.approx(alone[0])
    assert model.score_pair(PROMPT, *RESPONSES) == pytest.approx(alone[0] - alone[1], abs=1e-6)
    assert (model.model_name, model.device) == ("words", torch.device("cpu"))


def test_the_three_methods_are_abstract():
    class Lacking(BaseRewardModel):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return attention_mask.sum(1).float()

    with pytest.raises(TypeError, match="abstract methods compute_loss, tokenize"):
        Lacking()  # type: ignore[abstract]


def test_a_model_of_a_name_has_the_rewards_of_its_folder(saved):
    model, folder = saved
    loaded = BradleyTerryRM(model_name=str(folder), device="cpu", max_length=32, compile_model=False)
    assert loaded.max_length == 32
    assert (loaded.model_name, loaded.device) == (str(folder), torch.device("cpu"))
    torch.testing.assert_close(loaded.score(PROMPT, RESPONSES), model.score(PROMPT, RESPONSES))
    torch.testing.assert_close(
        BradleyTerryRM.from_pretrained(folder).score(PROMPT, RESPONSES[1]), model.score(PROMPT, RESPONSES)[1]
    )


def test_texts_and_lists_have_one_rule(saved):
    model, _ = saved
    both = model.score(PROMPT, RESPONSES)
    assert model.score(PROMPT, RESPONSES[0]).shape == ()
    assert model.score(PROMPT, RESPONSES[0]) == model.score(PROMPT, RESPONSES[:1])[0]
    assert model.score_pair(PROMPT, *RESPONSES) == pytest.approx(float(both[0] - both[1]), abs=1e-5)
    assert model.score_pair(PROMPT, RESPONSES[0], "") == pytest.approx(
        float(both[0] - model.score(PROMPT, "")), abs=1e-5
    )
    tokens = model.tokenize(PROMPT, RESPONSES[0])
    torch.testing.assert_close(model(**tokens)[0].detach(), both[0])
    assert tokens["input_ids"].device == model.device


def test_a_base_without_a_head_is_for_training_only(tmp_path, saved):
    model, _ = saved
    tiny_model("llama").base_model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    made = BradleyTerryRM(tmp_path, max_length=64)
    assert made.head_init != "from the checkpoint"
    assert torch.isfinite(made.score(PROMPT, RESPONSES)).all()
    with pytest.raises(CheckpointError, match="new_head"):
        BradleyTerryRM.from_pretrained(tmp_path)


@pytest.mark.parametrize("wrong", [7, None, [1], nn.Linear(1, 1)], ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_model_is_one_sentence(wrong):
    with pytest.raises(TypeError, match="model_name must be a hub id, a folder, a checkpoint, or a transformers"):
        BradleyTerryRM(wrong)


def test_options_that_would_not_be_read_are_refused(saved):
    model, folder = saved
    with pytest.raises(TypeError, match="tokenizer and fresh_head_seed are for a classifier"):
        BradleyTerryRM(folder, tokenizer=model.tokenizer)
    with pytest.raises(TypeError, match="options of loading are for a source"):
        BradleyTerryRM(model.model, tokenizer=model.tokenizer, gradient_checkpointing=True)
    with pytest.raises(TypeError, match="unknown argument of BradleyTerryRM 'droput'; did you mean 'dropout'"):
        BradleyTerryRM(folder, droput=True)
