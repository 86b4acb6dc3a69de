"""Pictures of several runs show each run's numbers, and differences on the side that is better."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.experiments.run_comparison import ArmDifference, ArmScores, RunComparison
from rm_optimizer.landscape.spectrum import HessianSpectrum
from rm_optimizer.reporting.comparison import plot_differences, plot_learning_curves, plot_spectra

STORED = Path(__file__).parents[1] / "records" / "stored_results.json"


def lines(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    return {
        str(line.get_label()): [tuple(map(float, xy)) for xy in np.transpose(line.get_data())]
        for line in axes.get_lines()
    }


def history(nll: list[float], batch: int = 8) -> list[dict[str, str]]:
    return [
        {"step": str(step), "train_pairs": str(batch) if step else "", "eval_nll": str(value), "eval_acc": "0.5"}
        for step, value in enumerate(nll)
    ]


def test_curves_show_the_mean_over_seeds_and_each_seed():
    histories = {"a": [history([0.7, 0.5]), history([0.9, 0.7])], "b": [history([0.6, 0.4])]}
    figure = plot_learning_curves(histories, same_pairs=True)
    drawn = lines(figure.axes[0])
    assert drawn["a"] == [(0.0, 0.8), (1.0, 0.6)]
    assert drawn["b"] == [(0.0, 0.6), (1.0, 0.4)]
    assert len(drawn) == 5  # chance and two pale lines
    assert figure.axes[1].get_xlabel() == "optimizer step"


def test_curves_of_different_batch_sizes_stand_over_pairs():
    figure = plot_learning_curves({"a": [history([0.7, 0.5])], "b": [history([0.6, 0.4], batch=32)]}, same_pairs=False)
    assert lines(figure.axes[0])["b"] == [(0.0, 0.6), (32.0, 0.4)]
    assert figure.axes[1].get_xlabel() == "training pairs"
    assert "its own validation pairs" in figure.axes[0].texts[0].get_text()


def test_a_run_without_evaluations_has_no_curve():
    figure = plot_learning_curves({"a": [[]], "b": [history([0.6])]}, same_pairs=True)
    assert "a" not in lines(figure.axes[0]) or lines(figure.axes[0])["a"] == []


def test_differences_stand_with_their_intervals():
    def arm(name: str) -> ArmScores:
        return ArmScores(name=name, options={}, runs=(name,), seeds=(0,), scores={}, deviations={})

    estimates = {"accuracy": Estimate(0.1, 0.02, 9, 0.06, 0.14), "nll": Estimate(0.2, None, 9)}
    comparison = RunComparison(
        baseline="a",
        num_pairs=1234,
        num_prompts=56,
        runs=(),
        arms=(arm("a"), arm("b")),
        differences=tuple(ArmDifference(arm="b", score=k, estimate=v, num_seeds=1) for k, v in estimates.items()),
        notes=(),
    )
    accuracy, nll = plot_differences(comparison).axes
    (interval,) = accuracy.collections
    assert [tuple(point) for point in interval.get_segments()[0]] == [(0.06, 0.0), (0.14, 0.0)]
    assert not nll.collections
    assert "1,234 common validation pairs" in accuracy.texts[0].get_text()
    assert accuracy.get_xlabel().endswith("(right is better)")
    assert nll.get_xlabel().endswith("(left is better)")


def test_spectra_stand_over_one_another_and_tell_unlike_sizes():
    first = HessianSpectrum.from_json(json.loads(STORED.read_text())["spectrum"])
    doubled = replace(first, eigenvalues=tuple(2 * value for value in first.eigenvalues), num_pairs=7)
    axes = plot_spectra({"one": first, "two": doubled}).axes
    drawn = [[float(y) for y in bars.lines[0].get_ydata()] for bars in axes[0].containers]
    assert drawn == [[scale * value for value in first.eigenvalues[: first.num_top]] for scale in (1, 2)]
    assert "not quite comparable" in axes[0].texts[0].get_text()
