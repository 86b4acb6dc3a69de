"""Local copy of a model: its rewards by a recipe, with some tensors replaced, without a second model in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from rm_optimizer.core.classifier.adapters import has_adapter
from rm_optimizer.core.classifier.head import head_name
from rm_optimizer.core.classifier.heads import token_types
from rm_optimizer.core.classifier.limits import position_window
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.adapter_files import merged_state
from rm_optimizer.core.tokens.padding import pad_sequences
from rm_optimizer.core.tokens.plan import length_batches
from rm_optimizer.errors import ConversationRefused
from rm_optimizer.explanation.probes import Conversation
from rm_optimizer.explanation.recipe import Recipe, RecipeRenderer

POSITIONS = {"last-1": -2, "last-2": -3, "first": 0, "last": -1}
"""Places of the hidden states that a faulty pooling reads, among a sequence's tokens."""
_TOKENS = 8192


class LocalCopy:
    """A reward model whose recipe, tensors and pooling can be changed for one scoring.

    Args:
        model: the model, which is never changed.
        other: model of the other side, if it is one here.

    Attributes:
        rendering: renderer of conversations by recipes.
        tensors: tensors in place of the model's own, by the names that recipes have for them.
        head: name of the final layer.
        embedding: name of the embedding's weight.
    """

    def __init__(self, model: BradleyTerryRM, other: BradleyTerryRM | None = None) -> None:
        self.model = model
        self.other = other
        self.rendering = RecipeRenderer(model.renderer, None if other is None else other.renderer)
        self.tensors: dict[str, Mapping[str, Tensor]] = {"": {}}
        self.head = f"model.{head_name(model.model)}"
        table = model.model.get_input_embeddings().weight
        self.embedding = next(name for name, value in model.named_parameters() if value is table)
        self._rewards: dict[tuple[tuple[int, ...], str, str], dict[str, float]] = {}
        self._read: dict[str, Float[np.ndarray, ...]] = {}

    def score(self, talks: Sequence[Conversation], recipe: Recipe) -> Float[np.ndarray, " sequences"]:
        """Rewards of conversations by a recipe.

        Raises:
            ConversationRefused: if the recipe renders no ids that the model can read.
        """
        rows = [self.rendering.ids(talk, recipe) for talk in talks]
        how = (recipe.weights, recipe.attention + recipe.types)
        new = sorted({row for row in rows if (row, *how) not in self._rewards})
        for batch in length_batches(list(map(len, new)), _TOKENS) if new else ():
            some = [new[place] for place in batch]
            with _attending(self.model.model, recipe.attention):
                found = self._forward(some, self.tensors[recipe.weights], recipe.types)
            self._rewards |= {(row, *how): rewards for row, rewards in zip(some, found, strict=True)}
        return np.array([self._rewards[row, *how][recipe.pool] for row in rows])

    def head_inputs(self, talks: Sequence[Conversation]) -> Float[np.ndarray, "sequences hidden"]:
        """Vectors that the final layer reads."""
        rows = [self.rendering.ids(talk, self.rendering.base) for talk in talks]
        self._forward(rows, {})
        return self._read["own"]

    def _forward(
        self, rows: Sequence[tuple[int, ...]], tensors: Mapping[str, Tensor], kind: str = ""
    ) -> list[dict[str, float]]:
        """Rewards of a batch, by the position of the hidden state that is read, with token types of a kind."""
        num_known = len(tensors.get(self.embedding, self.model.get_parameter(self.embedding)))
        window = position_window(self.model.model.config)
        if max(map(max, rows)) >= num_known or (window is not None and max(map(len, rows)) > window):
            raise ConversationRefused("the model has no embedding of a token or a position")
        ids, mask = pad_sequences(rows, self.model.pad_choice.token_id)
        read = self._read

        def keep_hidden(module: object, inputs: object, output: Any) -> None:
            read["hidden"] = _array(output[0])

        def keep_reward(module: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            read.update(own=_array(inputs[0]), reward=_array(output))

        def tell_types(module: object, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            types = token_types(ids, self.model.tokenizer.sep_token_id) * (kind == "pair")
            return inputs, options | {"token_type_ids": types.to(self.model.device)}

        backbone, head = self.model.model.base_model, self.model.reward_head
        hooks = [backbone.register_forward_hook(keep_hidden), head.register_forward_hook(keep_reward)]
        if kind:
            hooks.append(backbone.register_forward_pre_hook(tell_types, with_kwargs=True))
        try:
            with self.model.inference():
                functional_call(self.model, dict(tensors), (ids.to(self.model.device), mask.to(self.model.device)))
        finally:
            for hook in hooks:
                hook.remove()
        weight = _array(tensors.get(f"{self.head}.weight", head.weight))[0]
        bias = 0.0 if head.bias is None else float(tensors.get(f"{self.head}.bias", head.bias).detach())
        found = []
        for states, reward, row in zip(read["hidden"], read["reward"], rows, strict=True):
            at = {"mean": states[: len(row)].mean(axis=0)}
            at |= {name: states[: len(row)][max(place, -len(row))] for name, place in POSITIONS.items()}
            is_read = states.shape[-1] == len(weight)
            rewards = {name: float(vector @ weight) + bias if is_read else np.nan for name, vector in at.items()}
            found.append({"own": float(reward[0]), **rewards})
        return found


@contextmanager
def _attending(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """Another attention kernel, or a sliding window of so many positions, in the block; empty for the model's own."""
    config, kernel = model.config.get_text_config(), str(model.config._attn_implementation)
    window = getattr(config, "sliding_window", None)
    try:
        if attention.isdigit():
            config.sliding_window = int(attention)
            if "flash" in kernel:  # which reads the width from its layers
                model.set_attn_implementation("sdpa")
        elif attention:
            model.set_attn_implementation(attention)
        yield
    finally:
        if attention.isdigit():
            config.sliding_window = window
        if attention:
            model.set_attn_implementation(kernel)


def plain_state(model: BradleyTerryRM) -> Mapping[str, Tensor]:
    """Tensors of the plain classifier, with an adapter merged."""
    return merged_state(model.model) if has_adapter(model.model) else model.model.state_dict()


def _array(tensor: Tensor) -> Float[np.ndarray, ...]:
    return tensor.detach().to("cpu", torch.float64).numpy()
