"""Pictures, rows and tables of curvature along a run and between models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.landscape.estimates.cross_fitting import CrossFit
from rm_optimizer.landscape.series import BetweenModels, Evolution, LossPath
from rm_optimizer.landscape.spectrum import HessianSpectrum
from rm_optimizer.reporting.landscape.runs import (
    between_rows,
    between_scalars,
    evolution_rows,
    path_rows,
    plot_between,
    plot_evolution,
)
from tests.landscape.test_quantities import spectrum


def crossed(count: int, scale: float = 1.0) -> HessianSpectrum:
    """A spectrum of `count` eigenvalues, all of them cross-fitted."""
    values = tuple(scale * (count - index) for index in range(count))
    estimates = tuple(Estimate(value / 2, 0.1, 64, value / 4, value) for value in values)
    return replace(
        spectrum(values, is_exhaustive=False, ends=(count, 0)), cross_fit=CrossFit(estimates, 0.1, 9.0, (), 3)
    )


def between(names: tuple[str, ...], *, count: int = 3) -> BetweenModels:
    path = LossPath(0, 1, (0.0, 0.5, 1.0), (0.6, 0.9, 0.7), Estimate(0.2, 0.05, 60, 0.1, 0.3))
    spectra = tuple(crossed(count, 1.0 + index) for index in range(len(names)))
    return BetweenModels(names, spectra, (0.25,), (path,), 60, "a at step 40, b at step 20; pairs of world (train)")


def test_more_cross_fitted_values_than_are_drawn_leave_a_picture_and_whole_rows():
    result = between(("a", "b"), count=12)
    upper = plot_between(result).axes[0]
    drawn = [len(container.lines[0].get_xdata()) for container in upper.containers]
    assert drawn == [10, 10, 10, 10]  # of each model the eigenvalues, and those of them that are cross-fitted
    rows = between_rows(result)
    assert [row["cross_fitted"] for row in rows[:12]] == [each.value for each in result.spectra[0].cross_fit.values]


def test_captions_name_models_steps_pairs_and_what_is_missing():
    whole = " ".join(plot_between(between(("a", "b"))).axes[0].texts[0].get_text().split())
    assert whole.startswith("n = 64 pairs of 60 prompts")
    assert whole.endswith("seed 0; a at step 40, b at step 20; pairs of world (train)")
    partial = plot_between(between(("a", "b", "c"))).axes[0].texts[0].get_text()
    assert partial.startswith("PARTIAL, 1 of 3 paths; ")
    along = Evolution((0, 10), (crossed(3), crossed(3)), (None, 0.5), (), "runs/a; pairs of world (train)")
    caption = " ".join(plot_evolution(along).axes[0].texts[0].get_text().split())
    assert caption.endswith("diamonds: cross-fitted, with their 95 % intervals; seed 0; runs/a; pairs of world (train)")


def test_the_cross_fitted_course_has_its_interval_in_picture_and_rows():
    result = Evolution((0, 10), (crossed(2), crossed(2, 3.0)), (None, 0.5), ())
    figure = plot_evolution(result)
    assert "largest 2" in [each.get_label() for each in figure.axes[0].containers]
    [course] = [each for each in figure.axes[0].containers if each.get_label() == "largest 1, cross-fitted"]
    bars = [segment[:, 1].tolist() for segment in course.lines[2][0].get_segments()]
    assert bars == [pytest.approx([0.5, 2.0]), pytest.approx([1.5, 6.0])]
    first = evolution_rows(result)[0]
    assert [first[name] for name in ("cross_fitted", "cross_fitted_low", "cross_fitted_high")] == [1.0, 0.5, 2.0]


def test_a_legend_stands_beside_the_data_unless_its_words_are_long():
    short, long = (plot_between(between(names)).axes[1] for names in (("a", "b"), ("a" * 30, "b" * 30)))
    for axes in (short, long):
        axes.figure.canvas.draw()
    assert short.get_legend().get_window_extent().x0 > short.get_window_extent().x1
    assert long.get_legend().get_window_extent().x1 < long.get_window_extent().x1
    assert long.get_position().width > 0.5


def test_loggers_get_each_model_and_each_way():
    scalars = between_scalars(between(("a", "b")))
    assert scalars["a/eigenvalue_largest"] == 3.0
    assert scalars["b/eigenvalue_cross_fitted"] == 3.0
    assert scalars["a to b/barrier"] == 0.2
    assert scalars["a to b/subspace_overlap"] == 0.25
    assert {row["barrier_low"] for row in path_rows(between(("a", "b")))} == {0.1}
