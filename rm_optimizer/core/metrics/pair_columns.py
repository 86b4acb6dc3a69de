"""Evaluated pairs as checked columns in a fixed order, so that results do not depend on the caller's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True)
class PairColumns:
    """Float64 columns of pairs, sorted by prompt and then by value.

    Args:
        chosen: rewards of the preferred responses.
        rejected: rewards of the other responses.
        label: probability that `chosen` is the better one, in [0, 1].
        weight: number of pairs that each counts for, positive.
        length_gap: length of the preferred response less that of the other; 0 if lengths are unknown.
        cluster: index of the pair's prompt, rising from 0 without gaps.
        position: position of the caller's pair i in these columns.
    """

    chosen: Float[np.ndarray, " pairs"]
    rejected: Float[np.ndarray, " pairs"]
    label: Float[np.ndarray, " pairs"]
    weight: Float[np.ndarray, " pairs"]
    length_gap: Float[np.ndarray, " pairs"]
    cluster: Int[np.ndarray, " pairs"]
    position: Int[np.ndarray, " pairs"]

    @classmethod
    def sorted(
        cls,
        chosen: Float[np.ndarray, " pairs"],
        rejected: Float[np.ndarray, " pairs"],
        *,
        label: Float[np.ndarray, " pairs"] | None,
        weight: Float[np.ndarray, " pairs"] | None,
        length_gap: Float[np.ndarray, " pairs"] | None = None,
        prompt_ids: Sequence[str],
    ) -> PairColumns:
        """The pairs in their fixed order; missing labels and weights are 1, and missing lengths 0.

        Raises:
            ValueError: if there are no pairs, lengths differ, or a number is not finite or out of range.
        """
        ones = np.ones(chosen.shape)
        columns = {
            "chosen": chosen,
            "rejected": rejected,
            "label": ones if label is None else label,
            "weight": ones if weight is None else weight,
            "length_gap": np.zeros(chosen.shape) if length_gap is None else length_gap,
        }
        _check(columns, prompt_ids)
        chosen, rejected, label, weight, gap = (column.astype(np.float64) for column in columns.values())
        cluster = np.unique(np.array(prompt_ids, dtype=str), return_inverse=True)[1]
        order = np.lexsort((gap, weight, label, rejected, chosen, cluster))
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        chosen, rejected, label, weight, gap = (column[order] for column in (chosen, rejected, label, weight, gap))
        return cls(chosen, rejected, label, weight, gap, cluster[order], position)

    def select(self, callers: Int[np.ndarray, " selected"]) -> PairColumns:
        """The pairs with the given indices in the caller's order."""
        index = np.sort(self.position[callers])
        return PairColumns(
            chosen=self.chosen[index],
            rejected=self.rejected[index],
            label=self.label[index],
            weight=self.weight[index],
            length_gap=self.length_gap[index],
            cluster=np.unique(self.cluster[index], return_inverse=True)[1],
            position=np.argsort(np.argsort(self.position[callers])),
        )


def _check(columns: dict[str, np.ndarray], prompt_ids: Sequence[str]) -> None:
    shape = columns["chosen"].shape
    if len(shape) != 1 or shape[0] == 0:
        raise ValueError(f"chosen must have shape (pairs,) with at least one pair, got {shape}")
    for name, column in columns.items():
        if column.shape != shape:
            raise ValueError(f"{name} must have the shape of chosen, {shape}, got {column.shape}")
        if not np.isfinite(column).all():
            raise ValueError(f"{name} must be finite, got {column[~np.isfinite(column)][0]}")
    if len(prompt_ids) != shape[0]:
        raise ValueError(f"prompt_ids must name a prompt for each of {shape[0]} pairs, got {len(prompt_ids)}")
    if columns["label"].min() < 0 or columns["label"].max() > 1:
        raise ValueError(f"label must lie in [0, 1], got {columns['label'].min()} to {columns['label'].max()}")
    if columns["weight"].min() <= 0:
        raise ValueError(f"weight must be positive, got {columns['weight'].min()}")
