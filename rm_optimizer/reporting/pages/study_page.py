"""The page of a comparison of optimizers: cautions first, verdicts, sensitivity to the rate, cost, every seed."""

from __future__ import annotations

from pathlib import Path

from rm_optimizer.experiments.optimizer_comparison.findings import ComparisonFindings, findings
from rm_optimizer.experiments.study.driver import Study
from rm_optimizer.reporting.optimizer_findings import finding_tables, methods
from rm_optimizer.reporting.optimizer_plots import plot_arm_differences, plot_curves, plot_rate_sensitivity
from rm_optimizer.reporting.pages.exhibits import Exhibits
from rm_optimizer.reporting.pages.html import answer, bullets, figures, page, paragraph, section
from rm_optimizer.reporting.pages.run_page import REPORT_FOLDER
from rm_optimizer.reporting.pages.study_trials import failure_lines


def write_study_page(study: Path, folder: Path | None = None) -> Path:
    """Write the page of a comparison of optimizers and return its file.

    Args:
        study: folder of the comparison.
        folder: where to write; None takes `report/` of the study.

    Raises:
        ConfigError: if no final trial is finished.
    """
    exhibits = Exhibits()
    content = study_page(findings(study), Study(study), exhibits)
    return exhibits.write(folder or study / REPORT_FOLDER, content)


def study_page(found: ComparisonFindings, study: Study, exhibits: Exhibits) -> str:
    """The page as HTML.

    Args:
        found: findings of the comparison.
        study: its trials.
        exhibits: gains the figures and tables of the page.
    """
    verdicts, tuning, cost = (
        exhibits.table(name, each.title, each.header, each.rows) if each.rows else ""
        for name, each in zip(("verdicts", "tuning", "cost"), finding_tables(found), strict=True)
    )
    curves = exhibits.figure("curves", plot_curves(found), "Validation NLL by step and by seconds")
    content = [
        _banner(found),
        section("Verdicts", verdicts, _differences(found, exhibits)),
        section("Sensitivity to the learning rate", tuning, figures(_rates(found, exhibits))),
        section("Cost and curvature", cost, paragraph(_NO_CAUSE)),
        section("Learning curves", figures(curves)),
        section("Every seed", _seeds(found, exhibits)),
        section("Failed and diverged runs", bullets(failure_lines(study)) or paragraph("None.")),
        section("Methods", paragraph(methods(found).replace("`", ""))),
    ]
    return page(f"Comparison of {', '.join(arm.name for arm in found.arms)}", content)


_NO_CAUSE = (
    "Curvature stands beside the scores and explains none of them: runs that differ in sharpness differ in much else."
)


def _banner(found: ComparisonFindings) -> str:
    primary = [item for item in found.verdicts if item.is_primary]
    decided = [item for item in primary if item.verdict in ("better", "worse")]
    reference = found.frozen.options.reference
    if not primary:
        return answer("bad", "No verdict", "Fewer than two common seeds have finished.", *found.warnings)
    if not decided:
        said = f"None of the {len(primary)} optimizers is shown to be better or worse than {reference} in test NLL."
        return answer("bad" if found.warnings else "fair", "Weak evidence", said, *found.warnings)
    lines = [f"In test NLL, {item.arm} is {item.verdict} than {reference}: {item.difference:+.3f}." for item in decided]
    headline = f"{len(decided)} of {len(primary)} differ from {reference}"
    return answer("fair" if found.warnings else "good", headline, *lines, *found.warnings)


def _differences(found: ComparisonFindings, exhibits: Exhibits) -> str:
    if not found.verdicts:
        return ""
    alt = f"Differences to {found.frozen.options.reference} in test NLL and accuracy, with intervals"
    return figures(exhibits.figure("differences", plot_arm_differences(found), alt))


def _rates(found: ComparisonFindings, exhibits: Exhibits) -> str:
    return exhibits.figure(
        "rates", plot_rate_sensitivity(found), "Validation NLL by learning rate, a line for each optimizer"
    )


def _seeds(found: ComparisonFindings, exhibits: Exhibits) -> str:
    rows = [
        (arm.name, str(seed), *(f"{arm.per_seed[name][at]:.4f}" for name in ("nll", "accuracy")))
        for arm in found.arms
        for at, seed in enumerate(arm.seeds)
    ]
    return exhibits.table("seeds", "Test scores of the final runs", ("optimizer", "seed", "NLL", "accuracy"), rows)
