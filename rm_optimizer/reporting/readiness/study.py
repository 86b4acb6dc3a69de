"""The validation of the readiness score: its tables in a terminal, and its picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rm_optimizer.experiments.readiness.predictors import FrozenChoice
from rm_optimizer.experiments.readiness.validation import EIGHTFOLD, JUDGED, MATCHED, SCORE, Validation
from rm_optimizer.reporting.style import BLUE, GRAY, GREEN, VERMILION, save_figure, two_panels
from rm_optimizer.reporting.tables import TextTable, output_console

PICTURE = "readiness_study.png"
_SHOWN = tuple(name for name in JUDGED if name not in ("best_of_16", "best_of_256"))
_TITLES = {
    "best_of_16": "best of 16",
    "best_of_64": "best of 64",
    "best_of_256": "best of 256",
    "rloo_kl_3": "RLOO, 3 nats",
    "rloo_kl_6": "RLOO, 6 nats",
    "rloo_kl_12": "RLOO, 12 nats",
    "grpo_kl_6": "GRPO, 6 nats",
    "unpenalized_kl_6": "no penalty, 6 nats",
    "unpenalized_final": "no penalty, end",
}


def print_choice(choice: FrozenChoice) -> None:
    """Print the candidates for each algorithm, and the chosen one."""
    output_console().print(choice_table(choice).drawn())
    for line in choice_lines(choice):
        output_console().print(line, markup=False, highlight=False)


def print_validation(found: Validation) -> None:
    """Print tau of every predictor and outcome, and the score's difference from accuracy."""
    for table in validation_tables(found):
        output_console().print(table.drawn())
    for line in validation_lines(found):
        output_console().print(line, markup=False, highlight=False)


def choice_table(choice: FrozenChoice) -> TextTable:
    """Tau of each candidate on the development worlds."""
    names = next(iter(choice.fits.values())).tau
    return TextTable(
        "Development worlds: tau with each algorithm's gold",
        ("candidate", *choice.fits),
        tuple((name, *(f"{fit.tau[name]:.3f}" for fit in choice.fits.values())) for name in names),
    )


def choice_lines(choice: FrozenChoice) -> list[str]:
    """The chosen fit of each algorithm."""
    return [
        f"frozen for {algorithm}: {' and '.join(term.measured for term in fit.terms)}, ridge {fit.ridge:g}"
        for algorithm, fit in choice.fits.items()
    ]


def validation_tables(found: Validation) -> tuple[TextTable, TextTable]:
    """Tau of every predictor and outcome, and the score's tau less accuracy's."""
    title = f"Kendall's tau with gold rewards, mean over {len(found.worlds)} worlds, {found.num_models} reward models"
    taus = tuple(
        (
            predictor,
            *(f"{found.of(predictor, outcome).tau.value:.2f}" for outcome in _SHOWN),
            f"{found.of(predictor, 'rloo_kl_6').regret:.2f}",
        )
        for predictor in dict.fromkeys(each.predictor for each in found.taus)
    )
    differences = tuple(
        (_TITLES[each.outcome], each.baseline, f"{each.over_models:.3f}", f"{each.over_worlds:.3f}")
        for each in found.differences
    )
    head = ("outcome", "over", "models drawn anew", "over worlds")
    return (
        TextTable(title, ("predictor", *(_TITLES[name] for name in _SHOWN), "regret at 6 nats"), taus),
        TextTable("The score's tau less accuracy's", head, differences),
    )


def validation_lines(found: Validation) -> list[str]:
    """Over-optimization, and the agreement of two measurements of gold."""
    fallen, below = found.over_optimized
    return [
        f"over-optimized by RLOO without a penalty: {fallen:.0%} of the policies end more than 0.3 below their peak, "
        f"{below:.0%} below their start",
        *(f"tau between {name}: {tau:.3f}" for name, tau in found.agreement.items()),
    ]


def write_study_figure(found: Validation, folder: Path) -> Path:
    """Write the picture into the study's folder and return its path."""
    return save_figure(plot_study(found), folder / PICTURE)[0]


def plot_study(found: Validation) -> Figure:
    """Tau of the score and of accuracy for every outcome, and tau against labels."""
    caption = (
        f"{found.num_models} reward models of {len(found.worlds)} synthetic worlds with tiny policies; "
        "bars: 95 % over worlds"
    )
    figure, (upper, lower) = two_panels("Rank correlation with gold rewards", caption, ratios=(3, 2), shares_x=False)
    figure.set_size_inches(7.5, 8.5)
    for shift, (name, color) in zip((-0.2, 0.0, 0.2), _COLORS.items(), strict=True):
        for place, outcome in enumerate(reversed(JUDGED)):
            tau = found.of(name, outcome).tau
            if tau.low is not None and tau.high is not None:
                upper.plot([tau.low, tau.high], [place - shift] * 2, color=color, linewidth=1.5)
            upper.plot(tau.value, place - shift, "o", color=color, markersize=5, label=name if place == 0 else None)
    upper.set_yticks(range(len(JUDGED)), [_TITLES[name] for name in reversed(JUDGED)])
    upper.set_xlim(-1.02, 1.02)
    upper.set_xlabel("Kendall's tau")
    upper.axvline(0, color=GRAY, linewidth=0.8)
    upper.legend(loc="lower right", fontsize=8)
    _draw_labels(lower, found)
    return figure


def _draw_labels(axes: Axes, found: Validation) -> None:
    for field, (label, color) in _CURVES.items():
        points = [(point.labels, getattr(point, field)) for point in found.curve if getattr(point, field) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("labels a reward model")
    axes.set_ylabel("tau, RLOO to 6 nats")
    axes.legend(loc="lower right", fontsize=8)


_COLORS = {SCORE: BLUE, MATCHED: VERMILION, EIGHTFOLD: GRAY}
_CURVES = {"score": (SCORE, BLUE), "probe": ("probe of the best of 64", GREEN), "accuracy": ("accuracy", VERMILION)}
