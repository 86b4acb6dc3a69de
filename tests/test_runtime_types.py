"""The import hook of the tests checks functions and dataclasses that name axes, and leaves the others as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

import rm_optimizer
from rm_optimizer.core.metrics.effects import PairedScores, detectable_effect
from rm_optimizer.core.tokens.batching import PairBatch
from tests.runtime_types import CHECKED


def test_other_axes_than_annotated_are_refused():
    with pytest.raises(TypeCheckError, match="PairedScores"):
        PairedScores(np.zeros((2, 3)), np.zeros((2, 4)), ["a"] * 3).effect("nll")
    ids, pairs = torch.zeros((4, 5), dtype=torch.int64), torch.zeros(2)
    with pytest.raises(TypeCheckError, match="PairBatch"):
        PairBatch(ids, ids[:, 1:], pairs, pairs, pairs, ids[:2, 0], pairs[:, None].expand(-1, 2))


def test_functions_without_axes_are_not_wrapped():
    assert not hasattr(detectable_effect, "__wrapped__")


def test_every_module_that_names_axes_is_checked():
    root = Path(rm_optimizer.__file__).parent
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("*.py")}
    with_axes = {f"{name}." for path, name in names.items() if "from jaxtyping import" in path.read_text("utf-8")}
    assert with_axes
    assert {name for name in with_axes if not name.startswith(tuple(f"{package}." for package in CHECKED))} == set()
