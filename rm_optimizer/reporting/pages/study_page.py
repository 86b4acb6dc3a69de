"""The page of a comparison of optimizers: cautions, verdicts, sensitivity to the learning rate, cost, every seed."""

from __future__ import annotations

import math
from pathlib import Path

from rm_optimizer.experiments.optimizer_comparison.findings import ComparisonFindings, NotFinished, findings
from rm_optimizer.experiments.optimizer_comparison.setting import Budget
from rm_optimizer.experiments.optimizer_comparison.stages import Stages
from rm_optimizer.experiments.study import Study
from rm_optimizer.reporting.optimizer_findings import finding_tables, methods
from rm_optimizer.reporting.optimizer_plots import (
    plot_arm_differences,
    plot_curves,
    plot_rate_sensitivity,
    plot_reliabilities,
    plot_sharpness,
)
from rm_optimizer.reporting.pages.document import Answer, Document, Drawing, Listing, Part
from rm_optimizer.reporting.pages.study_trials import TrialRows, failure_lines, trials_part


def comparison_document(folder: Path) -> Document:
    """The page of a comparison of optimizers; only its trials until every optimizer has a finished final run.

    Args:
        folder: folder of the comparison.

    Raises:
        ConfigError: if the folder holds no comparison, or one that has not started.
    """
    study = Study(folder)
    rows = list(study.rows())
    try:
        found = findings(folder)
    except NotFinished as error:
        title = f"Comparison of {', '.join(Stages(folder).frozen.options.optimizers)}"
        return Document(title, Answer("open", "No result yet", (str(error),)), [trials_part(study.plan, rows)])
    return findings_document(found, rows)


def findings_document(found: ComparisonFindings, rows: TrialRows) -> Document:
    """The page of a comparison's findings and trials (`Study.rows`)."""
    return Document(f"Comparison of {', '.join(arm.name for arm in found.arms)}", _answer(found), _parts(found, rows))


_NO_CAUSE = (
    "Curvature stands beside the scores and explains none of them: runs that differ in sharpness differ in much else."
)


def _parts(found: ComparisonFindings, rows: TrialRows) -> list[Part]:
    verdicts, tuning, cost, seeds = (
        Listing(name, table)
        for name, table in zip(("verdicts", "tuning", "cost", "seeds"), finding_tables(found), strict=True)
    )
    reference = found.frozen.options.reference
    rates = Drawing("rates", plot_rate_sensitivity(found), "Validation NLL by learning rate, a line for each optimizer")
    curves = Drawing("curves", plot_curves(found), "Validation NLL by step and by seconds")
    reliability = Drawing("reliability", plot_reliabilities(found), "How often the model is right, by how sure it is")
    return [
        Part("Verdicts", (verdicts, *_differences(found, reference))),
        Part("Sensitivity to the learning rate", (tuning, rates)),
        Part("Reliability", (reliability,)),
        Part("Cost and curvature", (cost, _NO_CAUSE, *_sharpness(found))),
        Part("Learning curves", (curves,)),
        Part("Every seed", (seeds,)),
        Part("Failed and diverged runs", (failure_lines(rows) or "None.",)),
        Part("Methods", (methods(found).replace("`", ""),)),
    ]


def _answer(found: ComparisonFindings) -> Answer:
    primary = [item for item in found.verdicts if item.is_primary]
    decided = [item for item in primary if item.verdict in ("better", "worse")]
    reference = found.frozen.options.reference
    if not primary:
        few = () if found.frozen.options.budget == Budget.smoke else ("fewer than two common seeds have finished",)
        return Answer("bad", "No verdict", (*few, *found.warnings))
    if not decided:
        said = f"none of the {len(primary)} optimizers is shown to be better or worse than {reference} in test NLL"
        return Answer("bad" if found.warnings else "fair", "Weak evidence", (said, *found.warnings))
    lines = [f"in test NLL, {item.arm} is {item.verdict} than {reference}: {item.difference:+.3f}" for item in decided]
    headline = f"{len(decided)} of {len(primary)} differ from {reference}"
    return Answer("fair" if found.warnings else "good", headline, (*lines, *found.warnings))


def _differences(found: ComparisonFindings, reference: str) -> list[Drawing]:
    if not found.verdicts:
        return []
    caption = f"Differences to {reference} in test NLL and accuracy, with intervals"
    return [Drawing("differences", plot_arm_differences(found), caption)]


def _sharpness(found: ComparisonFindings) -> list[Drawing]:
    if not any(map(math.isfinite, (value for arm in found.arms for value in arm.per_seed["top_eigenvalue"]))):
        return []
    return [
        Drawing("sharpness", plot_sharpness(found), "Test accuracy beside the top eigenvalue, a point for each run")
    ]
