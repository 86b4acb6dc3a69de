"""The import hook of the tests checks functions and dataclasses that name axes, and leaves the others as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from rm_optimizer.core.metrics.effects import detectable_effect, paired_effect
from rm_optimizer.core.tokens.batching import PairBatch


def test_other_axes_than_annotated_are_refused() -> None:
    with pytest.raises(TypeCheckError, match="paired_effect"):
        paired_effect(np.zeros((2, 3)), np.zeros((2, 4)), ["a"] * 3, "nll")
    ids, pairs = torch.zeros((4, 5), dtype=torch.int64), torch.zeros(2)
    with pytest.raises(TypeCheckError, match="PairBatch"):
        PairBatch(ids, ids[:, 1:], pairs, pairs, pairs, ids[:2, 0])


def test_functions_without_axes_are_not_wrapped() -> None:
    assert not hasattr(detectable_effect, "__wrapped__")
