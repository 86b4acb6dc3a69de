"""Figures of landscapes, and the base class of their results. Names of figures load on first use.

Every result draws itself: `result.plot()` gives the first figure of `rm-opt analyze`, and `result.to_pandas()` the
numbers in it. `drawings(result)` gives all its figures with their numbers, and the functions draw one figure each, with
a caption or other points than the result has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rm_optimizer.lazy import export_lazily
from rm_optimizer.records.codec import JsonRecord

if TYPE_CHECKING:
    from rm_optimizer.reporting.landscape.layers import plot_layers as plot_layers
    from rm_optimizer.reporting.landscape.results import drawings as drawings
    from rm_optimizer.reporting.landscape.runs import plot_between as plot_between
    from rm_optimizer.reporting.landscape.runs import plot_evolution as plot_evolution
    from rm_optimizer.reporting.landscape.spectrum import plot_density as plot_density
    from rm_optimizer.reporting.landscape.spectrum import plot_spectrum as plot_spectrum
    from rm_optimizer.reporting.landscape.surfaces import plot_contour as plot_contour
    from rm_optimizer.reporting.landscape.surfaces import plot_slices as plot_slices
    from rm_optimizer.reporting.landscape.surfaces import plot_surface as plot_surface
    from rm_optimizer.reporting.landscape.surfaces import plot_trajectory as plot_trajectory
    from rm_optimizer.reporting.run_report import plot_training_curvature as plot_training_curvature

export_lazily(globals())


class LandscapeRecord(JsonRecord):
    """Result of a landscape, with the table of its figure."""

    def to_pandas(self) -> Any:
        """The numbers of its figure as a data frame of pandas."""
        from rm_optimizer.reporting.landscape.results import drawings

        return pa.Table.from_pylist(next(each.rows for each in drawings(self) if each.rows)).to_pandas()
