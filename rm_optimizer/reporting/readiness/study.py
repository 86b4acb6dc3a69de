"""The validation of the readiness score: its tables in a terminal, and its picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from rich.text import Text

from rm_optimizer.experiments.readiness.predictors import FrozenChoice
from rm_optimizer.experiments.readiness.validation import EIGHTFOLD, JUDGED, MATCHED, SCORE, Validation
from rm_optimizer.reporting.style import BLUE, GRAY, GREEN, VERMILION, save_figure, two_panels
from rm_optimizer.reporting.tables import cell_text, new_table, output_console

PICTURE = "readiness_study.png"
_SHOWN = (
    "best_of_64",
    "rloo_kl_3",
    "rloo_kl_6",
    "rloo_kl_12",
    "grpo_kl_6",
    "unpenalized_kl_6",
    "unpenalized_final",
)
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
    """Print the candidates for each algorithm and the one that was chosen."""
    table = new_table("Development worlds: tau with each algorithm's gold", "candidate", *choice.fits)
    for name in next(iter(choice.fits.values())).tau:
        table.add_row(Text(name), *(cell_text(fit.tau[name]) for fit in choice.fits.values()))
    console = output_console()
    console.print(table)
    for algorithm, fit in choice.fits.items():
        terms = " and ".join(term.measured for term in fit.terms)
        console.print(f"frozen for {algorithm}: {terms}, ridge {fit.ridge:g}", markup=False, highlight=False)


def print_validation(found: Validation) -> None:
    """Print tau of every predictor and outcome, and how far the score is above accuracy."""
    console = output_console()
    title = f"Kendall's tau with gold rewards, mean over {len(found.worlds)} worlds, {found.num_models} reward models"
    table = new_table(title, "predictor", *(_TITLES[name] for name in _SHOWN), "regret at 6 nats")
    for predictor in dict.fromkeys(each.predictor for each in found.taus):
        cells = [f"{found.of(predictor, outcome).tau.value:.2f}" for outcome in _SHOWN]
        table.add_row(Text(predictor), *cells, f"{found.of(predictor, 'rloo_kl_6').regret:.2f}")
    console.print(table)
    table = new_table("The score's tau less accuracy's", "outcome", "over", "models drawn anew", "over worlds")
    for each in found.differences:
        table.add_row(
            Text(_TITLES[each.outcome]), each.baseline, cell_text(each.over_models), cell_text(each.over_worlds)
        )
    console.print(table)
    fallen, below = found.over_optimized
    console.print(
        f"over-optimized by RLOO without a penalty: {fallen:.0%} of the policies end more than 0.3 below their peak, "
        f"{below:.0%} below their start",
        markup=False,
        highlight=False,
    )
    for name, tau in found.agreement.items():
        console.print(f"tau between {name}: {cell_text(tau)}", markup=False, highlight=False)


def write_study_figure(found: Validation, folder: Path) -> Path:
    """Write the picture into the study's folder and return its file."""
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
    for field, (label, color) in _CURVES.items():
        points = [(point.labels, getattr(point, field)) for point in found.curve if getattr(point, field) is not None]
        if points:
            lower.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, label=label)
    lower.set_xscale("log", base=2)
    lower.set_xlabel("labels a reward model")
    lower.set_ylabel("tau, RLOO to 6 nats")
    lower.legend(loc="lower right", fontsize=8)
    return figure


_COLORS = {SCORE: BLUE, MATCHED: VERMILION, EIGHTFOLD: GRAY}
_CURVES = {"score": (SCORE, BLUE), "probe": ("probe of the best of 64", GREEN), "accuracy": ("accuracy", VERMILION)}
