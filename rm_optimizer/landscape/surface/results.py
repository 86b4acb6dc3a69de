"""Results of the measurement of the loss along lines and over planes through the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass

from rm_optimizer.landscape.surface.directions import TrajectoryPlane
from rm_optimizer.landscape.surface.grid import MISSING, PointLoss, Points
from rm_optimizer.landscape.visualization import LandscapeRecord

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
