"""Rewards of token sequences in passes of a calibrated size, with a common start computed once.

Sequences that start alike make a tree. Trees that fit a pass go through it together, each branch masked from the
others; a larger one is computed start first, and its branches then read the start's keys and values, pass by pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from rm_optimizer.core.classifier.pooling import packed_logits
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.common_starts import common_starts
from rm_optimizer.core.tokens.plan import length_batches, pad_sequences, row_batches
from rm_optimizer.core.tokens.prefix_trees import PrefixTree, pack_trees, prefix_tree


def reuse_obstacle(model: BradleyTerryRM) -> str | None:
    """Why a common start cannot be computed once, in words, or None where it can."""
    obstacle = model.supports_prefix_sharing()
    if obstacle is not None:
        return obstacle
    config = model.model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is not None and window < model.max_length and _has_window_layers(config):
        return "its sliding window is shorter than its longest sequence"
    if "past_key_values" not in inspect.signature(model.model.base_model.forward).parameters:
        return "its backbone keeps no cache"
    return None


def _has_window_layers(config: object) -> bool:
    kinds = getattr(config, "layer_types", None)
    return kinds is None or "sliding_attention" in kinds


class Passes:
    """Scores token sequences with a model, on the model's device.

    Args:
        model: in evaluation mode.
        token_budget: tokens, padding included, of one pass.
        shares: compute a common start once; only where `reuse_obstacle` has none.
    """

    def __init__(self, model: BradleyTerryRM, token_budget: int, *, shares: bool) -> None:
        self.model = model
        self.token_budget = token_budget
        self.shares = shares

    @torch.inference_mode()
    def rewards(self, sequences: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
        """Raw rewards in the order of the sequences; equal sequences are computed once."""
        place: dict[bytes, int] = {}
        of = [place.setdefault(sequence.tobytes(), len(place)) for sequence in sequences]
        distinct = [np.frombuffer(data, dtype=np.int32) for data in place]
        rewards = self._distinct(distinct)
        for index in np.flatnonzero(~np.isfinite(rewards)):  # a neighbor in its pass may be at fault
            rewards[index] = self._padded([distinct[index]])[0]
        return rewards[of]

    def _distinct(self, sequences: list[NDArray[np.int32]]) -> NDArray[np.float64]:
        rewards = np.zeros(len(sequences))
        groups = common_starts(sequences) if self.shares else [[index] for index in range(len(sequences))]
        alone = [group[0] for group in groups if len(group) == 1]
        for batch in length_batches([len(sequences[i]) for i in alone], self.token_budget):
            members = [alone[i] for i in batch]
            rewards[members] = self._padded([sequences[i] for i in members])
        self._score_trees(sequences, [group for group in groups if len(group) > 1], rewards)
        return rewards

    def _score_trees(
        self, sequences: list[NDArray[np.int32]], groups: list[list[int]], rewards: NDArray[np.float64]
    ) -> None:
        trees = [prefix_tree([sequences[i] for i in group]) for group in groups]
        small = [number for number, tree in enumerate(trees) if tree.num_tokens <= self.token_budget]
        for batch in row_batches([trees[number].num_tokens for number in small], self.token_budget):
            numbers = [small[i] for i in batch]
            members = [index for number in numbers for index in groups[number]]
            rewards[members] = self._packed([trees[number] for number in numbers])
        for number in set(range(len(trees))).difference(small):
            rewards[groups[number]] = self._branches(trees[number])

    def _packed(self, trees: Sequence[PrefixTree]) -> NDArray[np.float64]:
        packed = pack_trees(trees, pad_token_id=self.model.pad_choice.token_id).to(self.model.device)
        return _numbers(packed_logits(self.model.model, packed).squeeze(-1))

    def _padded(self, sequences: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
        ids, mask = pad_sequences(sequences, self.model.pad_choice.token_id)
        return _numbers(self.model(ids.to(self.model.device), mask.to(self.model.device)))

    def _branches(self, tree: PrefixTree) -> NDArray[np.float64]:
        """Rewards of a tree's branches: its prefix in one pass, then the branches over a copy of its cache."""
        backbone, device = self.model.model.base_model, self.model.device
        cache = DynamicCache()
        prefix = torch.from_numpy(tree.prefix.astype(np.int64))[None].to(device)
        backbone(input_ids=prefix, past_key_values=cache, use_cache=True)
        rewards = np.zeros(len(tree.branches))
        for batch in length_batches([len(branch) for branch in tree.branches], self.token_budget):
            rewards[batch] = _numbers(self._continued(cache, len(tree.prefix), [tree.branches[i] for i in batch]))
        return rewards

    def _continued(
        self, cache: DynamicCache, depth: int, branches: Sequence[NDArray[np.int32]]
    ) -> Float[Tensor, " sequences"]:
        """Rewards of branches that continue `depth` cached tokens; the cache is left as it was."""
        model, device = self.model.model, self.model.device
        ids, mask = pad_sequences(branches, self.model.pad_choice.token_id)
        last = mask.sum(dim=1) - 1
        positions = depth + torch.arange(ids.shape[1]).expand_as(ids)
        attended = torch.cat([mask.new_ones(len(branches), depth), mask], dim=1)
        hidden = model.base_model(
            input_ids=ids.to(device),
            attention_mask=attended.to(device),
            position_ids=positions.to(device),
            past_key_values=_repeated(cache, len(branches)),
            use_cache=True,
        ).last_hidden_state
        rows = torch.arange(len(branches), device=device)
        rewards: Tensor = model.score(hidden[rows, last.to(device)]).squeeze(-1)
        return rewards


def _repeated(cache: DynamicCache, times: int) -> DynamicCache:
    """A cache with the same keys and values for `times` sequences; layers share the memory until they grow."""
    repeated = DynamicCache()
    for index, layer in enumerate(cache.layers):
        keys, values = (kept.expand(times, *kept.shape[1:]) for kept in (layer.keys, layer.values))
        repeated.update(keys, values, index)
    return repeated


def _numbers(rewards: Tensor) -> NDArray[np.float64]:
    numbers: NDArray[np.float64] = rewards.double().cpu().numpy()
    return numbers
