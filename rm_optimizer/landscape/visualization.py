"""Figures of landscapes, and the results that draw themselves. Names of figures load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rm_optimizer.lazy import export_lazily
from rm_optimizer.records.codec import JsonRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rm_optimizer.reporting.landscape.layers import plot_layers as plot_layers
    from rm_optimizer.reporting.landscape.results import drawings as drawings
    from rm_optimizer.reporting.landscape.runs import plot_between as plot_between
    from rm_optimizer.reporting.landscape.runs import plot_evolution as plot_evolution
    from rm_optimizer.reporting.landscape.spectrum import plot_density as plot_density
    from rm_optimizer.reporting.landscape.spectrum import plot_spectrum as plot_spectrum
    from rm_optimizer.reporting.landscape.spectrum import plot_training_curvature as plot_training_curvature
    from rm_optimizer.reporting.landscape.surfaces import plot_contour as plot_contour
    from rm_optimizer.reporting.landscape.surfaces import plot_slices as plot_slices
    from rm_optimizer.reporting.landscape.surfaces import plot_surface as plot_surface
    from rm_optimizer.reporting.landscape.surfaces import plot_trajectory as plot_trajectory

export_lazily(globals())


class LandscapeRecord(JsonRecord):
    """Result of a landscape with its figure and its table."""

    def plot(self) -> Figure:
        """The first figure of `rm-opt analyze`; a notebook shows it."""
        from rm_optimizer.reporting.landscape.results import drawings

        figure = drawings(self)[0].figure
        assert figure is not None, "only later drawings are rows alone"
        return figure

    def to_pandas(self) -> Any:
        """The numbers of this figure as a data frame of pandas."""
        from rm_optimizer.reporting.landscape.results import drawings

        return pa.Table.from_pylist(next(each.rows for each in drawings(self) if each.rows)).to_pandas()
