"""How many tokens a model can read."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rm_optimizer.errors import ConfigError

DEFAULT_MAX_LENGTH = 1024
"""Tokens kept where nobody says otherwise and the model reads as many."""
_OFFSET_FAMILIES = ("roberta", "camembert", "mpnet")


def position_window(config: PretrainedConfig) -> int | None:
    """Positions the model was built for, or None where its configuration sets no bound.

    The RoBERTa family counts positions from after its pad id; DeBERTa with relative positions alone has no bound.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None or positions <= 0 or getattr(config, "position_biased_input", True) is False:
        return None
    is_offset = any(family in config.model_type for family in _OFFSET_FAMILIES)
    return int(positions) - (int(config.pad_token_id or 0) + 1 if is_offset else 0)


def default_max_length(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """`DEFAULT_MAX_LENGTH`, or what model and tokenizer allow where that is less."""
    limits = (DEFAULT_MAX_LENGTH, tokenizer.model_max_length, position_window(config) or DEFAULT_MAX_LENGTH)
    return int(min(limits))


def check_window(config: PretrainedConfig, max_length: int) -> None:
    """Refuse sequences longer than the model's positions.

    Raises:
        ConfigError: if `max_length` exceeds them.
    """
    window = position_window(config)
    if window is not None and max_length > window:
        raise ConfigError(f"model.max_length must be at most {window}, the positions of this model, got {max_length}")
