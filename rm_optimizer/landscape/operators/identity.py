"""Identity of a loss over pairs: digest of its weights, pairs, parameters and options."""

from __future__ import annotations

from collections.abc import Sequence

from rm_optimizer.core.model.identity import weights_digest
from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.landscape.operators.objective import PairObjective
from rm_optimizer.landscape.operators.pair_gradients import single_pairs


def pairs_digest(batches: Sequence[AnyPairBatch]) -> str:
    """Digest of each pair's tokens, margin, label and weight, independent of micro-batches, padding and layout."""
    singles = (single for batch in batches for single in single_pairs(batch))
    rows = [
        [
            *(single.pair_index.tolist() + single.margin.tolist() + single.label.tolist() + single.weight.tolist()),
            *(ids[mask != 0].tolist() for ids, mask in zip(single.input_ids, single.attention_mask, strict=True)),
        ]
        for single in singles
    ]
    return digest(sorted(rows))


def identity_of(objective: PairObjective) -> str:
    """Digest of everything that the loss and its derivatives depend on."""
    loss, dtype = vars(objective.loss), str(objective.dtype)
    pairs = pairs_digest(objective.batches)
    return digest([weights_digest(objective.model), pairs, objective.subset.names, loss, dtype])
