"""Measurement of a grid of points in weight space, over processes and resumable after a kill."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from itertools import islice

import torch

from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.measured_loss import MeasuredLoss
from rm_optimizer.landscape.surface.directions import Directions
from rm_optimizer.landscape.surface.loss_at import LossAt, PointLoss
from rm_optimizer.records.codec import from_values
from rm_optimizer.records.ledger import Ledger

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
    measured = _serial if processes == 1 or len(todo) < 2 else _parallel
    for index, point in measured(measured_loss, directions, [(index, points[index]) for index in todo], processes):
        ledger.add(index, point)
        on_point(len(ledger.points), len(points))


Task = tuple[int, tuple[float, ...]]


def _serial(
    measured_loss: MeasuredLoss, directions: Directions, tasks: Sequence[Task], processes: int
) -> Iterator[tuple[int, PointLoss]]:
    with measured_loss.measuring() as objective:
        loss_at = LossAt(objective, measured_loss.sample, directions)
        for index, coordinates in tasks:
            yield index, loss_at(coordinates)


def _parallel(
    measured_loss: MeasuredLoss, directions: Directions, tasks: Sequence[Task], processes: int
) -> Iterator[tuple[int, PointLoss]]:
    """Measure in parallel, with two tasks a process at a time, so that an interruption is quick."""
    threads = max(1, torch.get_num_threads() // processes)
    pool = ProcessPoolExecutor(
        min(processes, len(tasks)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_work,
        initargs=(measured_loss, directions, threads),
    )
    waiting, pending = iter(tasks), set[Future[tuple[int, PointLoss]]]()
    try:
        while True:
            with _interrupts_ignored():  # inherited by started processes, from their first instruction on
                pending |= {pool.submit(_work, task) for task in islice(waiting, 2 * processes - len(pending))}
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
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
