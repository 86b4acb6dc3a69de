"""Choice and verification of prompt sharing, which computes each prompt once for both responses."""

from __future__ import annotations

import logging

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.cache import PairTokens
from rm_optimizer.errors import ConfigError
from rm_optimizer.schema.config import PrefixSharing

log = logging.getLogger("rm_optimizer")

PARITY_PAIRS = 8
"""Number of pairs on which `auto` compares the rewards with and without sharing."""
PARITY_TOLERANCE = 1e-4
"""Largest reward difference, in float32, that counts as rounding."""


def shares_prefixes(model: BradleyTerryRM, tokenized: PairTokens, mode: PrefixSharing) -> bool:
    """Decide on prefix sharing for a model and pairs.

    `auto` shares prompts if the model is a causal decoder whose attention accepts a mask, and its rewards on the first
    pairs are the same with and without sharing. Otherwise it logs in one sentence why pairs are padded instead.

    Raises:
        ConfigError: if the mode is `on` and the model does not support sharing.
    """
    if mode == PrefixSharing.off:
        return False
    obstacle = model.supports_prefix_sharing()
    if obstacle is None and mode == PrefixSharing.on:
        return True
    if mode == PrefixSharing.on:
        raise ConfigError(f"batching.prefix_sharing=on is not possible: {obstacle}; set it to auto or off")
    if obstacle is None:
        pairs = [(tokenized.chosen(i), tokenized.rejected(i)) for i in range(min(PARITY_PAIRS, len(tokenized)))]
        if not (difference := model.prefix_parity(pairs)) <= PARITY_TOLERANCE:
            obstacle = f"rewards of the first pairs would differ by {difference:.2g}"
    if obstacle is not None:
        log.info("pairs are padded in batches of like length, without prefix sharing: %s", obstacle)
    return obstacle is None
