"""The loss at points of a grid in weight space, measured over processes and resumable, and its results."""

from __future__ import annotations

import math
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rm_optimizer.errors import ConfigError
from rm_optimizer.evaluation.draws import PairSample
from rm_optimizer.landscape.measured_loss import MeasuredLoss
from rm_optimizer.landscape.operators.objective import PairObjective
from rm_optimizer.landscape.surface.directions import Directions, TrajectoryPlane
from rm_optimizer.landscape.visualization import LandscapeRecord
from rm_optimizer.records.codec import from_values
from rm_optimizer.records.ledger import Ledger


@dataclass(frozen=True)
class PointLoss:
    """Loss and accuracy at one point.

    Args:
        loss: weighted mean over the pairs.
        loss_standard_error: its standard error over pairs; pairs of one prompt count as one.
        accuracy: weighted share of pairs ranked as labeled, without those labeled 0.5; ties count one half.
        accuracy_standard_error: standard error of the accuracy, in the same way.
    """

    loss: float
    loss_standard_error: float
    accuracy: float
    accuracy_standard_error: float


MISSING = PointLoss(math.nan, math.nan, math.nan, math.nan)
"""A point that was not measured."""


class LossAt:
    """Function `f(w + sum_i t_i d_i)` of coordinates `t`; the weights themselves are not changed.

    Args:
        objective: the loss.
        sample: the pairs of the loss.
        directions: the vectors `d_i`.
    """

    def __init__(self, objective: PairObjective, sample: PairSample, directions: Directions) -> None:
        self._objective = objective
        self._sample = sample
        vectors = directions.vectors.to(objective.device, objective.dtype)
        self._parts = objective.subset.unflatten(vectors)

    @torch.no_grad()
    def __call__(self, coordinates: Sequence[float]) -> PointLoss:
        """The loss at these coordinates, one for each direction."""
        steps = [(index, t) for index, t in enumerate(coordinates) if t != 0]
        each = zip(self._objective.parameters, self._parts, strict=True)
        weights = [sum((t * parts[index] for index, t in steps), start=origin.detach()) for origin, parts in each]
        columns: list[Tensor] = []
        for batch in self._objective.batches:
            rewards = self._objective.rewards_at(weights, batch)
            losses = self._objective.pair_losses(rewards, batch)
            chosen, rejected = batch.split(rewards)
            side = torch.sign(2 * batch.label - 1)
            right = 0.5 + 0.5 * torch.sign((chosen - rejected) * side)
            own = (batch.pair_index, batch.weight, losses, right, batch.weight * side.abs())
            columns.append(torch.stack([column.double().cpu() for column in own], dim=1))
        rows = torch.cat(columns).numpy()
        rows = rows[np.argsort(rows[:, 0], kind="stable")]  # by pair, so that micro-batches do not matter
        prompts = np.array([self._sample.prompts[int(index)] for index in rows[:, 0]])
        loss, accuracy = (_clustered_mean(rows[:, i], rows[:, weight], prompts) for i, weight in ((2, 1), (3, 4)))
        return PointLoss(*loss, *accuracy)


def _clustered_mean(values: np.ndarray, weight: np.ndarray, clusters: NDArray[np.int64]) -> tuple[float, float]:
    """`sum w x / sum w` and its standard error `sqrt(C / (C - 1) sum_c (sum_{i in c} w_i (x_i - mean) / sum w)^2)`."""
    share, counts = weight / (weight.sum() or math.nan), weight > 0
    mean = float(share @ values)
    totals = np.bincount(np.unique(clusters[counts], return_inverse=True)[1], (share * (values - mean))[counts])
    count = len(totals)
    error = math.sqrt(count / (count - 1) * float(totals @ totals)) if count > 1 and math.isfinite(mean) else math.nan
    return mean, error


Points = Sequence[tuple[float, ...]]
"""Coordinates, one for each direction."""

OnPoint = Callable[[int, int], None]
"""Function of the number of measured points and their total."""


class GridLedger:
    """Ledger of measured points; each point is written to disk at once."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.points = {row["index"]: from_values(PointLoss, row["point"]) for row in ledger.values()}

    def add(self, index: int, point: PointLoss) -> None:
        """Keep a point, after writing it to disk."""
        self._ledger.append({"index": index, "point": point})
        self.points[index] = point


def measure_grid(
    measured_loss: MeasuredLoss,
    directions: Directions,
    points: Points,
    ledger: GridLedger,
    *,
    processes: int = 1,
    on_point: OnPoint = lambda done, total: None,
) -> None:
    """Measure every point that is not in the ledger, and add it.

    Args:
        measured_loss: model, pairs and loss.
        directions: directions to move along.
        points: coordinates of the points.
        ledger: ledger for the results, which keeps the measured points after an interruption.
        processes: number of processes that share the points; more than 1 on a CPU only.
        on_point: function called after each point.

    Raises:
        ConfigError: if several processes are requested for a model that is not on the CPU.
    """
    todo = [index for index in range(len(points)) if index not in ledger.points]
    on_point(len(ledger.points), len(points))
    if processes > 1 and measured_loss.model.device.type != "cpu":
        raise ConfigError(
            f"landscape.processes must be 1 for a model on {measured_loss.model.device}, got {processes}; "
            "several processes share a CPU's cores"
        )
    tasks = [(index, points[index]) for index in todo]
    for index, point in _measured(measured_loss, directions, tasks, processes):
        ledger.add(index, point)
        on_point(len(ledger.points), len(points))


Task = tuple[int, tuple[float, ...]]


def _measured(
    measured_loss: MeasuredLoss, directions: Directions, tasks: Sequence[Task], processes: int
) -> Iterator[tuple[int, PointLoss]]:
    """Measure in this process or in several."""
    if processes == 1 or len(tasks) < 2:
        with measured_loss.measuring() as objective:
            loss_at = LossAt(objective, measured_loss.sample, directions)
            for index, coordinates in tasks:
                yield index, loss_at(coordinates)
        return
    threads = max(1, torch.get_num_threads() // processes)
    pool = ProcessPoolExecutor(
        min(processes, len(tasks)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_work,
        initargs=(measured_loss, directions, threads),
    )
    try:
        with _interrupts_ignored():  # inherited by the processes, all of which start here, from their first instruction
            futures = [pool.submit(_work, task) for task in tasks]
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, so that only the parent ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_held = ExitStack()

_loss_at: LossAt | None = None


def _begin_work(measured_loss: MeasuredLoss, directions: Directions, threads: int) -> None:
    """Initialize a process of the pool with the model, received in shared memory."""
    global _loss_at
    torch.set_num_threads(threads)
    _loss_at = LossAt(_held.enter_context(measured_loss.measuring()), measured_loss.sample, directions)


def _work(task: Task) -> tuple[int, PointLoss]:
    assert _loss_at is not None, "the pool's initializer ran"
    index, coordinates = task
    return index, _loss_at(coordinates)


Row = dict[str, float | int | str | None]


@dataclass(frozen=True, kw_only=True)
class GridDescription:
    """Description of a grid of losses for captions.

    Args:
        method: origin of the directions, in words.
        names: names of the directions.
        values: eigenvalue or share of variance of each direction; None for random ones.
        params: the parameters that move.
        num_parameters: number of parameters that move.
        num_pairs: pairs that the loss is averaged over.
        num_prompts: different prompts among them.
        seed: seed of the pairs and of random directions.
        source: checkpoint, step and pairs, in words.
    """

    method: str
    names: tuple[str, ...]
    values: tuple[float, ...] | None
    params: str
    num_parameters: int
    num_pairs: int
    num_prompts: int
    seed: int
    source: str = ""


@dataclass(frozen=True)
class Slice(LandscapeRecord):
    """Losses along lines through the weights.

    Args:
        measured: description of the measurement.
        steps: positions along each direction in units of its length; 0 is among them.
        points: losses along each direction, one a distance; `MISSING` where none was measured.
    """

    measured: GridDescription
    steps: tuple[float, ...]
    points: tuple[tuple[PointLoss, ...], ...]

    @property
    def num_missing(self) -> int:
        """Number of points that were not measured."""
        return _missing(self.points)

    def rows(self) -> Iterator[Row]:
        """Rows of a table, one for each point."""
        for name, line in zip(self.measured.names, self.points, strict=True):
            for step, point in zip(self.steps, line, strict=True):
                yield {"direction": name, "step": step, **asdict(point)}


@dataclass(frozen=True)
class Surface(LandscapeRecord):
    """Losses over a plane through the weights.

    Args:
        measured: description of the measurement.
        x: positions along the first direction in units of its length.
        y: positions along the second direction.
        points: rows by `y` of columns by `x`; `MISSING` where a point was not measured.
    """

    measured: GridDescription
    x: tuple[float, ...]
    y: tuple[float, ...]
    points: tuple[tuple[PointLoss, ...], ...]

    @property
    def num_missing(self) -> int:
        """Number of points that were not measured."""
        return _missing(self.points)

    def rows(self) -> Iterator[Row]:
        """Rows of a table, one for each point."""
        for y, line in zip(self.y, self.points, strict=True):
            for x, point in zip(self.x, line, strict=True):
                yield {"x": x, "y": y, **asdict(point)}


@dataclass(frozen=True)
class Trajectory(LandscapeRecord):
    """Checkpoints of a run in the plane closest to them, with the losses in that plane.

    Args:
        surface: losses in the plane; its origin is the last checkpoint.
        steps: optimizer steps of the checkpoints.
        coordinates: coordinates of each checkpoint in the plane, in parameter distance.
        off_plane: distance of each checkpoint from the plane.
        points: losses at the checkpoints themselves.
    """

    surface: Surface
    steps: tuple[int, ...]
    coordinates: tuple[tuple[float, float], ...]
    off_plane: tuple[float, ...]
    points: tuple[PointLoss, ...]

    @property
    def num_missing(self) -> int:
        """Number of points that were not measured."""
        return self.surface.num_missing + _missing((self.points,))

    def rows(self) -> Iterator[Row]:
        """Rows of a table, one for each checkpoint; the surface has its own rows."""
        columns = zip(self.steps, self.coordinates, self.off_plane, self.points, strict=True)
        for step, (x, y), off_plane, point in columns:
            yield {"step": step, "x": x, "y": y, "off_plane": off_plane, **asdict(point)}


def symmetric_steps(span: float, num_points: int) -> tuple[float, ...]:
    """An odd number of equal steps from `-span` to `span`, the middle one exactly 0.

    Example:
        >>> symmetric_steps(1.0, 5)
        (-1.0, -0.5, 0.0, 0.5, 1.0)
    """
    half = num_points // 2
    return tuple(span * i / half for i in range(-half, half + 1))


def slice_grid(num_directions: int, steps: Sequence[float]) -> Points:
    """Points of lines through the origin, line after line; each line contains the origin."""
    return [
        tuple(step if j == i else 0.0 for j in range(num_directions)) for i in range(num_directions) for step in steps
    ]


def plane_grid(x: Sequence[float], y: Sequence[float], num_others: int = 0) -> Points:
    """Points of a plane, row after row; further directions are not moved along."""
    return [(a, b, *(0.0,) * num_others) for b in y for a in x]


def trajectory_grid(x: Sequence[float], y: Sequence[float], num_checkpoints: int) -> Points:
    """Points of the plane, then each checkpoint: one unit along its own displacement, a direction from the third on."""
    own = [tuple(float(j == i + 2) for j in range(2 + num_checkpoints)) for i in range(num_checkpoints)]
    return [*plane_grid(x, y, num_checkpoints), *own]


def plane_ranges(plane: TrajectoryPlane, num_points: int) -> tuple[tuple[float, ...], ...]:
    """Steps along both directions that cover the trajectory plus a fifth of its width on each side."""
    found = []
    for column in plane.coordinates.T.tolist():
        low, high = min(column), max(column)
        spare = 0.2 * (high - low)
        width = high - low + 2 * spare
        found.append(tuple(low - spare + width * i / (num_points - 1) for i in range(num_points)))
    return tuple(found)


def in_rows(points: Mapping[int, PointLoss], width: int, num_rows: int) -> tuple[tuple[PointLoss, ...], ...]:
    """Rows of measured points, given by index; `MISSING` for points that were not measured."""
    return tuple(tuple(points.get(row * width + column, MISSING) for column in range(width)) for row in range(num_rows))


def _missing(points: Sequence[Sequence[PointLoss]]) -> int:
    return sum(all(map(math.isnan, astuple(point))) for line in points for point in line)
