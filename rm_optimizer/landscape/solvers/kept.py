"""Lanczos over a matrix of a loss, with its state in a file from which it continues after a kill."""

from __future__ import annotations

import time
from pathlib import Path

from rm_optimizer.landscape.operators.base import LossOperator
from rm_optimizer.landscape.operators.identity import identity_of
from rm_optimizer.landscape.operators.support import Support
from rm_optimizer.landscape.solvers.krylov import KrylovState

SAVE_SECONDS = 10.0
"""Least seconds between two writings of a state; it is written at the end of a product only."""


class KeptState:
    """State of a search that is written to a file from time to time.

    Args:
        operator: the matrix.
        support: rows of the matrix that are searched.
        file: file of the state; None keeps it in memory alone.
        seed: seed of the starting vector.

    Raises:
        CheckpointError: if the file holds another search, or cannot be read.
    """

    def __init__(self, operator: LossOperator, support: Support, file: Path | None, seed: int) -> None:
        curvature = getattr(operator, "curvature", "hessian")
        identity = f"{identity_of(operator.objective)} {curvature} {support.identity} {seed}" if file else ""
        self._file = file
        self.state = KrylovState(identity=identity)
        if file is not None and file.exists():
            self.state = KrylovState.load(file, identity=identity, device=operator.device)
        self.seconds_before = self.state.wall_seconds
        self._began = self._saved = time.perf_counter()

    def after_product(self) -> None:
        """Count the time, and write the state if `SAVE_SECONDS` have passed since the last writing."""
        now = time.perf_counter()
        self.state.wall_seconds = self.seconds_before + now - self._began
        if now - self._saved >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the state if it has a file."""
        if self._file is not None and self.state.can_continue:
            self.state.save(self._file)
            self._saved = time.perf_counter()


def part_file(file: Path | None, number: int) -> Path | None:
    """File for the state of a search over a part of the pairs or parameters, next to the file for all of them."""
    return None if file is None else file.with_name(f"{file.stem}.part{number}{file.suffix}")


def remove_states(file: Path) -> None:
    """Remove the states of a search over all pairs and parameters, and over parts of them."""
    for path in (file, *file.parent.glob(f"{file.stem}.part*{file.suffix}")):
        KrylovState.remove(path)
