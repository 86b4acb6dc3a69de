"""The Bradley-Terry reward model: a `transformers` classifier with one label, with exact pooling and scoring."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rm_optimizer.core.classifier.attention import sharing_obstacle
from rm_optimizer.core.classifier.building import LoadOptions, build_model, compile_backbone
from rm_optimizer.core.classifier.head import RewardHead, head_name, initialize_head, install_reward_head
from rm_optimizer.core.classifier.limits import check_window, default_max_length, refuse_measured
from rm_optimizer.core.classifier.pooling import last_token_logits, own_logits, packed_logits, pools_last_token
from rm_optimizer.core.classifier.quantization import computing_dtype
from rm_optimizer.core.model.losses import bradley_terry_loss, split_rewards
from rm_optimizer.core.model.passes import SequenceScorer
from rm_optimizer.core.pairs.pair import BaseRewardModel, Prompt, require_finite
from rm_optimizer.core.rows.natural import Prompts, Texts, paired
from rm_optimizer.core.storage.certificate import ParityCertificate, require_parity
from rm_optimizer.core.storage.export import save_export
from rm_optimizer.core.storage.loading import LoadedModel, describe_model, load_model, parse_dtype, settle_input
from rm_optimizer.core.tokens.batching import AnyPairBatch, PackedPairBatch
from rm_optimizer.core.tokens.chat import ConversationRenderer, Encoding, RenderFn, belongs_to_model
from rm_optimizer.core.tokens.padding import PadChoice, choose_pad_token, num_embeddings, set_pad_token_id
from rm_optimizer.core.tokens.plan import pad_sequences, stacked
from rm_optimizer.core.tokens.prefix_trees import prefix_tree
from rm_optimizer.core.tokens.written_template import TemplateWriter
from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.records.codec import from_values, json_values


class LoadingOptions(TypedDict, total=False):
    """Options of `BradleyTerryRM` that only loading reads, as keywords."""

    attn_implementation: str
    dropout: bool
    seed: int
    revision: str | None
    trust_remote_code: bool
    dtype: str | torch.dtype | None
    quantize: bool
    input_form: str | None


class SourceOptions(LoadingOptions, total=False):
    """Options of `BradleyTerryRM` for a model that is loaded, as keywords."""

    device: str | torch.device | None
    max_length: int | None
    compile_model: bool
    render_fn: RenderFn | None
    gradient_checkpointing: bool


class BradleyTerryRM(BaseRewardModel):
    """A reward for a prompt and a response, with `P(a > b) = sigmoid(reward(a) - reward(b))` (Bradley & Terry, 1952).

    It wraps a plain `AutoModelForSequenceClassification` with one label. A decoder's reward is read at the last
    attended token, an encoder's comes from its own forward pass. The final layer computes in float32 outside autocast.

    Args:
        model_name: hub id, model folder, run or its result, Lightning `.ckpt`; or a classifier, whose final layer
            becomes a `RewardHead` and whose configuration is set to one raw reward.
        device: device to move to; None leaves the model where it is loaded.
        max_length: most tokens of a sequence, at most the model's positions; None takes the stored one, else at most
            1024 that fit the model.
        compile_model: compile the backbone at its first passes.
        tokenizer: tokenizer of a classifier; it gets a pad token that never ends a sequence, and right padding.
        render_fn: a rendering of conversations that replaces the tokenizer's chat template, required for a model that
            was trained with one.
        fresh_head_seed: seed of a new random head of a classifier; None keeps the head's weights.
        new_head: False refuses a base without a trained reward head, whose rewards would be random; None draws one
            there; True renders any source as for training.
        attn_implementation: `auto` or a kernel's name; an unavailable one falls back with one warning.
        dropout: keep the backbone's dropout in training mode.
        seed: seed of the layers that the checkpoint lacks.
        revision: hub revision.
        trust_remote_code: run modeling code that the checkpoint brings.
        dtype: type of the backbone's weights; None is float32.
        gradient_checkpointing: recompute activations in the backward pass.
        quantize: store the backbone's matrices in four bits, to train a QLoRA adapter with them; needs CUDA.
        input_form: input of a reward model of other software without a chat template: `plain`, or `pair` for its
            tokenizer's encoding of (prompt, response); None takes `plain`, with a warning.

    Attributes:
        beta: inverse temperature that the rewards were trained with, `P(a > b) = sigmoid(beta (r(a) - r(b)))`; stored
            with the model.
        has_default_length: True if `max_length` is neither the caller's nor recorded with the model.

    Raises:
        CheckpointError: if the source is missing, damaged, no trained reward model, or recorded another rendering; or
            the model has no single scalar head, or the tokenizer does not belong to it.
        ConfigError: if an option is unknown or out of range, or is not for this model.
        TypeError: if `model_name` is neither a source nor a classifier with its tokenizer.
    """

    def __init__(
        self,
        model_name: str | os.PathLike[str] | PreTrainedModel | LoadedModel,
        device: str | torch.device | None = None,
        max_length: int | None = None,
        compile_model: bool = False,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        render_fn: RenderFn | None = None,
        fresh_head_seed: int | None = None,
        new_head: bool | None = None,
        gradient_checkpointing: bool = False,
        **loading: Unpack[LoadingOptions],
    ) -> None:
        for option in loading.keys() - LoadingOptions.__annotations__.keys():
            known = ["model_name", "tokenizer", "fresh_head_seed", "new_head", *SourceOptions.__annotations__]
            raise TypeError(did_you_mean("argument of BradleyTerryRM", option, known))
        if isinstance(model_name, PreTrainedModel) and tokenizer is not None:
            if loading or gradient_checkpointing or new_head is not None:
                raise TypeError("options of loading are for a source; set them on the classifier itself")
            name = str(model_name.config.name_or_path)
            loaded = LoadedModel(model_name, tokenizer, is_head_fresh=fresh_head_seed is not None)
        elif isinstance(model_name, LoadedModel):
            name, loaded = "", model_name
        elif isinstance(model_name, str | os.PathLike):
            if tokenizer is not None or fresh_head_seed is not None:
                raise TypeError("tokenizer and fresh_head_seed are for a classifier; a source has its own, and seed")
            name = os.fspath(model_name)
            options: dict[str, Any] = {**loading, "dtype": parse_dtype(loading.get("dtype"))}
            form = options.pop("input_form", None)
            loaded = load_model(name, LoadOptions(**options, new_head=new_head is not False))
            is_trained = not new_head and not loaded.is_head_fresh
            settle_input(loaded, name, form, has_render_fn=render_fn is not None, is_trained=is_trained)
            fresh_head_seed = loading.get("seed", 0) if loaded.is_head_fresh else None
        else:
            raise TypeError(
                "model_name must be a hub id, a folder, a checkpoint, or a transformers classifier with its tokenizer, "
                f"got {type(model_name).__name__}"
            )
        super().__init__(name, device)
        recorded = loaded.identity.get("template", {}).get("max_length")
        self.has_default_length = max_length is None and recorded is None
        self._wrap(loaded, recorded if max_length is None else max_length, render_fn, fresh_head_seed)
        if not isinstance(model_name, PreTrainedModel):
            self._settle(loaded, gradient_checkpointing=gradient_checkpointing)
        if loaded.certificate is not None:
            self.require_certified(loaded.certificate, name)
        if compile_model:
            compile_backbone(self.model)
        if device is not None:
            self.to(device)

    def _wrap(
        self, loaded: LoadedModel, max_length: int | None, render_fn: RenderFn | None, fresh_head_seed: int | None
    ) -> None:
        """Give the classifier its head, and its tokenizer a pad token and the rendering."""
        model, tokenizer = loaded.model, loaded.tokenizer
        max_length = default_max_length(model.config, tokenizer) if max_length is None else max_length
        check_window(model.config, max_length)
        self.model = model
        self.tokenizer = tokenizer
        self.renderer = ConversationRenderer(tokenizer, max_length, render_fn)
        belongs_to_model(self.renderer)
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
        self.head_init = "from the checkpoint" if fresh_head_seed is None else initialize_head(head, fresh_head_seed)

    def _settle(self, loaded: LoadedModel, *, gradient_checkpointing: bool) -> None:
        """Set what the source recorded, and refuse a model whose rewards depend on their batch."""
        model = loaded.model
        if gradient_checkpointing and not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"expected a model that can recompute activations, got {type(model).__name__}, for which "
                "transformers has no gradient checkpointing; set model.gradient_checkpointing=false"
            )
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.eval()
        if loaded.identity:
            self._recall(loaded.identity)
        refuse_measured(
            type(model).__name__,
            self,
            self.reward_head,
            num_tokens=loaded.tokenizer.vocab_size,
            pad_token_id=self.pad_choice.token_id,
            dtype=computing_dtype(model),
        )

    @classmethod
    def from_pretrained(
        cls, source: str | os.PathLike[str], *, new_head: bool = False, **options: Unpack[SourceOptions]
    ) -> BradleyTerryRM:
        """Load a trained reward model, or make one from a base model for training.

        Args:
            source: hub id, model folder, run folder (its `best/`) or a run's result, or Lightning `.ckpt`.
            new_head: accept a base without a trained reward head and draw a new one, to train it.
            options: the other options of a source, as the class takes them.

        Raises:
            CheckpointError: if the source is missing, damaged, no trained reward model, or recorded another rendering.
            ConfigError: if an option is unknown or out of range, or `input_form` is given for another model.
            TypeError: if it is no source.
        """
        return cls(source, new_head=new_head, **options)

    @classmethod
    def from_config(
        cls,
        architecture: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        seed: int,
        attn_implementation: str = "auto",
        dropout: bool = False,
        render_fn: RenderFn | None = None,
        gradient_checkpointing: bool = False,
    ) -> BradleyTerryRM:
        """A reward model at its random start.

        Args:
            architecture: `model_type` and fields of its configuration; the vocabulary is the tokenizer's.
            tokenizer: tokenizer of the model.
            max_length: most tokens of a sequence.
            seed: seed of all weights.
            attn_implementation: `auto` or a kernel's name.
            dropout: keep the configuration's dropout in training mode.
            render_fn: a rendering that replaces the tokenizer's chat template.
            gradient_checkpointing: recompute activations in the backward pass.

        Raises:
            ConfigError: if the architecture or an option is unknown or does not fit.
        """
        model = build_model(architecture, tokenizer, LoadOptions(attn_implementation, dropout, seed))
        if render_fn is None:
            TemplateWriter(tokenizer).write_for_training()
        loaded = LoadedModel(model, tokenizer, is_head_fresh=True)
        return cls(
            loaded,
            max_length=max_length,
            render_fn=render_fn,
            fresh_head_seed=seed,
            gradient_checkpointing=gradient_checkpointing,
        )

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
            ValueError: if a sequence attends to nothing, or an encoder's to no first token.
        """
        logits = last_token_logits if self._reads_last_token else own_logits
        return logits(self.model, input_ids, attention_mask).squeeze(-1)

    def compute_loss(
        self,
        chosen_ids: Int[Tensor, "pairs chosen_tokens"],
        chosen_mask: Int[Tensor, "pairs chosen_tokens"],
        rejected_ids: Int[Tensor, "pairs rejected_tokens"],
        rejected_mask: Int[Tensor, "pairs rejected_tokens"],
        **loss_options: Any,
    ) -> Float[Tensor, ""]:
        """Mean Bradley-Terry loss of the pairs, both sides in one forward pass.

        Args:
            chosen_ids: token ids of the preferred responses.
            chosen_mask: their attention mask.
            rejected_ids: token ids of the other responses, in the same order.
            rejected_mask: their attention mask.
            loss_options: keywords of `losses.bradley_terry_loss`: beta, label_smoothing, margin, label, weight, ….
        """
        tokens = max(chosen_ids.shape[1], rejected_ids.shape[1])
        input_ids = stacked(chosen_ids, rejected_ids, tokens, self.pad_choice.token_id)
        attention_mask = stacked(chosen_mask, rejected_mask, tokens, 0)
        chosen, rejected = split_rewards(self(input_ids, attention_mask), "halves")
        return bradley_terry_loss(chosen, rejected, **loss_options)

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
            prompts: text or messages, one for each response; a single one is that of every response.
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
        was_training = self.training
        self.eval()
        try:
            with torch.inference_mode():
                yield
        finally:
            self.train(was_training)

    def identity(self) -> dict[str, Any]:
        """Recorded rendering, padding and head of a stored model, as JSON values."""
        template, pad_token = self.renderer.identity(), json_values(self.pad_choice)
        return {"template": template, "pad_token": pad_token, "head_init": self.head_init, "beta": self.beta}

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        probe: Sequence[tuple[Prompt, str]] | None = None,
        statistics: Mapping[str, Any] | None = None,
        beside: Sequence[Path] = (),
    ) -> ParityCertificate:
        """Write a folder that gives the same rewards in plain `transformers`, with `export.json` as the proof.

        Args:
            folder: folder of the export, which may replace an earlier export and nothing else.
            probe: prompts and responses to compare on; None takes a fixed set.
            statistics: statistics of the rewards on validation data (mean, std, …), JSON values.
            beside: files to copy into the folder.

        Raises:
            CheckpointError: if the folder cannot be written, or the reloaded model scores otherwise.
        """
        return save_export(self, Path(folder), probe=probe, statistics=statistics, beside=beside)

    def _recall(self, identity: Mapping[str, Any]) -> None:
        """Check the rendering against the recorded one, and restore the recorded head and pad token."""
        self.renderer.check_identity(identity["template"])
        self.head_init = identity["head_init"]
        self.beta = float(identity.get("beta", 1.0))
        recorded = from_values(PadChoice, identity["pad_token"])
        if recorded.token_id == self.pad_choice.token_id:
            self.pad_choice = recorded

    def require_certified(self, certificate: ParityCertificate, source: str | Path) -> None:
        """Compare with the shortest rewards of a certificate.

        Raises:
            CheckpointError: if a reward differs by more than rounding; the message names the source.
        """
        ids = [score.input_ids for score in certificate.shortest()]
        with self.inference():
            rewards = SequenceScorer(self, 1).padded(ids)
        require_parity(certificate, rewards, computing_dtype(self.model), source)


def require_bradley_terry(model: object) -> None:
    """Refuse a model without the head, tokens and rendering of a `BradleyTerryRM`, whose rewards alone are not enough.

    Raises:
        TypeError: if it is another model, a path or a name.
    """
    if not isinstance(model, BradleyTerryRM):
        raise TypeError(
            f"model must be a BradleyTerryRM, whose weights, tokens and rendering are read here, got "
            f"{type(model).__name__}; load one with BradleyTerryRM.from_pretrained(FOLDER_OR_NAME)"
        )


def checkpoint_payload(model: BradleyTerryRM) -> dict[str, Any]:
    """Payload of a `.ckpt` under `checkpoint.PAYLOAD_KEY`, from which `from_pretrained` reads the file."""
    return describe_model(model.model, model.tokenizer, model.identity())
