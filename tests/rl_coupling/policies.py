"""A tiny language model on disk, with weights large enough that its texts differ."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.builders import decoder_tokenizer, tiny_config


def save_policy(folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """Save a two-layer Llama that writes text."""
    tokenizer = tokenizer or decoder_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = tiny_config("llama", bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
