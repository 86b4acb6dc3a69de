"""Numbers of a program, in whatever form, are a float64 array or one sentence; every public entrance says it alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from rm_optimizer import BestOfNCurve, CurriculumSampler, MahalanobisDetector, OveroptimizationCurve
from rm_optimizer.core.metrics.estimate import finite_array
from rm_optimizer.errors import DataError

TABLE = np.arange(12.0).reshape(3, 4)
FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "lists": np.ndarray.tolist,
    "tuples": lambda table: tuple(map(tuple, table.tolist())),
    "rows": list,
    "integers": lambda table: table.astype(np.int32),
    "frame": pd.DataFrame,
    "tensor": torch.tensor,
    "half tensor": lambda table: torch.tensor(table, dtype=torch.bfloat16),
    "tensor with a gradient": lambda table: torch.tensor(table, requires_grad=True),
    "transposed": lambda table: np.ascontiguousarray(table.T).T,
}
WRONG: dict[str, tuple[Any, str]] = {
    "ragged": ([[1.0, 2.0], [3.0]], "in each axis, got length 1 in (prompt|response) 2, but 2 in (prompt|response) 1$"),
    "ragged rows": ([np.ones(2), np.ones(3)], "got length 3 in (prompt|response) 2, but 2 in (prompt|response) 1$"),
    "a row that is a number": ([[1.0, 2.0], 3.0], "got 3.0 in (prompt|response) 2$"),
    "text": ([["1", "b"]], "must be numbers by .*, got 'b' in (prompt|response) 1, (sample|feature) 2$"),
    "a frame with text": (pd.DataFrame({"x": [1.0, 2.0], "y": [3.0, "b"]}), "got 'b' in .* 2, .* 2$"),
    "missing": ([[1.0, None], [2.0, 3.0]], "must be (finite|numbers)"),
    "nothing": (None, "must be numbers by"),
    "one row": ([1.0, 2.0], r"got the shape \(2,\)"),
    "empty": ([[]], r"got the shape \(1, 0\)"),
    "one number": (3.0, r"got the shape \(\)"),
    "NaN": ([[1.0, 2.0], [float("nan"), 3.0]], "must be finite, got nan in (prompt|response) 2, (sample|feature) 1;"),
    "infinite": ([[1.0, float("inf")]], "must be finite, got inf in (prompt|response) 1, (sample|feature) 2;"),
}
ENTRANCES: dict[str, Callable[[Any], Any]] = {
    "finite_array": lambda values: finite_array(values, "rewards", ["prompt", "sample"]),
    "BestOfNCurve.measure": BestOfNCurve.measure,
    "BestOfNCurve.measure gold": lambda values: BestOfNCurve.measure(TABLE, values),
    "OveroptimizationCurve.of_best_of_n": lambda values: OveroptimizationCurve.of_best_of_n(values, TABLE),
    "OveroptimizationCurve.of_checkpoints": lambda values: OveroptimizationCurve.of_checkpoints([0, 1], TABLE, values),
    "MahalanobisDetector": MahalanobisDetector,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_table_is_the_same_numbers(form: str):
    found = finite_array(FORMS[form](TABLE), "rewards", ["prompt", "sample"])
    assert (found.dtype, found.tolist()) == (np.float64, TABLE.tolist())
    assert str(BestOfNCurve.measure(FORMS[form](TABLE))) == str(BestOfNCurve.measure(TABLE))


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_table_of_numbers_is_one_sentence(entrance: str, wrong: str):
    values, sentence = WRONG[wrong]
    if values is None and entrance.endswith("gold"):
        pytest.skip("no gold rewards are a choice")
    with pytest.raises(DataError, match=sentence) as refused:
        ENTRANCES[entrance](values)
    assert "\n" not in str(refused.value)


def test_a_cell_of_three_axes_is_named_with_all_of_them():
    members = [[[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0]]]
    with pytest.raises(DataError, match=r"got length 1 in member 2, prompt 2, but 2 in member 2, prompt 1$"):
        finite_array(members, "rewards", ["member", "prompt", "sample"])


def test_a_curriculum_names_the_pair_without_a_margin():
    with pytest.raises(DataError, match="margins must be finite, got nan in pair 2"):
        CurriculumSampler([0.5, float("nan")], num_epochs=1)
    with pytest.raises(DataError, match=r"margins must be numbers by .pair."):
        CurriculumSampler([], num_epochs=1)
