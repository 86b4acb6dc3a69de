"""The Bradley-Terry reward model: a `transformers` classifier with one label, with exact pooling and scoring."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rm_optimizer.core.classifier.attention import drop_padding
from rm_optimizer.core.classifier.building import LoadOptions, build_model, compile_backbone
from rm_optimizer.core.classifier.limits import batch_dependence
from rm_optimizer.core.classifier.pooling import drop_tree_padding, pooling_head_of, set_pooling_head
from rm_optimizer.core.classifier.quantization import computing_dtype, dtype_name
from rm_optimizer.core.classifier.scoring import ClassifierRewardModel, SequenceScorer
from rm_optimizer.core.model.identity import require_rendering
from rm_optimizer.core.model.losses import bradley_terry_loss
from rm_optimizer.core.pairs.pair import Prompt
from rm_optimizer.core.storage.certificate import ParityCertificate, require_parity
from rm_optimizer.core.storage.export import save_export
from rm_optimizer.core.storage.loading import LoadedModel, load_model, parse_dtype, settle_input
from rm_optimizer.core.tokens.chat import RenderFn
from rm_optimizer.core.tokens.padding import PadChoice, pad_sequences
from rm_optimizer.core.tokens.written_template import TemplateWriter
from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.records.codec import from_values

TOLERANCE = 1e-4
"""Relative change of the head's input that counts as rounding; half types round too much for this test."""
_SHORT, _LONG = 5, 9
"""Tokens of the sequences of this test."""


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
    pooling_head: str | None


class BradleyTerryRM(ClassifierRewardModel):
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
        pooling_head: name of a registered pooling head of a decoder; None takes the stored one, else the last token.
        quantize: store the backbone's matrices in four bits, to train a QLoRA adapter with them.
        input_form: input of a reward model of other software without a chat template: `plain`, or `pair` for its
            tokenizer's encoding of (prompt, response); None takes `plain`, with a warning.

    Attributes:
        beta: inverse temperature that the rewards were trained with, `P(a > b) = sigmoid(beta (r(a) - r(b)))`; stored
            with the model.
        has_default_length: True if `max_length` is neither the caller's nor recorded with the model.
        has_new_head: True if the source had no reward head, so that its weights were drawn.

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
        pooling_head: str | None = None,
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
        recorded = loaded.identity.get("template", {}).get("max_length")
        length = recorded if max_length is None else max_length
        super().__init__(loaded.model, loaded.tokenizer, length, render_fn, fresh_head_seed)
        self.model_name = name
        self.has_default_length = max_length is None and recorded is None
        self.has_new_head = loaded.is_head_fresh
        if (stored := loaded.identity.get("pooling_head", pooling_head_of(self.model))) is not None:
            set_pooling_head(self.model, stored)  # the configuration of an adapter's base has none
        if not isinstance(model_name, PreTrainedModel):
            self._settle(loaded.identity, gradient_checkpointing=gradient_checkpointing)
        if loaded.certificate is not None:
            self.require_certified(loaded.certificate, name)
        if pooling_head is not None:
            set_pooling_head(self.model, pooling_head)
        if compile_model:
            compile_backbone(self.model)
        if device is not None:
            self.to(device)

    def _settle(self, recorded: Mapping[str, Any], *, gradient_checkpointing: bool) -> None:
        """Restore what the source recorded, and refuse a model whose rewards depend on their batch."""
        model = self.model
        if gradient_checkpointing and not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"expected a model that can recompute activations, got {type(model).__name__}, for which "
                "transformers has no gradient checkpointing; set model.gradient_checkpointing=false"
            )
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.eval()
        if recorded:
            require_rendering(self.renderer, recorded["template"])
            self.head_init = recorded["head_init"]
            self.beta = float(recorded.get("beta", 1.0))
            pad_choice = from_values(PadChoice, recorded["pad_token"])
            if pad_choice.token_id == self.pad_choice.token_id:
                self.pad_choice = pad_choice
        read = _require_batch_independence(self)
        if read is not None and not self._reads_last_token:
            drop_padding(model, read, TOLERANCE)
        elif self.supports_prefix_sharing() is None:
            drop_tree_padding(model)

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
        pooling_head: str | None = None,
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
            pooling_head: name of a registered pooling head; None reads the last token.

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
            pooling_head=pooling_head,
        )

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
        rows, pad = [*chosen_ids, *rejected_ids], self.pad_choice.token_id
        input_ids = pad_sequence(rows, batch_first=True, padding_value=pad)
        attention_mask = pad_sequence([*chosen_mask, *rejected_mask], batch_first=True)
        rewards = self(input_ids, attention_mask)
        return bradley_terry_loss(rewards[: len(chosen_ids)], rewards[len(chosen_ids) :], **loss_options)

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
            beside: further files to copy into the folder.

        Raises:
            CheckpointError: if the folder cannot be written, or the reloaded model scores otherwise.
        """
        return save_export(self, Path(folder), probe=probe, statistics=statistics, beside=beside)

    def require_certified(self, certificate: ParityCertificate, source: str | Path) -> None:
        """Compare with the shortest rewards of a certificate.

        Raises:
            CheckpointError: if a reward differs by more than rounding; the message names the source.
        """
        ids = [score.input_ids for score in certificate.shortest()]
        with self.inference():
            rewards = SequenceScorer(self, 1).padded(ids).double().cpu().numpy()
        require_parity(certificate, rewards, dtype_name(computing_dtype(self.model)), source)


def _require_batch_independence(model: BradleyTerryRM) -> Callable[[], Tensor] | None:
    """Refuse a model whose state of a sequence changes if a longer one is in its batch, with two passes of 23 tokens.

    The inputs of the head are compared, since a fresh head's rewards are all near zero. Nothing is measured in half
    types. Effects of the batch's length alone are limited by `limits.exact_length`.

    Args:
        model: the model, in evaluation mode.

    Returns:
        A function that computes the head's inputs for both sequences again; None for a half type.

    Raises:
        ConfigError: if the state changes, or the model computes no rewards from token ids.
    """
    if computing_dtype(model.model) not in (torch.float32, torch.float64):
        return None
    name, pad, num_tokens = type(model.model).__name__, model.pad_choice.token_id, model.tokenizer.vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(num_tokens, (length,), generator=generator).tolist() for length in (_SHORT, _LONG)]
    ids = [[token if token != pad else (token + 1) % num_tokens for token in row] for row in ids]

    @torch.no_grad()
    def read(count: int = len(ids)) -> Tensor:
        seen: list[Tensor] = []
        hook = model.reward_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            model(*(each.to(model.device) for each in pad_sequences(ids[:count], pad)))
        finally:
            hook.remove()
        return seen[0].flatten(1).double()

    try:
        alone, beside = read(1)[0], read()[0]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{name} computes no rewards from token ids alone ({reason}); correct its configuration or take another"
        ) from error
    beside = beside[: len(alone)]  # some heads read every token, those of the short sequence come first
    change = float((beside - alone).norm() / alone.norm().clamp(min=1e-30))
    if not change <= TOLERANCE and bool(alone.isfinite().all()):
        raise batch_dependence(name, f"padding changes what it reads of a sequence by {change:.2g} of its length")
    return read


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
