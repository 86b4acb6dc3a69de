"""Figure of each kind of result, which `result.plot()` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.evaluation.saved_model import Evaluation
from rm_optimizer.evaluation.suite_scores import SuiteResult
from rm_optimizer.experiments.optimizer_comparison.findings import ComparisonFindings
from rm_optimizer.experiments.run_comparison import RunComparison
from rm_optimizer.landscape.visualization import LandscapeRecord
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.reporting.comparison import plot_differences
from rm_optimizer.reporting.landscape.results import drawings
from rm_optimizer.reporting.optimizer_comparison import plot_arm_differences
from rm_optimizer.reporting.policy_plots import plot_best_of_n, plot_overoptimization, plot_policy_run
from rm_optimizer.reporting.readiness import plot_readiness
from rm_optimizer.reporting.run_report import plot_accuracy, plot_reliability
from rm_optimizer.reporting.suite import plot_suite
from rm_optimizer.rl_coupling.best_of_n_curve import BestOfNCurve
from rm_optimizer.rl_coupling.overoptimization import OveroptimizationCurve
from rm_optimizer.rl_coupling.readiness.report import RLReadinessReport
from rm_optimizer.rl_coupling.rlhf import RLHFResult
from rm_optimizer.training.folder.record import RunResult


def figure_of(result: object) -> Figure:
    """The figure that shows a result.

    Raises:
        TypeError: if no figure shows results of its kind.
    """
    for kind, draw in FIGURES.items():
        if isinstance(result, kind):
            return draw(result)
    known = ", ".join(sorted(kind.__name__ for kind in FIGURES))
    raise TypeError(f"no figure shows a result of type {type(result).__name__}; there are figures of {known}")


def _of_a_landscape(result: LandscapeRecord) -> Figure:
    figure = drawings(result)[0].figure
    assert figure is not None, "only later drawings are rows alone"
    return figure


FIGURES: Mapping[type, Callable[[Any], Figure]] = {
    RunResult: lambda run: plot_accuracy(RunFolder(Path(run.run_dir)).metrics(), ceiling=run.data.ceiling),
    Evaluation: lambda found: plot_reliability(found.metrics),
    PairwiseMetrics: plot_reliability,
    RunComparison: plot_differences,
    ComparisonFindings: plot_arm_differences,
    BestOfNCurve: plot_best_of_n,
    OveroptimizationCurve: plot_overoptimization,
    RLHFResult: plot_policy_run,
    RLReadinessReport: plot_readiness,
    LandscapeRecord: _of_a_landscape,
    SuiteResult: plot_suite,
}
"""Function that draws each kind of result."""
