"""Rewards of token sequences in passes of a bounded size, with a common start computed once.

Sequences with a common start form a tree. Small trees share the rows of a pass, and each branch is masked from the
others. For a large tree the start is computed first, and the branches then use its cached keys and values, pass by
pass. Sequences without a common start are padded to batches of similar length.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rm_optimizer.core.classifier.pooling import packed_logits
from rm_optimizer.core.tokens.padding import PadChoice
from rm_optimizer.core.tokens.plan import length_batches, pad_sequences, row_batches
from rm_optimizer.core.tokens.prefix_trees import (
    TREE_TOKENS,
    PrefixTree,
    common_starts,
    pack_trees,
    prefix_tree,
    tree_groups,
)

CACHED_TOKENS = 65_536
"""Most tokens, over all branches of a pass, whose keys and values are copied from a cached start; bounds memory."""


class PassModel(Protocol):
    """Interface of a reward model for passes: its classifier, padding and device, and rewards of padded sequences."""

    @property
    def model(self) -> PreTrainedModel:
        """Classifier with one label."""

    @property
    def pad_choice(self) -> PadChoice:
        """Token that fills padded places."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence."""

    def supports_prefix_sharing(self) -> str | None:
        """Reason why a prompt cannot be computed once for several responses, or None if it can."""

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Rewards of padded sequences."""


def reuse_obstacle(model: PassModel) -> str | None:
    """Reason why the keys and values of a common start cannot be kept for its branches, or None if they can."""
    obstacle = model.supports_prefix_sharing()
    if obstacle is not None:
        return obstacle
    config = model.model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is not None and window < model.max_length and "sliding_attention" in kinds:
        return "its sliding window is shorter than its longest sequence"
    if "past_key_values" not in inspect.signature(model.model.base_model.forward).parameters:
        return "its backbone keeps no cache"
    return None


class SequenceScorer:
    """Scorer of token sequences with a model, on the model's device.

    Args:
        model: reward model in evaluation mode.
        token_budget: tokens, padding included, of one pass.

    Attributes:
        shares: True to compute a common start once.
    """

    def __init__(self, model: PassModel, token_budget: int) -> None:
        self.model = model
        self.token_budget = token_budget
        self.shares = model.supports_prefix_sharing() is None
        self._caches = reuse_obstacle(model) is None

    @torch.inference_mode()
    def rewards(
        self, sequences: Sequence[Sequence[int] | NDArray[np.int32]], groups: Sequence[Sequence[int]] | None = None
    ) -> Float[np.ndarray, " sequences"]:
        """Raw rewards in the order of the sequences; equal sequences are computed once.

        Args:
            sequences: token ids, none empty.
            groups: places of the sequences that start alike, each in one group; None finds them.
        """
        rewards = np.zeros(len(sequences))
        for places, found in self.passes(sequences, groups):
            for place, reward in zip(places, found.double().tolist(), strict=True):
                rewards[place] = reward
        return rewards

    def passes(
        self, sequences: Sequence[Sequence[int] | NDArray[np.int32]], groups: Sequence[Sequence[int]] | None = None
    ) -> Iterator[tuple[list[list[int]], Float[Tensor, " rows"]]]:
        """Compute the different sequences pass by pass, and yield each one's places in `sequences` and its reward.

        The passes depend on the set of sequences alone, not on their order. The arguments are those of `rewards`.
        """
        places: dict[bytes, list[int]] = {}
        for place, sequence in enumerate(sequences):
            places.setdefault(np.asarray(sequence, dtype=np.int32).tobytes(), []).append(place)
        keys = sorted(places)
        rows = [np.frombuffer(key, dtype=np.int32) for key in keys]
        for members, rewards in self._passes(rows, self._groups(rows, [places[key] for key in keys], groups)):
            yield [places[keys[member]] for member in members], rewards

    def _groups(
        self,
        rows: Sequence[NDArray[np.int32]],
        places: Sequence[Sequence[int]],
        groups: Sequence[Sequence[int]] | None,
    ) -> list[list[int]]:
        """Groups of rows that start alike, from groups of places."""
        if not self.shares:
            return [[row] for row in range(len(rows))]
        if groups is None:
            return common_starts(rows)
        group_of = {place: number for number, group in enumerate(groups) for place in group}
        members: dict[int, list[int]] = {}
        for row, its_places in enumerate(places):
            members.setdefault(group_of[its_places[0]], []).append(row)
        return list(members.values())

    def _passes(
        self, rows: Sequence[NDArray[np.int32]], groups: Sequence[Sequence[int]]
    ) -> Iterator[tuple[list[int], Tensor]]:
        yield from self._padded_passes(rows, [group[0] for group in groups if len(group) == 1])
        packed: list[list[int]] = []
        for group in groups:
            if len(group) > 1:
                runs = tree_groups(rows, [group], min(self.token_budget, TREE_TOKENS))
                tree = prefix_tree([rows[i] for i in group])
                if self._pays_to_cache(tree, len(runs)):
                    for batch, rewards in self._branches(tree):
                        yield [group[i] for i in batch], rewards
                else:
                    packed += runs
        trees = [prefix_tree([rows[i] for i in run]) for run in packed]
        for batch in row_batches([tree.num_tokens for tree in trees], self.token_budget):
            members = [i for number in batch for i in packed[number]]
            rewards = self.packed([trees[number] for number in batch])
            if rewards.isfinite().all():
                yield members, rewards
            else:  # a sequence that is not finite spoils its row
                yield from self._padded_passes(rows, members)

    def _padded_passes(
        self, rows: Sequence[NDArray[np.int32]], members: Sequence[int]
    ) -> Iterator[tuple[list[int], Tensor]]:
        for batch in length_batches([len(rows[i]) for i in members], self.token_budget):
            own = [members[i] for i in batch]
            yield own, self.padded([rows[i] for i in own])

    def _pays_to_cache(self, tree: PrefixTree, num_runs: int) -> bool:
        """True if a cached start is cheaper than computing the start again in each run."""
        recomputed = len(tree.prefix) * (num_runs - 1)
        return self._caches and recomputed > (TREE_TOKENS if tree.num_tokens <= self.token_budget else 0)

    def packed(self, trees: Sequence[PrefixTree]) -> Float[Tensor, " sequences"]:
        """Rewards of the trees' branches in one pass, on the CPU."""
        packed = pack_trees(trees, pad_token_id=self.model.pad_choice.token_id).to(self.model.device)
        return packed_logits(self.model.model, packed).squeeze(-1).cpu()

    def padded(self, sequences: Sequence[Sequence[int] | NDArray[np.int32]]) -> Float[Tensor, " sequences"]:
        """Rewards of the sequences in one padded pass, on the CPU."""
        ids, mask = pad_sequences(sequences, self.model.pad_choice.token_id)
        return self.model(ids.to(self.model.device), mask.to(self.model.device)).cpu()

    def _branches(self, tree: PrefixTree) -> Iterator[tuple[list[int], Tensor]]:
        """Rewards of a tree's branches: its prefix in one pass, then the branches over a copy of its cache."""
        backbone, device = self.model.model.base_model, self.model.device
        cache = DynamicCache()
        prefix = torch.from_numpy(tree.prefix.astype(np.int64))[None].to(device)
        backbone(input_ids=prefix, past_key_values=cache, use_cache=True)
        most = max(1, CACHED_TOKENS // len(tree.prefix))
        for batch in length_batches([len(branch) for branch in tree.branches], self.token_budget):
            for part in (batch[start : start + most] for start in range(0, len(batch), most)):
                yield part, self._continued(cache, len(tree.prefix), [tree.branches[i] for i in part])

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
        return rewards.cpu()


def _repeated(cache: DynamicCache, times: int) -> DynamicCache:
    """A cache with the same keys and values for `times` sequences; layers share the memory until they grow."""
    repeated = DynamicCache()
    for index, layer in enumerate(cache.layers):
        keys, values = (kept.expand(times, *kept.shape[1:]) for kept in (layer.keys, layer.values))
        repeated.update(keys, values, index)
    return repeated
