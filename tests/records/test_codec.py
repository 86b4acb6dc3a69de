"""Results come back from the text that every version so far has written, and are written as the same text."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest

from rm_optimizer.core.metrics.estimate import Estimate, IntervalKind
from rm_optimizer.core.metrics.pairwise import evaluate_pairs
from rm_optimizer.core.pairs.pair import Message
from rm_optimizer.core.storage.certificate import ParityCertificate, ProbeScore
from rm_optimizer.core.tokens.audit import DataAudit, PromptOverlap, SourceAudit, SplitAudit
from rm_optimizer.core.tokens.cache import TruncationReport
from rm_optimizer.doctor.diagnosis import Check, Diagnosis, Status
from rm_optimizer.landscape.estimates.cross_fitting import CrossFit, TopOfSamples
from rm_optimizer.landscape.estimates.density import SpectralDensity
from rm_optimizer.landscape.estimates.quantities import LocalGeometry
from rm_optimizer.landscape.layers import BlockCurvature, LayerCurvature, TopEigenvalue
from rm_optimizer.landscape.series import SpectrumComparison
from rm_optimizer.landscape.spectrum import HessianSpectrum, SpectrumStatus
from rm_optimizer.landscape.surface.grid import MISSING, GridDescription, PointLoss, Slice, Surface, Trajectory
from rm_optimizer.records.codec import JsonRecord, from_values, json_values
from rm_optimizer.records.run_folder import RunIdentity
from rm_optimizer.training.folder.record import DataSummary, RunResult, RunStatus

STORED = Path(__file__).with_name("stored_results.json")
"""Text of each result, as it was written before there was a codec."""

NAN = math.nan
ESTIMATE = Estimate(0.75, 0.1, 4, low=0.5, high=1.0, kind=IntervalKind.resampled)
UNKNOWN = Estimate(NAN, None, 0)
MEASURED = GridDescription(
    method="random", names=("a", "b"), values=None, params="all", num_parameters=9, num_pairs=4, num_prompts=3, seed=0
)
POINTS = ((PointLoss(0.5, 0.1, 0.75, 0.2), MISSING), (MISSING, PointLoss(1.0, NAN, 0.0, NAN)))
SURFACE = Surface(replace(MEASURED, values=(0.5, 0.25)), (-1.0, 1.0), (0.0, 2.0), POINTS)
DENSITY = SpectralDensity((3.0,), ((0.5, 1.0), (0.25,)), ((1.0, 2.0), (4.0,)), 5, 4)
METRICS = evaluate_pairs(
    np.array([1.0, 0.0, 2.0, 0.5]),
    np.array([0.0, 1.0, 2.0, 0.0]),
    beta=1.0,
    prompt_ids=list("abcd"),
    groups={"source": ["x", "x", "y", "y"]},
    num_bootstrap=0,
    seed=0,
)
SPECTRUM = HessianSpectrum(
    eigenvalues=(2.0, -1.0),
    residuals=(0.5, NAN),
    error_bounds=(0.25, NAN),
    converged=(True, False),
    num_top=1,
    num_bottom=1,
    num_overlooked=None,
    is_exhaustive=False,
    trace=UNKNOWN,
    density=DENSITY,
    sampling=(ESTIMATE,),
    cross_fit=CrossFit((ESTIMATE,), 0.5, 2.0, (TopOfSamples(2.0, (1.0, NAN)),), 9),
    geometry=LocalGeometry(0.5, 0.0, 0.0, 0.05, NAN, NAN, 4),
    matrix="hessian",
    method="lanczos",
    params="all",
    num_parameters=9,
    num_pairs=4,
    loss=0.5,
    num_products=7,
    product="double",
    product_reason="the cheapest",
    gradients_per_product=None,
    wall_seconds=1.5,
    dtype="float64",
    seed=0,
    status=SpectrumStatus.interrupted,
)
AUDIT = SplitAudit(
    num_pairs=4,
    num_skipped=0,
    num_prompts=3,
    num_duplicates=0,
    num_contradictions=0,
    num_identical=0,
    num_truncated=1,
    num_uneven_cut=0,
    num_response_cut=1,
    chosen_tokens=(1.0, 2.0),
    rejected_tokens=(1.0, 3.0),
    longer_wins=UNKNOWN,
    num_margins=0,
    num_zero_labels=0,
    num_soft_labels=0,
    sources={"é": SourceAudit(4, 3, ESTIMATE)},
)
DATA = DataSummary(
    train_pairs=4,
    val_pairs=2,
    val_origin="given",
    train_fingerprint="a",
    val_fingerprint="b",
    skipped_rows=0,
    truncation={"train": {"max_length": 8}},
    length_baseline=0.5,
    ceiling=None,
    notes=("a note",),
)
RESULT = RunResult(
    status=RunStatus.early_stopped,
    run_dir="run",
    model="tiny",
    optimizer="adamw",
    seed=0,
    steps=4,
    best_step=2,
    monitor="val/loss",
    export="run/best",
    metrics=METRICS,
    data=DATA,
    parameters=9,
    wall_seconds=1.5,
    pairs_per_second=None,
    versions={"torch": "2"},
    machine={"cores": "2"},
    commit=None,
    config={"model": {"path": None}, "data": {"train": ["a", 1]}},
    run_id="00ff",
    extensions=({"after_step": 1, "from_steps": 2, "to_steps": 4},),
    evaluations={"seconds": 0.5},
)
CHECKS = (Check("head", Status.warn, NAN, "nats", "≤ 1", "Écrit.", {"a": 1.0, "b": "x", "c": math.inf}),)
RESULTS = {
    "estimate": ESTIMATE,
    "unknown": UNKNOWN,
    "metrics": METRICS,
    "audit": DataAudit({"train": AUDIT}, (PromptOverlap("train", "val", 1, 2, 3),)),
    "truncation": TruncationReport(8, 4, 0, 1, 0, 1, 0.25, {"0.5": 3.0}),
    "diagnosis": Diagnosis("m", 0, {"train": 4}, {"train": 4}, {"train": 2}, 1.5, CHECKS),
    "spectrum": SPECTRUM,
    "density": DENSITY,
    "comparison": SpectrumComparison((1.0, NAN), (1.0,), None, 0.5, 2, (4, 5)),
    "layers": LayerCurvature(
        (BlockCurvature("output", 9, (2.0, 0.5), None, ESTIMATE, ESTIMATE, TopEigenvalue(2.0, 0.1, True, 3)),),
        ("layer 1",),
        4,
        3,
        0,
    ),
    "slice": Slice(MEASURED, (-1.0, 1.0), POINTS),
    "surface": SURFACE,
    "trajectory": Trajectory(SURFACE, (1, 2), ((0.5, 1.0), (0.0, 0.0)), (0.5, 0.0), POINTS[0]),
    "result": RESULT,
    "identity": RunIdentity(
        run_id="00ff",
        directory="/d",
        sources={"train": [{"path": "/a", "weight": 2.0}], "val": None},
        train_fingerprint="a",
        val_fingerprint="b",
    ),
}
PROBE = (
    ProbeScore("Hi", "Hello.", (1, 2), 0.5, 0.5),
    ProbeScore((Message("user", "é"), Message("assistant", "b")), "c", (3,), 1.0, 1.0),
)
CERTIFICATE = ParityCertificate(0.0, 0.0, 1e-5, "float32", "cpu", PROBE)


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_read_from_the_text_of_earlier_versions_and_written_as_that(name):
    result, text = RESULTS[name], json.loads(STORED.read_text())[name]
    assert result.to_json() == text
    assert repr(type(result).from_json(text)) == repr(result)


def test_a_certificate_is_read_from_an_earlier_export_and_written_as_that():
    stored = json.loads(STORED.read_text())["certificate"]
    assert json.dumps(json_values(CERTIFICATE)) == stored
    assert from_values(ParityCertificate, json.loads(stored)) == CERTIFICATE


def test_results_of_earlier_versions_lack_entries_that_have_a_default():
    values = json.loads(RESULT.to_json())
    for name in ("run_id", "extensions", "evaluations"):
        del values[name]
    del values["metrics"]["longer_wins"], values["data"]["notes"]
    assert repr(RunResult.from_json(json.dumps(values))) == repr(
        replace(
            RESULT,
            run_id=None,
            extensions=(),
            evaluations=None,
            data=replace(DATA, notes=()),
            metrics=replace(METRICS, longer_wins=UNKNOWN),
        )
    )
    del values["seed"]
    with pytest.raises(TypeError, match="'seed'"):
        RunResult.from_json(json.dumps(values))

    layers = json.loads(RESULTS["layers"].to_json())
    del layers["blocks"][0]["hessian_top"]["cross_fit"]
    assert repr(LayerCurvature.from_json(json.dumps(layers))) == repr(RESULTS["layers"])


class Kind(StrEnum):
    a = "a"


@dataclass(frozen=True)
class Mixed(JsonRecord):
    path: Path | None
    kind: Kind
    number: float | None
    either: float | str | None
    nested: str | tuple[Estimate, ...]
    fixed: tuple[int, Kind]
    several: dict[str, tuple[Path, ...]]


@pytest.mark.parametrize(
    "value",
    [
        Mixed(Path("a"), Kind.a, 1.0, "x", "y", (1, Kind.a), {"p": (Path("q"),)}),
        Mixed(None, Kind.a, None, None, (ESTIMATE,), (1, Kind.a), {}),
    ],
)
def test_every_type_of_field_comes_back(value):
    assert Mixed.from_json(value.to_json()) == value


def test_a_number_that_is_not_finite_is_null():
    text = Mixed(None, Kind.a, NAN, math.inf, "", (1, Kind.a), {}).to_json()
    assert '"number": null, "either": null' in text
    assert math.isnan(from_values(Estimate, json_values(Estimate(math.inf, None, 1))).value)


def test_an_entry_of_another_type_is_refused():
    values = json.loads(RESULT.to_json())
    for wrong in ({"status": "unheard of"}, {"extensions": None}, {"versions": 3}, {"metrics": 3}, {"data": "x"}):
        with pytest.raises((ValueError, TypeError)):
            RunResult.from_json(json.dumps(values | wrong))
