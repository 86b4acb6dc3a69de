"""Rows and words of a figure: series by their legend, names of an axis, guides, bars and intervals."""

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.reporting.figures import described, figure_rows, new_figure


def test_a_figure_is_told_by_its_axes_guides_series_and_extremes():
    figure, (axes,) = new_figure("Loss", "n = 8 pairs")
    axes.chance(0.5)
    axes.curve([1, 2, 3], [4.0, float("nan"), 1.0], "training")
    axes.curve([1, 2, 3, 4], [4.0, 5.0, 1.0, 2.0], "validation")
    axes.estimates([1.0], [Estimate(2.0, None, 8, 1.5, 2.25)], "one")
    axes.bars([1.0, 2.0], [3.0, 4.0], "pairs")
    axes.curve([], [], "empty")
    axes.set(xlabel="step", ylabel="nats", xlim=(0, 5), ylim=(0, 6))
    words = described(figure)
    assert words.startswith("Loss: n = 8 pairs. Horizontal axis: step, from 0 to 5. Vertical axis: nats, from 0 to 6.")
    for sentence in (
        "chance: 0.5.",
        "training: 4 at 1, 1 at 3.",
        "validation: 4 points, first 4 at 1, last 2 at 4, lowest 1 at 3, highest 5 at 2.",
        "one: 2 at 1.",
        "pairs: 3 at 1, 4 at 2.",
    ):
        assert sentence in words
    assert "empty" not in words
    assert [row for row in figure_rows(figure) if row["low"] is not None] == [
        {"panel": 0, "series": "one", "x": 1.0, "y": 2.0, "low": 1.5, "high": 2.25}
    ]


def test_names_on_an_axis_name_points_and_intervals():
    figure, (axes,) = new_figure("Differences", "")
    axes.named(0, "muon", Estimate(0.25, None, 8, 0.1, 0.4))
    axes.named(1, "sgd", Estimate(0.5, None, 1))
    assert figure_rows(figure) == [
        {"panel": 0, "series": "muon", "x": 0.25, "y": None, "low": 0.1, "high": 0.4},
        {"panel": 0, "series": "sgd", "x": 0.5, "y": None, "low": None, "high": None},
    ]
    assert "muon: 0.25, from 0.1 to 0.4. sgd: 0.5." in described(figure)


def test_many_series_are_counted_rather_than_told():
    figure, (axes,) = new_figure("Many", "")
    for number in range(15):
        axes.curve([0, 1], [number, number], f"arm {number}")
    assert "arm 11: 11 at 0, 11 at 1." in described(figure)
    assert described(figure).endswith("3 more series are in the table.")
