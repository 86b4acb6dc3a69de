"""Limits within which a model's rewards do not depend on the batch: padding and number of tokens."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rm_optimizer.errors import ConfigError

KNOWN = {
    "canine": "it pools groups of characters without its mask",
    "convbert": "its convolutions read the padding",
    "fnet": "its Fourier transform mixes tokens with the padding",
    "funnel": "it pools neighboring tokens and drops the last one of the longest sequence",
    "mobilebert": "its embedding reads each token's neighbors, the padding too",
    "mra": "its attention follows the batch's length, and needs a CUDA kernel that transformers no longer has",
    "nystromformer": "its landmarks are means over the padding too",
    "reformer": "its buckets follow the batch's length, and are drawn at random",
    "xlnet": "its classifier reads the last position, which is padding",
    "yoso": "its attention is drawn at random and reads the padding",
}
"""`model_type`s whose rewards depend on their batch, and why; others are measured."""


def refuse_known(config: PretrainedConfig) -> None:
    """Refuse an architecture of `KNOWN` before its weights are read.

    Raises:
        ConfigError: saying why.
    """
    reason = KNOWN.get(config.model_type)
    if reason is not None:
        raise batch_dependence(config.model_type, reason)


def batch_dependence(name: str, reason: str) -> ConfigError:
    """The error of a model whose rewards depend on their batch."""
    return ConfigError(
        f"{name} gives a response another reward when a longer one is scored with it: {reason}; use another model, "
        "such as BERT, DeBERTa, ModernBERT or a decoder"
    )


DEFAULT_MAX_LENGTH = 1024
"""Default limit on the tokens of a sequence, if the model reads as many."""
_OFFSET_FAMILIES = (
    *("roberta", "camembert", "mpnet", "longformer", "data2vec-text", "luke"),
    *("ibert", "esm", "xmod", "lilt", "layoutlmv3", "markuplm"),
)
"""Parts of `model_type`s that count positions from after their pad id, as RoBERTa does."""


def position_window(config: PretrainedConfig) -> int | None:
    """Number of positions of the model, or None if its configuration sets no bound.

    The RoBERTa family counts positions from after its pad id; DeBERTa with relative positions alone has no bound.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None or positions <= 0 or getattr(config, "position_biased_input", True) is False:
        return None
    is_offset = any(family in config.model_type for family in _OFFSET_FAMILIES)
    return int(positions) - (int(config.pad_token_id or 0) + 1 if is_offset else 0)


def exact_length(config: PretrainedConfig) -> int | None:
    """Largest length at which rewards do not depend on other sequences of the batch, or None if there is no limit.

    Rotary embeddings of the kind `longrope` (Phi-3) use other factors for a whole batch once one of its sequences is
    longer than the original length. Sparse attention (`index_topk`, DeepSeek-V3.2) may select padding once a sequence
    has more tokens than it selects.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    lengths = [
        int(kind["original_max_position_embeddings"])
        for kind in kinds
        if kind.get("rope_type") == "longrope" and kind.get("original_max_position_embeddings")
    ]
    if getattr(text, "index_topk", None):
        lengths.append(int(text.index_topk))
    return min(lengths, default=None)


def default_max_length(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """`DEFAULT_MAX_LENGTH`, or the limit of model and tokenizer if that is less."""
    bounds = (position_window(config), exact_length(config))
    return int(min(DEFAULT_MAX_LENGTH, tokenizer.model_max_length, *(bound for bound in bounds if bound is not None)))


def check_window(config: PretrainedConfig, max_length: int) -> None:
    """Refuse sequences longer than the model's positions, or than `exact_length`.

    Raises:
        ConfigError: if `max_length` exceeds them.
    """
    window = position_window(config)
    if window is not None and max_length > window:
        raise ConfigError(f"model.max_length must be at most {window}, the positions of this model, got {max_length}")
    exact = exact_length(config)
    if exact is not None and max_length > exact:
        raise ConfigError(
            f"model.max_length must be at most {exact}, to which this model's attention is exact, got {max_length}: "
            "beyond, one long sequence changes the rewards of all that are scored with it"
        )
