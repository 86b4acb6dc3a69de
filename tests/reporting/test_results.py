"""Every result that has a figure draws it by `plot()`, and the others say which do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from rm_optimizer import BestOfNCurve, Evaluation, HessianSpectrum, OveroptimizationCurve, RLReadinessScorer
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.core.tokens.cache import TruncationReport
from rm_optimizer.landscape import Slice, Surface, Trajectory
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.run_folder import RESULT_FILE
from rm_optimizer.reporting.results import FIGURES
from rm_optimizer.training import RunResult
from tests.reporting.test_policy_plots import GOLD, PROXY
from tests.tutorial.test_results import large

STORED = json.loads((Path(__file__).parents[1] / "records" / "stored_results.json").read_text(encoding="utf-8"))
KINDS: dict[str, type[JsonRecord]] = {
    "metrics": PairwiseMetrics,
    "spectrum": HessianSpectrum,
    "slice": Slice,
    "surface": Surface,
    "trajectory": Trajectory,
}


def title(figure: object) -> str:
    assert isinstance(figure, Figure)
    assert all(axes.has_data() for axes in figure.axes[:1])
    return figure.axes[0].get_title(loc="left").strip()


@pytest.mark.parametrize("name", KINDS)
def test_a_stored_result_draws_itself(name: str):
    assert title(KINDS[name].from_json(STORED[name]).plot())


def test_a_run_draws_its_accuracy_and_an_evaluation_its_reliability(trained: Path):
    result = RunResult.from_json((trained / RESULT_FILE).read_text(encoding="utf-8"))
    evaluation = Evaluation(result.metrics, large(TruncationReport), False, None, None, 0, "m")
    shown = [title(each.plot()) for each in (result, evaluation, result.metrics)]
    assert shown == ["Pairwise accuracy", "Reliability", "Reliability"]


def test_results_of_policies_draw_themselves():
    rng = np.random.default_rng(1)
    proxy, noise = rng.normal(size=(2, 40, 64))
    fall = OveroptimizationCurve.of_best_of_n(proxy, proxy - 0.4 * proxy**2 + noise, num_bootstrap=50)
    assert title(BestOfNCurve.measure(PROXY, GOLD, num_bootstrap=50).plot()) == "Best of n"
    assert title(fall.plot()) == "Over-optimization"
    report = RLReadinessScorer().compute_score(accuracy=0.87, ece=0.05, reward_variance=1.2, top_eigenvalue=150.0)
    assert title(report.plot()).startswith("Readiness")


def test_a_result_without_a_figure_names_those_that_have_one():
    known = ", ".join(sorted(kind.__name__ for kind in FIGURES))
    with pytest.raises(TypeError, match=f"^no figure shows a result of type Estimate; there are figures of {known}$"):
        Estimate(0.5, None, 10).plot()
