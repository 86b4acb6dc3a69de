"""A picture shows the numbers it was given, says how many there were, and reaches the disk whole."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics, evaluate_pairs
from rm_optimizer.reporting.figures import save_figure
from rm_optimizer.reporting.run_report import plot_accuracy, plot_loss, plot_margins, plot_reliability

HISTORY = [
    {"step": "0", "train_loss": "", "train_acc": "", "eval_loss": "0.69", "eval_acc": "0.5", "eval_pairs": "1234"},
    {"step": "1", "train_loss": "0.7", "train_acc": "0.25", "eval_loss": "", "eval_acc": ""},
    {"step": "2", "train_loss": "nan", "train_acc": "0.5", "eval_loss": "", "eval_acc": ""},
    {"step": "3", "train_loss": 0.5, "train_acc": 0.75, "eval_loss": 0.6, "eval_acc": 0.625, "eval_pairs": 1234},
]


def line(axes: Axes, label: str) -> list[tuple[float, float]]:
    (found,) = [item for item in axes.get_lines() if str(item.get_label()).startswith(label)]
    return [(float(x), float(y)) for x, y in zip(found.get_xdata(), found.get_ydata(), strict=True)]


def caption(axes: Axes) -> str:
    return axes.texts[0].get_text()


def metrics(num_pairs: int = 300) -> PairwiseMetrics:
    rng = np.random.default_rng(0)
    prompts = [str(k) for k in range(num_pairs)]
    chosen, rejected = rng.normal(size=(2, num_pairs)) + np.array([[1.0], [0.0]])
    return evaluate_pairs(chosen, rejected, beta=1.0, prompt_ids=prompts, num_bootstrap=100, seed=0)


def test_loss_shows_the_filled_finite_cells_and_chance():
    (axes,) = plot_loss(HISTORY).axes
    assert line(axes, "training") == [(1.0, 0.7), (3.0, 0.5)]
    assert line(axes, "validation (last 0.600)") == [(0.0, 0.69), (3.0, 0.6)]
    assert {y for _, y in line(axes, "chance")} == {math.log(2)}
    assert "1,234 pairs" in caption(axes)


def test_accuracy_shows_the_ceiling_only_where_it_is_known():
    drawn = [plot_accuracy(HISTORY, ceiling=0.9), plot_accuracy(HISTORY)]
    assert {y for _, y in line(drawn[0].axes[0], "ceiling 0.900")} == {0.9}
    assert not [item for item in drawn[1].axes[0].get_lines() if str(item.get_label()).startswith("ceiling")]
    assert line(drawn[1].axes[0], "validation") == [(0.0, 0.5), (3.0, 0.625)]


def test_a_long_run_is_smoothed_over_the_window_the_caption_names():
    values = np.random.default_rng(0).uniform(0.4, 0.7, size=100)
    (axes,) = plot_loss([{"step": k, "train_loss": float(v)} for k, v in enumerate(values)]).axes
    smooth = [y for _, y in line(axes, "training")]
    assert "mean of 5 batches" in caption(axes)
    assert smooth[50] == pytest.approx(values[48:53].mean())
    assert smooth[0] == pytest.approx(values[:3].mean())


def test_a_short_last_batch_is_not_drawn_as_a_cliff():
    rows = [{"step": k, "train_loss": 0.5, "train_acc": 0.9, "train_pairs": 32.0} for k in (1, 2, 3)]
    figure = plot_accuracy([*rows, {"step": 4, "train_loss": 0.9, "train_acc": 0.25, "train_pairs": 4.0}])
    points = line(figure.axes[0], "training")
    assert [step for step, _ in points] == [1.0, 2.0, 3.0]
    assert [accuracy for _, accuracy in points] == pytest.approx([0.9] * 3)


def test_a_loss_that_hardly_falls_is_no_flat_line():
    (axes,) = plot_loss([{"step": k, "train_loss": 0.6931 - 1e-3 * k} for k in range(10)]).axes
    low, high = axes.get_ylim()
    assert 0.65 < low < 0.684 < 0.6931 < high < 0.75


def test_a_spike_does_not_flatten_the_rest():
    figure = plot_loss([{"step": k, "train_loss": 900.0 if k == 7 else 0.5} for k in range(200)])
    assert figure.axes[0].get_ylim()[1] < 1.0


def test_an_empty_history_is_drawn_empty(tmp_path: Path):
    for figure in (plot_loss([]), plot_accuracy([])):
        assert imread(save_figure(figure, tmp_path / "empty.png")[0]).size


def test_reliability_shows_every_bin_with_its_interval_and_count():
    result = metrics()
    figure = plot_reliability(result)
    curve, strip = figure.axes
    (points,) = [container for container in curve.containers if container.get_label().startswith("model")]
    shown = [tuple(map(float, point)) for point in points[0].get_xydata()]
    assert shown == [(item.mean_confidence, item.frequency) for item in result.reliability]
    ends = [(segment[0][1], segment[1][1]) for segment in points[2][0].get_segments()]
    assert ends == [pytest.approx((item.frequency_low, item.frequency_high)) for item in result.reliability]
    assert [text.get_text() for text in strip.texts] == [str(item.num_pairs) for item in result.reliability]
    assert str(result.ece) in caption(curve)


def test_reliability_of_a_collapsed_model_says_so():
    zeros = np.zeros(4)
    result = evaluate_pairs(zeros, zeros, beta=1.0, prompt_ids=list("abcd"), num_bootstrap=0, seed=0)
    figure = plot_reliability(result)
    assert caption(figure.axes[0]).startswith("collapsed: all 8 rewards are equal")


def test_margins_count_every_pair_once():
    margins = np.concatenate([np.random.default_rng(0).normal(0.5, 1.0, size=500), np.zeros(20)])
    (axes,) = plot_margins(margins).axes
    right, wrong = (margins > 0).sum(), (margins < 0).sum()
    heights = {container.get_label(): sum(bar.get_height() for bar in container) for container in axes.containers}
    hidden = int(axes.get_xlabel().split("; ")[1].split()[0]) if ";" in axes.get_xlabel() else 0
    assert sum(heights.values()) == right + wrong - hidden
    assert f"ranked wrongly {wrong / 520:.1%}, tied 3.8%" in caption(axes)
    assert "n = 520 pairs" in caption(axes)
    assert any("20 pairs" in str(item.get_label()) for item in axes.collections)


def test_an_outlier_is_counted_and_not_drawn():
    margins = np.concatenate([np.random.default_rng(0).normal(size=2000), [1e6]])
    (axes,) = plot_margins(margins).axes
    assert axes.get_xlim()[1] < 10
    assert axes.get_xlabel().endswith("pairs lie beyond")


@pytest.mark.parametrize("margins", [np.zeros(5), np.ones(1), np.array([-1e-9, 1e-9])])
def test_degenerate_margins_are_drawn(margins: np.ndarray, tmp_path: Path):
    assert imread(save_figure(plot_margins(margins), tmp_path / "margins.png")[0]).size


def test_no_margins_are_an_error():
    with pytest.raises(ValueError, match="at least one pair"):
        plot_margins(np.zeros(0))


def test_pictures_are_150_dpi_and_the_same_bytes_each_time(tmp_path: Path):
    first, second = (save_figure(plot_loss(HISTORY), tmp_path / name)[0] for name in ("a.png", "b.png"))
    assert imread(first).shape[:2] == (630, 1050)
    assert first.read_bytes() == second.read_bytes()


def test_a_picture_replaces_the_old_one_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (path,) = save_figure(plot_loss(HISTORY), tmp_path / "new" / "loss.png")
    before = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("rm_optimizer.records.files.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_figure(plot_accuracy(HISTORY), path)
    assert path.read_bytes() == before
    assert [item.name for item in path.parent.iterdir()] == ["loss.png"]
    monkeypatch.undo()
    save_figure(plot_accuracy(HISTORY), path)
    assert path.read_bytes() != before
    assert [item.name for item in path.parent.iterdir()] == ["loss.png"]


@pytest.mark.slow
def test_drawing_imports_no_pyplot():
    code = "import sys, rm_optimizer.reporting.run_report; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
