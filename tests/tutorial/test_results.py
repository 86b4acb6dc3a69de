"""Every public result shows itself in a few lines, in a notebook as a table, and as a data frame."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from rm_optimizer import PUBLIC_MODULES, Diagnosis, Evaluation
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.pairwise import evaluate_pairs
from rm_optimizer.core.tokens.cache import TruncationReport
from rm_optimizer.doctor.diagnosis import Check, Status
from rm_optimizer.records.codec import JsonRecord

MANY = 20
OF_RUN = {"model": "tiny", "optimizer": "adamw", "export": "outputs/run/best", "own_metrics": {}}
"""Fields that a run's own text shows whole."""


def public_results() -> dict[str, type[JsonRecord]]:
    """Public dataclasses with JSON, by name."""
    homes = map(import_module, PUBLIC_MODULES)
    public = {name: getattr(home, name) for home in homes for name in home.__all__}
    kinds = {name: kind for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, JsonRecord)}
    return {name: kind for name, kind in kinds.items() if is_dataclass(kind)}


def large(hint: Any, depth: int = 0) -> Any:
    """A value of a type that is long wherever the type lets it be, down to some depth."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return large(next(kind for kind in inside if kind is not NoneType), depth)
    if origin is tuple:
        return tuple(large(kind, depth) for kind in ([inside[0]] * MANY if inside[-1] is Ellipsis else inside))
    if origin is list:
        return [large(inside[0], depth)] * MANY
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {f"key{number}": large(inside[1], depth + 1) for number in range(MANY if depth < 2 else 0)}
    if isinstance(hint, type) and is_dataclass(hint):
        made = hint.__new__(hint)
        for name, kind in get_type_hints(hint).items():
            if name in hint.__dataclass_fields__:
                object.__setattr__(made, name, large(kind, depth))
        return made
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    made_of = {float: 0.123456789, int: 3, bool: True, str: "a text <b>of many</b> words\n" * 50, Path: Path("runs/a")}
    return made_of.get(hint, 1.0)


RESULTS = {name: kind for name, kind in public_results().items() if name != "Explanation"}
"""All but the explanation, which is a paragraph."""


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_shows_itself_in_twelve_lines_of_a_hundred_columns(name):
    result = large(RESULTS[name])
    for field, short in OF_RUN.items() if name == "RunResult" else ():
        object.__setattr__(result, field, short)
    lines = repr(result).splitlines()
    assert lines[0].startswith(name)
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 100
    page = result._repr_html_()
    assert f"<caption>{name}</caption>" in page
    assert "<b>" not in page
    assert page.count("<tr>") == page.count("</tr>") > 0


def test_there_are_results():
    assert {"RunResult", "Diagnosis", "BestOfNCurve", "RLReadinessReport", "Evaluation"} <= set(RESULTS)
    assert len(RESULTS) >= 15


def test_a_small_record_is_one_line_that_python_reads():
    estimate = Estimate(0.5, 0.1, 20, 0.3, 0.7)
    assert eval(repr(estimate)) == estimate


def test_a_diagnosis_is_a_frame_of_its_checks():
    checks = tuple(Check(name, Status.ok, 0.0, "", "0", "It is so.", {"low": 1.0}) for name in ("padding", "batch"))
    frame = Diagnosis("m", 0, {}, {}, {}, 0.0, checks).to_pandas()
    assert frame["name"].tolist() == ["padding", "batch"]
    assert frame["details.low"].tolist() == [1.0, 1.0]


def test_an_evaluation_is_one_row_and_reads_its_file_back():
    rewards = np.random.default_rng(0).normal(size=(2, 40))
    metrics = evaluate_pairs(
        *rewards, beta=1.0, label=np.ones(40), prompt_ids=list(map(str, range(40))), num_bootstrap=20, seed=0
    )
    truncation = large(TruncationReport)
    evaluation = Evaluation(metrics, truncation, False, None, None, 0, "runs/a")
    (row,) = evaluation.to_pandas().to_dict("records")
    assert math.isclose(row["accuracy.value"], metrics.accuracy.value)
    assert row["checkpoint"] == "runs/a"
    again = Evaluation.from_json(evaluation.to_json())
    assert again.to_json() == evaluation.to_json()
    assert again.metrics.accuracy == metrics.accuracy
