"""Builders of tiny models and tokenizers from configuration, without a download and alike in every test.

`tiny_model` and `tiny_reward_model` have weights large enough that nothing a layer does is too small to be seen;
`fresh_reward_model` has those of `BradleyTerryRM.from_config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.certificate import ParityCertificate
from rm_optimizer.core.storage.model_files import read_record
from rm_optimizer.core.tokens.tokenizer import train_tokenizer
from rm_optimizer.records.codec import from_values
from rm_optimizer.schema import TrainConfig

if TYPE_CHECKING:
    from rm_optimizer.training.preparation import Run

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "How do I boil an egg? Put it in boiling water for seven minutes.",
    "Prompt: Response: Human: Assistant: System: what is the capital of France? Paris.",
    "one two three four five six seven eight nine ten",
)
_WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {**_WIDTHS, "num_key_value_heads": 2},
    "qwen2": {**_WIDTHS, "num_key_value_heads": 2},
    "gemma": {**_WIDTHS, "num_key_value_heads": 1, "head_dim": 8},
    "mistral": {**_WIDTHS, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256},
    "opt": {"hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "word_embed_proj_dim": 32},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _WIDTHS,
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_heads": 4, "n_layers": 2},
    "roberta": {**_WIDTHS, "max_position_embeddings": 258},
    "deberta-v2": {**_WIDTHS, "relative_attention": True},
    "modernbert": _WIDTHS,
}
FAMILIES = ("llama", "qwen2", "bert")
"""One encoder and two decoder families: what every claim about the model is proven on."""
NARROW = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
"""One layer of half the width, for tests of commands."""


@cache
def _trained(special: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=list(special), initial_alphabet=ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer.to_str()


def decoder_tokenizer(pad: str | None = "<pad>", chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE with `<s>` and `</s>`; `pad` may be None or `</s>`."""
    special = ("<s>", "</s>") if pad in (None, "</s>") else ("<s>", "</s>", pad)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(special)), bos_token="<s>", eos_token="</s>", pad_token=pad
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def encoder_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE that frames a text as `[CLS] text [SEP]`; `options` are further ones of its class."""
    backend = Tokenizer.from_str(_trained(("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        **options,
    )


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token for each byte, so that lengths in tokens are lengths in ASCII characters; no BOS."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *sorted(ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The tokenizer that suits a family of `DECODERS` or `ENCODERS`."""
    return encoder_tokenizer() if family in ENCODERS else decoder_tokenizer()


def tiny_architecture(family: str, **fields: Any) -> dict[str, Any]:
    """Configuration fields of a two-layer model, `model_type` among them; `fields` replace and add."""
    layers = {} if family in ("gpt2", "distilbert") else {"num_hidden_layers": 2}
    return {"model_type": family, **layers, **(DECODERS | ENCODERS)[family], **fields}


def tiny_config(family: str, **fields: Any) -> PreTrainedConfig:
    """The configuration of `transformers` for a tiny model, with the vocabulary of the family's tokenizer."""
    vocabulary = {"vocab_size": len(tiny_tokenizer(family))}
    return AutoConfig.for_model(**tiny_architecture(family, **vocabulary | fields))


def tiny_model(
    family: str, tokenizer: PreTrainedTokenizerFast | None = None, *, seed: int = 0, spare_rows: int = 0, **fields: Any
) -> PreTrainedModel:
    """A plain `transformers` classifier with one label and a head that is not small, in evaluation mode.

    Args:
        family: a key of `DECODERS` or `ENCODERS`.
        tokenizer: gives the vocabulary and the special tokens; that of the family by default.
        seed: seed of the weights.
        spare_rows: rows of the embedding beyond the vocabulary.
        fields: further fields of the configuration.
    """
    tokenizer = tokenizer or tiny_tokenizer(family)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = tiny_config(family, vocab_size=len(tokenizer) + spare_rows, num_labels=1, **ids, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    return model.eval()


def beside_world(options: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Both, without options of the synthetic world where the overrides name pairs of their own: these are refused."""
    own = any(line.startswith("data.train=") for line in overrides)
    return [*(line for line in options if not own or not line.startswith("data.synthetic")), *overrides]


def tiny_reward_model(
    family: str,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    max_length: int = 128,
    seed: int = 0,
    **fields: Any,
) -> BradleyTerryRM:
    """A reward model around `tiny_model`."""
    tokenizer = tokenizer or tiny_tokenizer(family)
    return BradleyTerryRM(
        tiny_model(family, tokenizer, seed=seed, **fields), tokenizer=tokenizer, max_length=max_length
    )


def fresh_reward_model(
    family: str,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    max_length: int = 64,
    seed: int = 0,
    fields: dict[str, Any] | None = None,
    **options: Any,
) -> BradleyTerryRM:
    """A tiny reward model with the initial weights of `BradleyTerryRM.from_config`, which takes `options`."""
    architecture = tiny_architecture(family, **(fields or {}))
    tokenizer = tokenizer or tiny_tokenizer(family)
    return BradleyTerryRM.from_config(architecture, tokenizer, max_length=max_length, seed=seed, **options)


def narrow_reward_model(
    texts: Iterable[str], *, chat_template: str | None = None, max_length: int = 64, **fields: Any
) -> BradleyTerryRM:
    """A fresh `NARROW` Llama with a tokenizer of 300 tokens trained on texts."""
    tokenizer = train_tokenizer(texts, 300)
    tokenizer.chat_template = chat_template
    return fresh_reward_model("llama", tokenizer, max_length=max_length, fields=NARROW | fields)


def stored_certificate(folder: Path) -> ParityCertificate:
    """The parity certificate of an exported model."""
    return from_values(ParityCertificate, read_record(folder)["certificate"])


def prepared_run(config: TrainConfig) -> Run:
    """The parts of a run that starts anew in its folder."""
    from rm_optimizer.training.folder.start import begin
    from rm_optimizer.training.preparation import prepare

    return prepare(config, begin(config, is_first_rank=True))
