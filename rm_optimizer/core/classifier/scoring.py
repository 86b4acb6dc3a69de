"""Rewards of conversations and token sequences by a classifier, in passes of a bounded size.

Sequences with a common start form a tree. Small trees share the rows of a pass, and each branch is masked from the
others. For a large tree the start is computed first, and the branches then use its cached keys and values, pass by
pass. Sequences without a common start are padded to batches of similar length.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from rm_optimizer.core.base import BaseRewardModel
from rm_optimizer.core.classifier.head import head_name, initialize_head, install_reward_head
from rm_optimizer.core.classifier.heads import GatedHead
from rm_optimizer.core.classifier.limits import check_window, default_max_length
from rm_optimizer.core.classifier.pooling import (
    RewardHead,
    decoder_logits,
    last_attended,
    own_logits,
    packed_logits,
    pooling_head_of,
    pools_last_token,
    states_at,
)
from rm_optimizer.core.classifier.router_loss import RouterBalance
from rm_optimizer.core.classifier.tree_masks import sharing_obstacle
from rm_optimizer.core.metrics.estimate import require_finite
from rm_optimizer.core.rows.natural import Prompts, Texts, paired
from rm_optimizer.core.tokens.batching import AnyPairBatch, PackedPairBatch, need_not_wait
from rm_optimizer.core.tokens.chat import MODEL_RENDERERS, ConversationRenderer, Encoding, RenderFn
from rm_optimizer.core.tokens.padding import (
    choose_pad_token,
    num_embeddings,
    pack_trees,
    pad_sequences,
    set_pad_token_id,
)
from rm_optimizer.core.tokens.plan import length_batches, row_batches
from rm_optimizer.core.tokens.prefix_trees import (
    LEAST_SHARED,
    TREE_TOKENS,
    PrefixTree,
    common_starts,
    prefix_tree,
    shared_length,
    tree_runs,
)
from rm_optimizer.records.codec import json_values

KEPT_BYTES = 256 * 2**20
"""Most memory of the keys and values that a server keeps from call to call."""
MOST_STARTS = 256
"""Most kept starts, and most earlier sequences among which a common start is looked for."""
CACHED_TOKENS = 65_536
"""Most tokens, over all branches of a pass, whose keys and values are copied from a cached start; bounds memory."""


@contextlib.contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Training or evaluation mode of a model; the earlier mode is restored after the block."""
    was_training = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(was_training)


class ClassifierRewardModel(BaseRewardModel):
    """Rewards of conversations and token sequences by a `transformers` classifier with one label.

    A decoder's reward is read at the last attended token, an encoder's comes from its own forward pass. The final layer
    computes in float32 outside autocast.

    Args:
        model: classifier, whose final layer becomes a `RewardHead` and whose configuration is set to one raw reward.
        tokenizer: its tokenizer, which gets a pad token that never ends a sequence, and right padding.
        max_length: most tokens of a sequence; None is at most 1024 that fit the model.
        render_fn: a rendering of conversations that replaces the tokenizer's chat template.
        fresh_head_seed: seed of a new random head; None keeps the head's weights.

    Raises:
        CheckpointError: if the model has no single scalar head, or the tokenizer does not belong to it.
        ConfigError: if `max_length` exceeds what the model reads exactly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None,
        render_fn: RenderFn | None,
        fresh_head_seed: int | None,
    ) -> None:
        super().__init__()
        max_length = default_max_length(model.config, tokenizer) if max_length is None else max_length
        check_window(model.config, max_length)
        self.model = model
        self.tokenizer = tokenizer
        self.renderer = ConversationRenderer(tokenizer, max_length, render_fn)
        MODEL_RENDERERS[id(tokenizer)] = self.renderer
        # The responses end in different tokens, a letter and a question mark: one last id means that the rendering ends
        # every sequence with a fixed token, two that a sequence ends with the response's own last token.
        last_ids = {encoding.ids[-1] for encoding in self.renderer.encode_batch(["a", "a"], ["b", "9?"])}
        ends_freely = len(last_ids) > 1
        self.pad_choice = choose_pad_token(tokenizer, num_embeddings(model), last_ids, ends_freely=ends_freely)
        self.renderer.refuse_tokens_from(num_embeddings(model))
        set_pad_token_id(model, self.pad_choice.token_id)
        model.config.num_labels = 1
        model.config.problem_type = "regression"
        model.config.id2label, model.config.label2id = {0: "reward"}, {"reward": 0}
        self._reads_last_token = pools_last_token(model)
        head = install_reward_head(model)
        self.beta = 1.0
        self.router_balance: RouterBalance | None = None
        self.head_init = "from the checkpoint" if fresh_head_seed is None else initialize_head(head, fresh_head_seed)

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence."""
        return self.renderer.max_length

    @property
    def reward_head(self) -> RewardHead:
        """The final linear layer."""
        head: RewardHead = self.model.get_submodule(head_name(self.model))
        return head

    def head_parameter_names(self) -> list[str]:
        """Names of the final layer's parameters, as `named_parameters` of this module gives them."""
        name = head_name(self.model)
        return [f"model.{name}.{key}" for key, _ in self.reward_head.named_parameters()]

    def forward(
        self, input_ids: Int[Tensor, "sequences tokens"], attention_mask: Int[Tensor, "sequences tokens"]
    ) -> Float[Tensor, " sequences"]:
        """Rewards in float32 (float64 where the weights are).

        Args:
            input_ids: token ids; decoders take padding on either side, encoders on the right.
            attention_mask: 1 for tokens, 0 for padding.

        Raises:
            ValueError: if a sequence attends to nothing, or an encoder's to no first token; on an accelerator, a
                decoder gives NaN for the former.
        """
        logits = decoder_logits if self._reads_last_token else own_logits
        return logits(self.model, input_ids, attention_mask).squeeze(-1)

    def tokenize(self, prompts: Prompts, responses: Texts) -> dict[str, Int[Tensor, "sequences tokens"]]:
        """`input_ids` and `attention_mask` of the conversations on the model's device, padded on the right.

        Raises:
            ValueError: if there are not as many prompts as responses.
        """
        ids = [encoding.ids for encoding in self.encode(prompts, responses)]
        input_ids, attention_mask = pad_sequences(ids, self.pad_choice.token_id)
        return {"input_ids": input_ids.to(self.device), "attention_mask": attention_mask.to(self.device)}

    def score(self, prompts: Prompts, responses: Texts, *, token_budget: int = 16384) -> Float[Tensor, "*sequences"]:
        """Rewards of the responses on the CPU, in the order given; one number for a text.

        A reward does not depend on the other responses. If the model allows it, a prompt with several responses is
        computed once.

        Args:
            prompts: text or messages, one for each response; a single one belongs to every response.
            responses: the responses, or the text of a single one.
            token_budget: tokens, padding included, of one forward pass.

        Raises:
            CheckpointError: if a reward is not finite.
            ValueError: if there are not as many prompts as responses.
        """
        rewards = self.score_encoded(self.encode(prompts, responses), token_budget=token_budget)
        require_finite(rewards.tolist(), lambda index: f"response {index + 1}")
        return rewards[0] if isinstance(responses, str) else rewards

    def encode(self, prompts: Prompts, responses: Texts) -> list[Encoding]:
        """Token ids of the conversations, with the numbers of cut tokens.

        Raises:
            ValueError: if there are not as many prompts as responses.
        """
        return self.renderer.encode_batch(*paired(prompts, responses))

    def score_encoded(self, encodings: Sequence[Encoding], *, token_budget: int = 16384) -> Float[Tensor, " sequences"]:
        """`score` of conversations that `encode` has encoded; a reward may be NaN, see `require_finite`.

        Args:
            encodings: token ids as `encode` returns them.
            token_budget: tokens, padding included, of one forward pass.
        """
        with self.inference():
            rewards = SequenceScorer(self, token_budget).rewards([encoding.ids for encoding in encodings])
        return torch.from_numpy(rewards).to(self.reward_head.weight.dtype)

    def rewards_of(self, batch: AnyPairBatch) -> Float[Tensor, " sequences"]:
        """Rewards of a micro-batch of pairs on the model's device, interleaved; `batch.split` separates them."""
        if isinstance(batch, PackedPairBatch):
            return packed_logits(self.model, batch.trees).squeeze(-1)
        rewards: Tensor = self(batch.input_ids, batch.attention_mask)
        return rewards

    def supports_prefix_sharing(self) -> str | None:
        """Reason why the model cannot compute a prompt once for several responses; None if it can."""
        if not self._reads_last_token:
            return f"{type(self.model).__name__} is not a causal decoder: a token's state depends on those after it"
        if self.router_balance is not None:
            return "the balancing loss of its experts counts the tokens of both sequences"
        if (name := pooling_head_of(self.model)) is not None:
            return f"its pooling head '{name}' may read more than the last token"
        if isinstance(self.model.score, GatedHead):
            return "its head reads the end of the prompt too"
        return sharing_obstacle(self.model)

    def prefix_parity(self, groups: Sequence[Sequence[NDArray[np.int32]]]) -> float:
        """Largest difference between rewards with shared prompts and rewards of single sequences.

        Args:
            groups: token ids, each group a tree; for pairs, a chosen and a rejected sequence.
        """
        apart, scorer = [sequence for group in groups for sequence in group], SequenceScorer(self, 1)
        with self.inference():
            packed = scorer.packed([prefix_tree(group) for group in groups])
            return float((packed - scorer.padded(apart)).abs().max())

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Evaluation mode without gradients; the earlier mode is restored after the block."""
        with in_mode(self, training=False), torch.inference_mode():
            yield

    def identity(self) -> dict[str, Any]:
        """Recorded rendering, padding and head of a stored model, as JSON values."""
        template, pad_token = self.renderer.identity(), json_values(self.pad_choice)
        identity = {"template": template, "pad_token": pad_token, "head_init": self.head_init, "beta": self.beta}
        name = pooling_head_of(self.model)
        return identity if name is None else {**identity, "pooling_head": name}


def reuse_obstacle(model: ClassifierRewardModel) -> str | None:
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


class PromptCache:
    """Keys and values of starts that sequences of different calls have in common, for one state of the weights.

    A start is computed and kept when a second sequence has it. Beyond `most_bytes` the least recently used one goes.

    Args:
        most_bytes: most bytes of keys and values.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self.most_bytes = most_bytes
        self.clear()

    def clear(self) -> None:
        """Forget everything, since the weights change."""
        self._seen: deque[NDArray[np.int32]] = deque(maxlen=MOST_STARTS)
        self._kept: list[tuple[NDArray[np.int32], DynamicCache]] = []  # most recently used last

    def start(
        self, prefix: NDArray[np.int32], compute: Callable[[NDArray[np.int32]], DynamicCache]
    ) -> tuple[int, DynamicCache] | None:
        """Length of the longest known start of a prefix, and keys and values of at least as many tokens.

        Args:
            prefix: token ids that the branches of a tree have in common.
            compute: keys and values of a start.
        """
        if len(prefix) < LEAST_SHARED:
            return None
        depth, place = max(((shared_length(ids, prefix), i) for i, (ids, _) in enumerate(self._kept)), default=(0, 0))
        seen = max((shared_length(ids, prefix) for ids in self._seen), default=0)
        self._seen.append(prefix)
        if seen >= depth + LEAST_SHARED:
            found = compute(prefix[:seen])
            self._kept.append((prefix[:seen], found))
            while len(self._kept) > MOST_STARTS or sum(map(_bytes, self._kept)) > self.most_bytes:
                del self._kept[0]
            return seen, found
        if depth < LEAST_SHARED:
            return None
        self._kept.append(self._kept.pop(place))
        return depth, self._kept[-1][1]


def _bytes(kept: tuple[NDArray[np.int32], DynamicCache]) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in kept[1].layers)


class SequenceScorer:
    """Scorer of token sequences with a model, on the model's device.

    Args:
        model: reward model in evaluation mode.
        token_budget: tokens, padding included, of one pass.
        tree_budget: tokens, padding included, of one pass over trees; None is `token_budget`.
        prompts: starts that are kept from call to call, cleared whenever the weights change; None keeps none.

    Attributes:
        shares: True to compute a common start once.
    """

    def __init__(
        self,
        model: ClassifierRewardModel,
        token_budget: int,
        tree_budget: int | None = None,
        prompts: PromptCache | None = None,
    ) -> None:
        self.model = model
        self.token_budget = token_budget
        self.tree_budget = token_budget if tree_budget is None else tree_budget
        self.shares = model.supports_prefix_sharing() is None
        self._caches = reuse_obstacle(model) is None
        self._prompts = prompts if self._caches else None

    @torch.inference_mode()
    def rewards(self, sequences: Sequence[Sequence[int] | NDArray[np.int32]]) -> Float[np.ndarray, " sequences"]:
        """Raw rewards in the order of the sequences; equal sequences are computed once.

        Args:
            sequences: token ids, none empty.
        """
        rewards = np.zeros(len(sequences))
        for places, found in self.passes(sequences):
            for place, reward in zip(places, found.double().tolist(), strict=True):
                rewards[place] = reward
        return rewards

    def passes(
        self, sequences: Sequence[Sequence[int] | NDArray[np.int32]]
    ) -> Iterator[tuple[list[list[int]], Float[Tensor, " rows"]]]:
        """Compute the different sequences pass by pass, and yield each one's places in `sequences` and its reward.

        The passes depend on the set of sequences alone, not on their order.
        """
        places: dict[bytes, list[int]] = {}
        for place, sequence in enumerate(sequences):
            places.setdefault(np.asarray(sequence, dtype=np.int32).tobytes(), []).append(place)
        keys = sorted(places)
        rows = [np.frombuffer(key, dtype=np.int32) for key in keys]
        groups = common_starts(rows) if self.shares else [[row] for row in range(len(rows))]
        for members, rewards in self._passes(rows, groups):
            yield [places[keys[member]] for member in members], rewards

    def _passes(
        self, rows: Sequence[NDArray[np.int32]], groups: Sequence[Sequence[int]]
    ) -> Iterator[tuple[list[int], Tensor]]:
        singles: list[int] = []
        packed: list[list[int]] = []
        for group in groups:
            if len(group) == 1 and self._prompts is None:
                singles += group
                continue
            tree = prefix_tree([rows[i] for i in group])
            if self._prompts is not None:
                depth, cache = self._prompts.start(tree.prefix, self._cache_of) or (0, None)
                # The rest of the prefix is computed for each branch.
                if cache is not None and (len(tree.prefix) - depth) * (len(group) - 1) < depth:
                    branches = tuple(np.concatenate([tree.prefix[depth:], branch]) for branch in tree.branches)
                    yield from self._branches(group, PrefixTree(tree.prefix[:depth], branches), cache)
                    continue
            if len(group) == 1:
                singles += group
                continue
            runs = tree_runs(rows, group, min(self.tree_budget, TREE_TOKENS))
            # A cached start must cost less than computing the start again in each run.
            recomputed, least = len(tree.prefix) * (len(runs) - 1), TREE_TOKENS
            if self._caches and recomputed > (least if tree.num_tokens <= self.tree_budget else 0):
                yield from self._branches(group, tree, self._cache_of(tree.prefix))
            else:
                packed += runs
        yield from self._padded_passes(rows, singles)
        trees = [prefix_tree([rows[i] for i in run]) for run in packed]
        for batch in row_batches([tree.num_tokens for tree in trees], self.tree_budget):
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

    def packed(self, trees: Sequence[PrefixTree]) -> Float[Tensor, " sequences"]:
        """Rewards of the trees' branches in one pass, on the CPU."""
        packed = pack_trees(trees, pad_token_id=self.model.pad_choice.token_id)
        packed = packed.to(self.model.device, non_blocking=need_not_wait(self.model.device))
        return packed_logits(self.model.model, packed).squeeze(-1).cpu()

    def padded(self, sequences: Sequence[Sequence[int] | NDArray[np.int32]]) -> Float[Tensor, " sequences"]:
        """Rewards of the sequences in one padded pass, on the CPU."""
        ids, mask = pad_sequences(sequences, self.model.pad_choice.token_id)
        device = self.model.device
        rewards: Tensor = self.model(*(each.to(device, non_blocking=need_not_wait(device)) for each in (ids, mask)))
        return rewards.cpu()

    def _cache_of(self, start: NDArray[np.int32]) -> DynamicCache:
        """Keys and values of a start, computed in one pass."""
        cache = DynamicCache()
        ids = torch.from_numpy(start.astype(np.int64))[None].to(self.model.device)
        columns = torch.zeros_like(ids[:, :1])
        states_at(self.model.model, columns, input_ids=ids, past_key_values=cache, use_cache=True)
        return cache

    def _branches(
        self, members: Sequence[int], tree: PrefixTree, cache: DynamicCache
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Members of a group and rewards of their branches, over copies of the prefix's keys and values.

        Those may have more tokens.
        """
        model, device, depth = self.model.model, self.model.device, len(tree.prefix)
        most = max(1, CACHED_TOKENS // depth)
        batches = length_batches([len(branch) for branch in tree.branches], self.token_budget)
        for part in (batch[start : start + most] for batch in batches for start in range(0, len(batch), most)):
            ids, mask = pad_sequences([tree.branches[i] for i in part], self.model.pad_choice.token_id)
            positions = depth + torch.arange(ids.shape[1]).expand_as(ids)
            attended = torch.cat([mask.new_ones(len(part), depth), mask], dim=1)
            repeated = DynamicCache()
            for index, layer in enumerate(cache.layers):  # the copies share the memory until they grow
                kept = (each[:, :, :depth].expand(len(part), -1, -1, -1) for each in (layer.keys, layer.values))
                repeated.update(*kept, index)
            states = states_at(
                model,
                last_attended(mask)[:, None].to(device),
                input_ids=ids.to(device),
                attention_mask=attended.to(device),
                position_ids=positions.to(device),
                past_key_values=repeated,
                use_cache=True,
            )
            yield [members[i] for i in part], model.score(states[:, 0]).squeeze(-1).cpu()
