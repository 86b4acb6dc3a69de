"""Pictures of landscapes show the numbers they were given, and say on how many pairs and which seed they rest."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.landscape.estimates.cross_fitting import CrossFit, TopOfSamples
from rm_optimizer.landscape.estimates.density import SpectralDensity, density_curve
from rm_optimizer.landscape.estimates.quantities import LocalGeometry
from rm_optimizer.landscape.layers import BlockCurvature, LayerCurvature, TopEigenvalue
from rm_optimizer.landscape.surface.grid import GridDescription, PointLoss, Slice, Surface, Trajectory
from rm_optimizer.reporting.figures import save_figure
from rm_optimizer.reporting.landscape.layers import plot_layers
from rm_optimizer.reporting.landscape.results import draw_training_curvature
from rm_optimizer.reporting.landscape.spectrum import (
    _geometry_rows,
    places_of,
    plot_density,
    plot_spectrum,
    spectrum_rows,
)
from rm_optimizer.reporting.landscape.surfaces import plot_contour, plot_slices, plot_surface, plot_trajectory
from rm_optimizer.reporting.run_report import has_training_curvature, plot_training_curvature
from tests.landscape.test_quantities import spectrum

MISSING = PointLoss(math.nan, math.nan, math.nan, math.nan)
STEPS = (-1.0, -0.5, 0.0, 0.5, 1.0)


def measured(values: tuple[float, ...] | None = None) -> GridDescription:
    return GridDescription(
        method="any", names=("first", "second"), values=values, params="trainable",
        num_parameters=12, num_pairs=64, num_prompts=60, seed=7,
    )  # fmt: skip


def point(x: float, y: float = 0.0) -> PointLoss:
    return PointLoss(0.3 + x * x + 2 * y * y, 0.05, 0.8 - 0.1 * abs(x), 0.02)


SLICE = Slice(measured(), STEPS, (tuple(map(point, STEPS)), tuple(point(0.0, x) for x in STEPS)))
SURFACE = Surface(measured((0.9, 0.1)), STEPS, STEPS, tuple(tuple(point(x, y) for x in STEPS) for y in STEPS))
TRAJECTORY = Trajectory(
    SURFACE, (0, 5, 9), ((-0.8, 0.2), (-0.3, -0.1), (0.0, 0.0)), (0.1, 0.1, 0.0), (point(0.8), point(0.3), point(0.0))
)


def labels(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def test_slices_show_loss_and_accuracy_with_bands_of_one_standard_error(tmp_path):
    figure = plot_slices(SLICE)
    files = save_figure(figure, tmp_path / "slices.png", svg=True)
    upper, lower = figure.axes
    assert "n = 64 pairs of 60 prompts; seed 7" in upper.texts[0].get_text()
    assert "± 1 standard error" in labels(upper)
    line = next(line for line in upper.get_lines() if line.get_label() == "first")
    assert line.get_ydata().tolist() == [p.loss for p in SLICE.points[0]]
    band = upper.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.25, 1.35))
    assert lower.get_lines()[0].get_ydata().tolist() == [p.accuracy for p in SLICE.points[0]]
    assert "1 = length of the weights" in lower.get_xlabel()
    assert [file.suffix for file in files] == [".png", ".svg"]
    assert imread(files[0]).shape[:2] == (840, 1050)
    assert files[1].read_text(encoding="utf-8").startswith("<?xml")


def test_equal_results_give_equal_files(tmp_path):
    paths = [tmp_path / name / "slices.png" for name in ("a", "b")]
    first, second = ([f.read_bytes() for f in save_figure(plot_slices(SLICE), path, svg=True)] for path in paths)
    assert first == second


def test_a_contour_covers_the_plane_and_marks_the_weights():
    figure = plot_contour(SURFACE)
    axes, bar = figure.axes
    assert (axes.get_xlim(), axes.get_ylim()) == ((-1, 1), (-1, 1))
    assert "standard error of a loss over pairs 0.05 to 0.05" in axes.texts[0].get_text()
    cross = next(line for line in axes.get_lines() if line.get_label() == "trained weights")
    assert (cross.get_xdata(), cross.get_ydata()) == ([0.0], [0.0])
    assert bar.get_ylabel() == "loss (nats a pair)"
    assert bar.get_ylim() == pytest.approx((0.3, 3.3))
    assert axes.get_xlabel() == "first (parameter distance)"


def test_what_is_missing_is_left_blank_and_said():
    rows = (SURFACE.points[0], SURFACE.points[1], (MISSING,) * 5, *SURFACE.points[3:])
    partial = Surface(measured(), STEPS, STEPS, rows)
    drawn = [plot_contour(partial), plot_surface(partial)]
    assert drawn[0].axes[0].texts[0].get_text().startswith("PARTIAL, 5 points missing; any; n = 64")
    assert any(text.get_text().startswith("PARTIAL") for text in drawn[1].texts)


def test_the_labels_of_a_surface_are_on_the_page():
    figure = plot_surface(SURFACE)
    figure.canvas.draw()
    shown = figure.axes[0].get_tightbbox()
    assert figure.bbox.x0 <= shown.x0 < shown.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= shown.y0 < shown.y1 <= figure.bbox.y1


def test_a_surface_has_the_grid_it_was_given():
    figure = plot_surface(SURFACE)
    (axes,) = figure.axes
    assert axes.get_zlabel() == "loss (nats a pair)"
    assert axes.get_zlim()[0] <= 0.3 <= 3.3 <= axes.get_zlim()[1]
    assert "n = 64 pairs of 60 prompts; seed 7" in figure.texts[1].get_text()


def test_a_trajectory_goes_through_its_checkpoints_with_their_losses():
    figure = plot_trajectory(TRAJECTORY)
    axes = figure.axes[0]
    path = next(line for line in axes.get_lines() if str(line.get_label()).startswith("checkpoints"))
    assert list(zip(path.get_xdata(), path.get_ydata(), strict=True)) == list(TRAJECTORY.coordinates)
    written = [text.get_text() for text in axes.texts]
    assert {"step 0: 0.940 ± 0.05", "step 5: 0.390 ± 0.05", "step 9: 0.300 ± 0.05"} <= set(written)


def test_a_long_caption_takes_two_lines_and_leaves_the_axes_their_width():
    blocks = (block("layer 1", 5.0, is_converged=False),)
    figure = plot_layers(LayerCurvature(blocks, ("head",), 64, 60, 7))
    axes = figure.axes[0]
    caption = axes.texts[0].get_text()
    assert caption.count(";\n") == caption.count("\n") == 1
    assert caption.startswith("PARTIAL, without the search in head; n = 64 pairs of 60 prompts; seed 7")
    figure.canvas.draw()
    assert axes.get_position().width > 0.7


def block(name: str, top: float, *, is_converged: bool = True) -> BlockCurvature:
    found, trace = TopEigenvalue(-top, 0.01, is_converged, 3), Estimate(3 * top, 0.5, 4)
    return BlockCurvature(name, 100, (top, 0.1), None, trace, replace(trace, value=-top), found)


def test_layers_show_every_block_with_its_errors():
    tops = {"embeddings": 1.0, "layer 1": 4.0, "head": 0.5}
    blocks = tuple(block(name, top, is_converged=name != "head") for name, top in tops.items())
    figure = plot_layers(LayerCurvature(blocks, (), 64, 60, 7))
    axes = figure.axes[0]
    cells = {text.get_text() for text in axes.texts}
    assert {"1", "4", "n/a", "3 ± 0.5", "-4 ± 0.5", "-1 ± 0.01", "-0.5 ± 0.01 *"} <= cells
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["embeddings (100)", "layer 1 (100)", "head (100)"]
    assert axes.images[0].get_array().ravel().tolist() == [1.0, 4.0, 0.5]
    without = plot_layers(LayerCurvature((replace(blocks[0], hessian_top=None),), (), 64, 60, 7)).axes[0]
    assert len(without.images) == len(axes.images) - 1
    crossed = CrossFit((Estimate(0.7, 0.2, 64, 0.1, 1.2),), 0.1, 1.2, (), 3)
    held = replace(blocks[0], hessian_top=TopEigenvalue(1.0, 0.01, True, 3, crossed))
    beside = plot_layers(LayerCurvature((held, *blocks[1:]), (), 64, 60, 7)).axes[0]
    assert len(beside.images) == len(axes.images) + 1
    assert "0.7 ± 0.2" in {text.get_text() for text in beside.texts}


def rows_of(values, bounds, ends, crossed=()):  # type: ignore[no-untyped-def]
    count = len(values)
    found = replace(
        spectrum(tuple(map(float, values)), ends=ends, is_exhaustive=False),
        error_bounds=tuple(bounds),
        residuals=tuple(bounds),
        converged=(True,) * count,
        cross_fit=CrossFit(tuple(crossed), None, None, (), 0),
    )
    return spectrum_rows(found)


def test_the_whole_interval_of_a_single_eigenvalue_is_shown_beside_the_inset():
    crossed = (Estimate(29.0, 20.0, 64, -9.0, 73.0),)
    tops = (TopOfSamples(128.0, (70.0, 73.0)), TopOfSamples(256.0, (59.0,)))
    words = {"title": "Hessian", "caption": "n = 256 pairs"}
    axes = plot_spectrum(rows_of((59.0,), (0.1,), (1, 0), crossed), **words, by_num_pairs=tops)
    low, high = axes.axes[0].get_ylim()
    assert low < -9.0 < 73.0 < high
    left, right = axes.axes[0].get_xlim()
    assert (1.25 - left) / (right - left) < 0.6  # where the inset begins


def test_a_spectrum_shows_both_signs_with_bounds_and_cross_fitted_values():
    values, bounds = (5.0, 2.0, -0.1, -3.0), (0.01, 0.02, 0.05, 0.1)
    crossed = (Estimate(3.0, 1.0, 64, 1.0, 4.0),)
    tops = (TopOfSamples(16.0, (9.0, 7.0)), TopOfSamples(32.0, (6.0,)), TopOfSamples(64.0, (5.0,)))
    words = {"title": "Hessian", "caption": "n = 64 pairs"}
    figure = plot_spectrum(rows_of(values, bounds, (2, 2), crossed), **words, by_num_pairs=tops)
    axes = figure.axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "2", "1"]
    assert axes.get_xlabel() == "rank from the largest | from the smallest"
    assert [line.get_xdata()[0] for line in axes.get_lines() if line.get_linestyle() == "--"] == [2.5]
    assert axes.get_yscale() == "symlog"
    shown = {c.get_label(): c for c in axes.containers}
    assert [c.lines[0].get_ydata().tolist() for c in shown.values()] == [[5.0, 2.0], [-0.1, -3.0], [3.0]]
    *bounds_shown, crossed_fitted = shown
    assert crossed_fitted == "cross-fitted; bar: 95 % over pairs"
    assert bounds_shown == ["positive; bar: error bound", "negative; bar: error bound"]
    bar = shown[crossed_fitted].lines[2][0].get_segments()[0]
    assert bar.tolist() == [[1.25, 1.0], [1.25, 4.0]]
    (inset,) = axes.child_axes
    assert [tick.get_text() for tick in inset.get_xticklabels()] == ["16", "32", "64"]
    assert inset.get_lines()[-1].get_ydata().tolist() == [8.0, 6.0, 5.0]
    assert axes.get_ylim()[0] < -3 < 5 < axes.get_ylim()[1]


def test_a_density_is_logarithmic_integrates_to_one_and_marks_what_was_computed():
    density = SpectralDensity((4.0, -2.0), ((0.0, 1.0), (0.1, 0.9)), ((7.0, 1.0), (6.0, 2.0)), 10, 4)
    curve = density_curve(density)
    assert np.trapezoid(curve.density, curve.grid) == pytest.approx(1.0, abs=1e-6)
    crossed = [Estimate(2.5, 0.2, 64, 2.0, 3.0)]
    figure = plot_density(curve, top=density.exact, title="Hessian", caption="n = 64 pairs", cross_fitted=crossed)
    axes = figure.axes[0]
    assert axes.get_yscale() == "log"
    assert "the largest 1 cross-fitted, from below; 95 % over pairs" in labels(axes)
    marks = {line.get_label(): list(line.get_xdata()) for line in axes.get_lines()}
    assert marks["1 positive eigenvalue, computed"] == [4.0]
    assert marks["1 negative eigenvalue, computed"] == [-2.0]
    assert "± 1 standard error over probes" in labels(axes)


@pytest.mark.parametrize(
    ("num_top", "num_bottom", "expected"),
    [
        (3, 0, "largest 1, largest 2, largest 3"),
        (0, 3, "smallest 3, smallest 2, smallest 1"),
        (1, 2, "largest 1, smallest 2, smallest 1"),
        (3, 3, "largest 1, largest 2, smallest 1"),
    ],
)
def test_an_eigenvalue_is_counted_from_the_nearer_end_that_is_known(num_top, num_bottom, expected):
    assert ", ".join(f"{place['end']} {place['rank']}" for place in places_of(num_top, num_bottom, 3)) == expected


def test_many_ranks_are_thinned_out_from_each_end():
    values = [*range(20, 0, -1), *range(-1, -21, -1)]
    figure = plot_spectrum(rows_of(values, [0.1] * 40, (20, 20)), title="Hessian", caption="n = 64 pairs")
    shown = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert shown == ["1", "5", "10", "15", "20", "15", "10", "5", "1"]


def test_one_point_of_a_surface_can_be_drawn():
    rows = ((point(0.0), *(MISSING,) * 4), *((MISSING,) * 5,) * 4)
    partial = Surface(measured(), STEPS, STEPS, rows)
    drawn = [plot_contour(partial), plot_surface(partial)]
    assert drawn[0].axes[0].texts[0].get_text().startswith("PARTIAL, 24 points missing")


def test_curvature_during_training_stands_beside_as_parquet_and_csv(tmp_path):
    history = [
        {"step": "0", "train_loss": "0.7", "curvature_top_eigenvalue": "", "curvature_trace": ""},
        {"step": "5", "train_loss": "0.6", "curvature_top_eigenvalue": "3.0", "curvature_trace": "8.5"},
    ]
    files = draw_training_curvature(history, tmp_path, "n = 8 pairs; seed 7 of the run")
    rows = pq.read_table(tmp_path / "during_training.parquet").to_pylist()
    assert rows == [{"step": 5, "curvature_top_eigenvalue": 3.0, "curvature_trace": 8.5}]
    assert {file.name for file in files} == {f"during_training.{ending}" for ending in ("png", "svg", "parquet", "csv")}
    text = (tmp_path / "during_training.csv").read_text()
    assert text == "step,curvature_top_eigenvalue,curvature_trace\n5,3.0,8.5\n"


def test_the_limit_of_stability_stands_beside_the_sharpness_it_is_of(tmp_path):
    rows = [{"step": str(step), "curvature_top_eigenvalue": "3.0", "curvature_trace": "8.0"} for step in (0, 5, 10)]
    limits = [{"curvature_stability_limit": limit} for limit in ("nan", "40.0", "20.0")]
    raw = plot_training_curvature([row | limit for row, limit in zip(rows, limits, strict=True)], caption="seed 7")
    assert [line.get_xydata().tolist() for line in raw.axes[0].lines if line.get_label().startswith("limit")] == [
        [[5.0, 40.0], [10.0, 20.0]]
    ]
    sharp = [{"curvature_preconditioned_sharpness": value} for value in ("nan", "900.0", "950.0")]
    scaled = [row | limit | value for row, limit, value in zip(rows, limits, sharp, strict=True)]
    third = plot_training_curvature(scaled, caption="seed 7").axes[2]
    assert third.containers[0].lines[0].get_xydata().tolist() == [[5.0, 900.0], [10.0, 950.0]]
    assert third.get_yscale() == "log"


def test_curvature_during_training_takes_the_rows_that_have_it():
    row = {"step": "5", "curvature_top_eigenvalue": "3.0", "curvature_top_eigenvalue_residual": "0.5"}
    history = [{"step": "1"}, row | {"curvature_trace": "8.0", "curvature_trace_standard_error": "nan"}]
    assert has_training_curvature(history)
    assert not has_training_curvature(history[:1])
    figure = plot_training_curvature(history, caption="seed 7")
    upper, lower = figure.axes
    assert upper.containers[0].lines[0].get_xydata().tolist() == [[5.0, 3.0]]
    assert lower.containers[0].lines[0].get_xydata().tolist() == [[5.0, 8.0]]


def test_numbers_along_a_gradient_of_zero_are_not_available():
    rows = _geometry_rows(LocalGeometry(0.69, 0.0, 0.0, 0.05, math.nan, math.nan, 12))
    assert rows["curvature along the gradient"] == "n/a: the gradient or its product is 0"
    assert rows["cosine of gradient and its product"] == "n/a: the gradient or its product is 0"
    assert rows["gradient norm"] == "0"
