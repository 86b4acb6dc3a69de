"""Rows and words of a figure: series by their legend, names of an axis, guides, bars and intervals."""

from rm_optimizer.reporting.pages.figure_data import described, figure_rows
from rm_optimizer.reporting.style import new_figure


def test_a_figure_is_told_by_its_axes_guides_series_and_extremes():
    figure, (axes,) = new_figure("Loss", "n = 8 pairs")
    axes.axhline(0.5, label="chance")
    axes.plot([1, 2, 3], [4.0, float("nan"), 1.0], label="training")
    axes.plot([1, 2, 3, 4], [4.0, 5.0, 1.0, 2.0], label="validation")
    axes.errorbar([1.0], [2.0], yerr=[[0.5], [0.25]], label="one")
    axes.bar([1.0, 2.0], [3.0, 4.0], label="pairs")
    axes.plot([], [], label="empty")
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
        {"panel": 0, "series": "", "x": 1.0, "y": None, "low": 1.5, "high": 2.25}
    ]


def test_names_on_an_axis_name_points_and_intervals():
    figure, (axes,) = new_figure("Differences", "")
    axes.plot([0.25], [0], marker="o")
    axes.hlines(0, 0.1, 0.4)
    axes.plot(["a", "b"], [1.0, 1.0], label="words")
    axes.set_yticks([0, 1], ["muon", "sgd"])
    assert figure_rows(figure)[0] == {"panel": 0, "series": "muon", "x": 0.25, "y": None, "low": None, "high": None}
    assert {"panel": 0, "series": "muon", "x": None, "y": None, "low": 0.1, "high": 0.4} in figure_rows(figure)


def test_many_series_are_counted_rather_than_told():
    figure, (axes,) = new_figure("Many", "")
    for number in range(15):
        axes.plot([0, 1], [number, number], label=f"arm {number}")
    assert "arm 11: 11 at 0, 11 at 1." in described(figure)
    assert described(figure).endswith("3 more series stand in the table.")
