"""State of a Lanczos iteration: orthonormal basis, small matrix, one step of both, and a file to continue from."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from rm_optimizer.errors import CheckpointError, TrainingDiverged
from rm_optimizer.landscape.operators.base import LossOperator, SymmetricOperator
from rm_optimizer.landscape.operators.single_pairs import identity_of
from rm_optimizer.landscape.operators.support import Support
from rm_optimizer.landscape.operators.vectors import RandomVectors, inner, length, pairwise_inner, unit
from rm_optimizer.records.files import write_text

_ROWS_OF_A_BLOCK = 8

_COLUMNS_AT_ONCE = 1 << 18
"""Number of entries of each vector that are combined at once in place."""

_BREAKDOWN = 1e-6
"""Length of a new direction, relative to the operator's norm, below which the space counts as exhausted (float32)."""

_MUCH = 2**-0.5
"""Remaining share of a vector's length below which rounding may have left a component in the basis."""


class OrthonormalBasis:
    """Orthonormal vectors in blocks, so that the basis grows without copies of its vectors."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, vector: Float[Tensor, " parameters"]) -> None:
        """Add a unit vector that is orthogonal to the basis."""
        row = self._size % _ROWS_OF_A_BLOCK
        if row == 0:
            self._blocks.append(vector.new_empty(_ROWS_OF_A_BLOCK, vector.shape[0]))
        self._blocks[-1][row] = vector
        self._size += 1

    def rows(self) -> list[Float[Tensor, "_ parameters"]]:
        """The vectors, in blocks."""
        counts = [min(_ROWS_OF_A_BLOCK, self._size - start) for start in range(0, self._size, _ROWS_OF_A_BLOCK)]
        return [block[:count] for block, count in zip(self._blocks, counts, strict=True)]

    def last(self) -> Float[Tensor, " parameters"]:
        """The newest vector."""
        return self._blocks[-1][(self._size - 1) % _ROWS_OF_A_BLOCK]

    def orthogonalize(self, vector: Float[Tensor, " parameters"]) -> Float[Tensor, " parameters"]:
        """Remainder of a vector after removal of its component in the basis.

        For a product, almost all of that component lies along the newest two vectors, which are removed first. Then one
        pass removes all vectors. If it took much away, a second pass follows, and two passes are enough (Giraud et al.,
        2005; Daniel et al., 1976, Eq. 3.8).
        """
        for position in range(max(0, self._size - 2), self._size):
            row = self._blocks[position // _ROWS_OF_A_BLOCK][position % _ROWS_OF_A_BLOCK]
            vector = vector.sub(row, alpha=inner(row, vector))
        for _ in range(2):
            before = length(vector)
            for rows in self.rows():
                along = pairwise_inner(rows, vector[None])[:, 0].to(vector.dtype)
                vector = vector.addmv(rows.T, along, alpha=-1)
            if length(vector) > _MUCH * before:
                break
        return vector

    def rotate(self, weights: Float[Tensor, "vectors basis"]) -> None:
        """Replace the vectors by orthonormal combinations of them, without a copy; the newest one is kept as the last.

        Args:
            weights: orthonormal rows, fewer than the vectors, with 0 for the newest vector.
        """
        last, count = self.last().clone(), len(weights)
        for start in range(0, len(last), _COLUMNS_AT_ONCE):
            span = slice(start, start + _COLUMNS_AT_ONCE)
            rotated = weights.to(last) @ torch.cat([rows[:, span] for rows in self.rows()])
            for block, rows in zip(self._blocks, torch.split(rotated, _ROWS_OF_A_BLOCK), strict=False):
                block[: len(rows), span] = rows
        del self._blocks[-(-count // _ROWS_OF_A_BLOCK) :]
        self._size = count
        self.append(last)

    def combine(self, weights: Float[Tensor, "vectors basis"]) -> Float[Tensor, "vectors parameters"]:
        """Linear combinations of the vectors."""
        blocks = self.rows()
        parts = torch.split(weights.to(blocks[0]), [len(rows) for rows in blocks], dim=1)
        total = blocks[0].new_zeros(len(weights), blocks[0].shape[1])
        for part, rows in zip(parts, blocks, strict=True):
            total.addmm_(part, rows)
        return total


@dataclass
class KrylovState:
    """State of a Lanczos iteration, which can be saved between any two products and continued.

    Args:
        basis: the orthonormal vectors.
        diagonal: diagonal of the small matrix.
        off_diagonal: entries below the diagonal; the last one belongs to the next vector. Those of the first `num_kept`
            vectors are in the row of the vector that follows them.
        num_kept: number of first vectors that are Ritz vectors of a larger basis, kept by `shrink`.
        num_shrunk: number of times that the basis was made smaller.
        num_products: products spent.
        num_restarts: number of times that the space was exhausted and a random vector was drawn.
        wall_seconds: seconds of the iteration, summed over all processes that continued it.
        identity: identity of the matrix, so that a saved iteration is not continued with another one.
        num_saved: number of vectors that `save` has written.
    """

    basis: OrthonormalBasis = field(default_factory=OrthonormalBasis)
    diagonal: list[float] = field(default_factory=list)
    off_diagonal: list[float] = field(default_factory=list)
    num_kept: int = 0
    num_shrunk: int = 0
    num_products: int = 0
    num_restarts: int = 0
    wall_seconds: float = 0.0
    identity: str = ""
    num_saved: int = 0

    @property
    def can_continue(self) -> bool:
        """True between two products: the next vector is known, or the basis is complete."""
        size = len(self.basis)
        return size > len(self.diagonal) or (size > 0 and size == len(self.basis.last()))

    def ritz(self) -> tuple[Float[np.ndarray, " values"], Float[np.ndarray, "values values"]]:
        """Eigenvalues, ascending, and eigenvectors (columns) of the small matrix, in float64."""
        size, kept = len(self.diagonal), self.num_kept
        couplings = np.array(self.off_diagonal[: size - 1])
        if not kept:
            values, vectors = eigh_tridiagonal(np.array(self.diagonal), couplings)
            return values, vectors
        matrix = np.diag(self.diagonal)
        matrix[kept, :kept] = couplings[:kept]
        below = np.arange(kept, size - 1)
        matrix[below + 1, below] = couplings[kept:]
        values, vectors = np.linalg.eigh(matrix)  # reads only entries below the diagonal
        return values, vectors

    def shrink(self, kept: NDArray[np.int64]) -> None:
        """Restart from some Ritz vectors and the next vector (thick restart; Wu & Simon, 2000, section 2).

        Args:
            kept: positions of the Ritz vectors among the ascending values.
        """
        values, vectors = self.ritz()
        weights = torch.zeros(len(kept), len(self.basis), dtype=torch.float64)
        weights[:, : len(values)] = torch.from_numpy(vectors[:, kept].T.copy())
        self.basis.rotate(weights)
        self.diagonal, self.off_diagonal = values[kept].tolist(), (self.off_diagonal[-1] * vectors[-1, kept]).tolist()
        self.num_kept, self.num_shrunk, self.num_saved = len(kept), self.num_shrunk + 1, 0

    def save(self, path: Path) -> None:
        """Write the state and the vectors that are new since the last `save`; a kill leaves the last state intact.

        The vectors are appended to a file next to `path`, and `path` holds the number that belong to the state. A basis
        that was made smaller starts a new file.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = list(itertools.chain.from_iterable(self.basis.rows()))
        rows_file = _rows_file(path, self.num_shrunk)
        known = self.num_saved if rows_file.exists() else 0
        with rows_file.open("r+b" if known else "wb") as file:
            file.seek(known * rows[0].nbytes)
            file.truncate()
            for row in rows[known:]:
                file.write(row.cpu().numpy().data)
            file.flush()
            os.fsync(file.fileno())
        self.num_saved = len(rows)
        shape = {"num_vectors": len(rows), "dimension": len(rows[0]), "dtype": str(rows[0].cpu().numpy().dtype)}
        write_text(path, json.dumps({name: getattr(self, name) for name in _NUMBERS} | shape))
        for other in set(path.parent.glob(f"{path.name}.rows*")) - {rows_file}:
            other.unlink()

    @classmethod
    def load(cls, path: Path, *, identity: str = "", device: torch.device | None = None) -> KrylovState:
        """The state that `save` wrote.

        Raises:
            CheckpointError: if the file is missing, damaged or of another kind, or belongs to another matrix.
        """
        try:
            payload = json.loads(path.read_text(encoding="utf-8"))
            count, size, dtype = payload["num_vectors"], payload["dimension"], np.dtype(payload["dtype"])
            state = cls(**{name: payload[name] for name in _NUMBERS}, num_saved=count)
            if state.identity == identity:
                with _rows_file(path, state.num_shrunk).open("rb") as file:
                    for _ in range(count):
                        state.basis.append(torch.from_numpy(np.fromfile(file, dtype, size).reshape(size)).to(device))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read as a Lanczos state; remove it to start again") from error
        if state.identity != identity:
            raise CheckpointError(f"{path} belongs to other weights, pairs or options; remove it or restore those")
        return state


def extend(operator: SymmetricOperator, state: KrylovState, random: RandomVectors) -> None:
    """Spend one product, and add the next basis vector; if the space is exhausted, a random one."""
    absorb(operator, state, random, operator.apply(state.basis.last()[None])[0])


def absorb(
    operator: SymmetricOperator, state: KrylovState, random: RandomVectors, product: Float[Tensor, " parameters"]
) -> None:
    """Add the operator's product with the newest basis vector to the state, as `extend` does."""
    along = inner(product, state.basis.last())
    rest = state.basis.orthogonalize(product)
    norm = length(rest)
    if not math.isfinite(norm):
        raise TrainingDiverged(f"curvature along a unit vector overflows {operator.dtype}; use dtype=float64")
    scale = max(map(abs, (*state.diagonal, *state.off_diagonal, along)))
    exhausted = norm <= (_BREAKDOWN if operator.dtype == torch.float32 else 1e-12) * scale or norm == 0
    is_full = len(state.basis) == operator.dimension
    if exhausted and not is_full:
        rest = state.basis.orthogonalize(random.normals(1)[0])
        state.num_restarts += 1
    state.num_products += 1
    state.diagonal.append(along)
    state.off_diagonal.append(0.0 if exhausted else norm)
    if not is_full:
        state.basis.append(unit(rest))


_NUMBERS = tuple(each.name for each in fields(KrylovState) if each.name not in ("basis", "num_saved"))


def _rows_file(path: Path, num_shrunk: int) -> Path:
    return path.with_name(f"{path.name}.rows{num_shrunk or ''}")


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
    part = f"{file.stem}.part*{file.suffix}"
    for path in itertools.chain([file], *map(file.parent.glob, (f"{file.name}.rows*", part, f"{part}.rows*"))):
        path.unlink(missing_ok=True)
