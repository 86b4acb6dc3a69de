"""Grids of losses: right at every point, the same however they are computed, and the model as it was."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rm_optimizer.errors import DataError
from rm_optimizer.evaluation.draws import draw_pairs
from rm_optimizer.landscape.analysis import measure_around
from rm_optimizer.landscape.analysis_context import AnalysisContext
from rm_optimizer.landscape.surface.directions import Directions, filter_normalized
from rm_optimizer.landscape.surface.grid import (
    GridDescription,
    GridLedger,
    PointLoss,
    Slice,
    Surface,
    Trajectory,
    _clustered_mean,
    in_rows,
    measure_grid,
    plane_grid,
    trajectory_grid,
)
from rm_optimizer.records.files import write_rows
from rm_optimizer.records.ledger import open_ledger
from rm_optimizer.schema.landscape import AnalysisType, DirectionKind, LandscapeConfig
from tests.landscape.worlds import FOUR_PROMPTS, tiny_measured_loss


def assert_same(points: dict[int, PointLoss], others: dict[int, PointLoss]) -> None:
    """But for the last bits, which follow where in memory a matrix lies."""
    assert points.keys() == others.keys()
    for place, point in points.items():
        assert asdict(point) == pytest.approx(asdict(others[place]), rel=1e-12)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def measured_loss(cache):
    return tiny_measured_loss(cache)


def losses(ledger: GridLedger) -> list[float]:
    return [ledger.points[index].loss for index in sorted(ledger.points)]


@contextmanager
def grid_ledger(path: Path, identity: str, num_points: int) -> Iterator[GridLedger]:
    with open_ledger(path, identity, other="other weights", num_wanted=num_points) as ledger:
        yield GridLedger(ledger)


def points_in(path: Path, identity: str, num_points: int) -> dict[int, PointLoss]:
    with grid_ledger(path, identity, num_points) as ledger:
        return ledger.points


def measured_grid(measured_loss, directions: Directions, points, **options) -> GridLedger:
    with TemporaryDirectory() as folder, grid_ledger(Path(folder) / "p.jsonl", "any", len(points)) as ledger:
        measure_grid(measured_loss, directions, points, ledger, **options)
    return ledger


def random_directions(measured_loss, count: int) -> Directions:
    with measured_loss.measuring() as objective:
        return filter_normalized(objective.model, objective.subset, count, seed=0)


def test_weights_modes_and_gradients_are_as_before_bit_for_bit(measured_loss):
    model = measured_loss.model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measured_grid(measured_loss, random_directions(measured_loss, 1), [(0.5,), (1e30,)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    model.eval()


def test_the_split_into_micro_batches_changes_no_point(cache, measured_loss):
    directions = random_directions(measured_loss, 1)
    points = [(0.0,), (0.7,)]
    whole = losses(measured_grid(tiny_measured_loss(cache, token_budget=10_000), directions, points))
    assert losses(measured_grid(measured_loss, directions, points)) == pytest.approx(whole, rel=1e-12)


@pytest.mark.slow
def test_two_processes_find_what_one_finds(measured_loss):
    directions = random_directions(measured_loss, 2)
    points = plane_grid((-1.0, 0.0, 1.0), (0.0, 0.5))
    before = {name: tensor.clone() for name, tensor in measured_loss.model.state_dict().items()}
    serial, parallel = (measured_grid(measured_loss, directions, points, processes=n) for n in (1, 2))
    assert_same(parallel.points, serial.points)
    assert all(torch.equal(tensor, before[name]) for name, tensor in measured_loss.model.state_dict().items())


def test_an_interrupted_grid_goes_on_and_ends_the_same(measured_loss, tmp_path):
    directions = random_directions(measured_loss, 1)
    points = [(float(i),) for i in range(5)]
    whole = measured_grid(measured_loss, directions, points)
    path, measured = tmp_path / "points.jsonl", []

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), grid_ledger(path, "x", 5) as ledger:
        measure_grid(measured_loss, directions, points, ledger, on_point=stop)
    with path.open("a") as file:
        file.write('{"index": 2, "po')  # killed while writing
    with grid_ledger(path, "x", 5) as ledger:
        assert sorted(ledger.points) == [0, 1]
        measure_grid(measured_loss, directions, points, ledger, on_point=lambda done, total: measured.append(done))
    assert measured == [2, 3, 4, 5]
    assert_same(points_in(path, "x", 5), whole.points)


def test_other_options_start_a_finished_analysis_anew_and_refuse_to_mix_with_an_unfinished_one(measured_loss, tmp_path):
    def lines(num_points: int, on_progress=lambda *of: None):
        config = LandscapeConfig(type=AnalysisType.slices, num_points=num_points, num_directions=1)
        return measure_around(AnalysisContext(measured_loss, config, tmp_path, on_progress))

    def stop(what: str, done: int, total: int | None, remark: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    first = lines(3).result
    assert lines(5, stop).result.num_missing == 4
    directions = (tmp_path / "directions.pt").read_bytes()
    with pytest.raises(DataError, match="holds a measurement"):
        lines(3)
    assert (tmp_path / "directions.pt").read_bytes() == directions
    again = lines(5).result
    losses = [[point.loss for point in line] for line in (again.points[0][::2], first.points[0])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_more_products_give_other_eigenvectors(measured_loss, tmp_path):
    names = []
    for most in (2, 3):
        options = {"directions": DirectionKind.eigenvectors, "max_products": most}
        names.append(
            measure_around(context(measured_loss, tmp_path, AnalysisType.slices, **options)).result.measured.names
        )
    assert names[0] != names[1]


def context(measured_loss, folder, kind: AnalysisType, **options) -> AnalysisContext:
    return AnalysisContext(measured_loss, LandscapeConfig(type=kind, num_points=3, num_directions=2, **options), folder)


def test_a_stopped_analysis_says_so_and_the_same_one_completes_it(measured_loss, tmp_path):
    whole = measure_around(context(measured_loss, tmp_path / "whole", AnalysisType.surface)).result

    def stop(what: str, done: int, total: int | None, remark: str) -> None:
        if done == 4:
            raise KeyboardInterrupt

    config = LandscapeConfig(type=AnalysisType.surface, num_points=3)
    stopped = measure_around(AnalysisContext(measured_loss, config, tmp_path / "half", stop))
    assert stopped.is_partial
    assert stopped.result.num_missing == 5
    again = measure_around(AnalysisContext(measured_loss, config, tmp_path / "half"))
    assert (again.is_partial, again.result) == (False, whole)


def test_slices_along_eigenvectors_reach_where_the_parabola_has_risen_by_one(measured_loss, tmp_path):
    found = measure_around(
        context(measured_loss, tmp_path, AnalysisType.slices, directions=DirectionKind.eigenvectors)
    ).result
    top = max(abs(value) for value in found.measured.values)
    assert 0.5 * top * found.steps[-1] ** 2 == pytest.approx(1.0)
    assert found.steps[1] == 0.0


def test_errors_are_those_of_prompts_not_of_pairs():
    values, weight = np.array([1.0, 1.0, 3.0, 3.0]), np.ones(4)
    mean, error = _clustered_mean(values, weight, np.array([0, 0, 1, 1]))
    assert (mean, error) == (2.0, pytest.approx(1.0))  # of two numbers, 1 and 3: deviation sqrt 2 over sqrt 2
    assert math.isnan(_clustered_mean(values, weight, np.zeros(4, dtype=np.int64))[1])
    alone = _clustered_mean(values, weight, np.arange(4))
    assert alone == (2.0, pytest.approx(values.std(ddof=1) / 2))


def test_one_pair_is_refused(cache, measured_loss):
    with pytest.raises(DataError, match="at least 2 pairs, got 1"):
        draw_pairs(measured_loss.model, FOUR_PROMPTS[:1], 8, 0, token_budget=64)


POINT, NONE = PointLoss(0.5, 0.1, 0.75, 0.05), PointLoss(math.nan, math.nan, math.nan, math.nan)
MEASURED = GridDescription(
    method="any", names=("a", "b"), values=None, params="head", num_parameters=3, num_pairs=8, num_prompts=4, seed=0
)
SURFACE = Surface(MEASURED, (0.0, 1.0), (0.0, 2.0), ((POINT, POINT), (POINT, POINT)))


@pytest.mark.parametrize(
    "result",
    [
        Slice(MEASURED, (0.0, 1.0), ((POINT, POINT), (POINT, POINT))),
        SURFACE,
        Trajectory(SURFACE, (1, 2), ((0.0, 1.0), (0.0, 0.0)), (0.1, 0.0), (POINT, POINT)),
    ],
    ids=lambda result: type(result).__name__,
)
def test_results_survive_json(result):
    assert type(result).from_json(result.to_json()) == result


def test_what_was_not_measured_is_null_and_counted():
    surface = Surface(MEASURED, (0.0, 1.0), (0.0,), ((POINT, NONE),))
    assert json.loads(surface.to_json())["points"][0][1]["loss"] is None
    assert Surface.from_json(surface.to_json()).num_missing == surface.num_missing == 1


def test_parquet_holds_a_row_a_point(tmp_path):
    rows = pq.read_table(write_rows(tmp_path / "surface.parquet", [*SURFACE.rows()])).to_pylist()
    assert [(row["x"], row["y"], row["loss"]) for row in rows] == [(0, 0, 0.5), (1, 0, 0.5), (0, 2, 0.5), (1, 2, 0.5)]


def test_grids_are_laid_out_row_after_row():
    assert plane_grid((1.0, 2.0), (3.0,)) == [(1.0, 3.0), (2.0, 3.0)]
    assert trajectory_grid((1.0,), (3.0,), 2) == [(1.0, 3.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0)]
    assert in_rows({0: POINT, 3: POINT}, 2, 2)[1][1] is POINT
