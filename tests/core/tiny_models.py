"""Builders of tiny models and tokenizers from configuration: no download, the same for every test."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "How do I boil an egg? Put it in boiling water for seven minutes.",
    "Prompt: Response: Human: Assistant: System: what is the capital of France? Paris.",
    "one two three four five six seven eight nine ten",
)
DECODERS = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gemma": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
    "mistral": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256},
    "opt": {"hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "word_embed_proj_dim": 32},
}
ENCODERS = {
    "bert": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4},
    "roberta": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 258},
    "deberta-v2": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "relative_attention": True},
    "modernbert": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
}
FAMILIES = ("llama", "qwen2", "bert")
"""One encoder and two decoder families: what every claim about the model is proven on."""


@cache
def _trained(special: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
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


def encoder_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that frames a text as `[CLS] text [SEP]`."""
    backend = Tokenizer.from_str(_trained(("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[MASK]",
    )


def tiny_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The tokenizer that suits a family of `DECODERS` or `ENCODERS`."""
    return decoder_tokenizer() if family in DECODERS else encoder_tokenizer()


def tiny_architecture(family: str) -> dict[str, Any]:
    """Configuration fields of a two-layer model, `model_type` among them."""
    layers = {} if family == "gpt2" else {"num_hidden_layers": 2}
    return {"model_type": family, **layers, **{**DECODERS, **ENCODERS}[family]}


def tiny_model(family: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A plain `transformers` classifier with one label and a head that is not small."""
    architecture = tiny_architecture(family) | fields
    config = AutoConfig.for_model(
        **architecture,
        vocab_size=len(tokenizer) + architecture.pop("spare_rows", 0),
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    return model.eval()
