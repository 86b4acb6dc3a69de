"""A spectral density as a curve with its error over random vectors, for pictures and tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from rm_optimizer.landscape.estimates.density import SpectralDensity

_POINTS = 400
_WIDTH = 0.01
"""Standard deviation that an eigenvalue is spread by, relative to the range of all."""


@dataclass(frozen=True)
class DensityCurve:
    """Share of eigenvalues per unit.

    Args:
        grid: eigenvalues.
        density: share of all eigenvalues per unit at each; integrates to 1.
        standard_error: over random vectors, without the quadrature's own error; NaN where there is one vector only, 0
            where every eigenvalue is known.
        width: standard deviation of the normal that stands for one eigenvalue.
    """

    grid: Float[np.ndarray, " points"]
    density: Float[np.ndarray, " points"]
    standard_error: Float[np.ndarray, " points"]
    width: float


def density_curve(density: SpectralDensity) -> DensityCurve:
    """The density over the range of everything known of the eigenvalues, each one spread by 1 % of it.

    Args:
        density: exact eigenvalues and quadrature rules.
    """
    known = np.array([*density.exact, *(node for rule in density.nodes for node in rule)])
    low, high = float(known.min()), float(known.max())
    width = _WIDTH * (high - low) or _WIDTH * max(abs(high), 1.0)
    grid = np.linspace(low - 5 * width, high + 5 * width, _POINTS)
    rules = list(zip(density.nodes, density.weights, strict=True))
    curves = [replace(density, nodes=(n,), weights=(w,)).on_grid(grid, width=width) for n, w in rules]
    if len(curves) > 1:
        error = np.std(curves, axis=0, ddof=1) / math.sqrt(len(curves))
    else:
        error = np.full(_POINTS, math.nan if curves else 0.0)
    return DensityCurve(grid, density.on_grid(grid, width=width), error, width)
