"""Pages of the studies of labels: labels that rules save, and training without suspected labels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rm_optimizer.data_efficiency.cleaning.cleaning_study import CleaningRow
from rm_optimizer.data_efficiency.savings.label_savings import LabelSavings
from rm_optimizer.data_efficiency.savings.label_study import curves
from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.study.driver import Study
from rm_optimizer.records.codec import JsonRecord, from_values
from rm_optimizer.reporting.label_studies.cleaning import (
    CLEANING_FILE,
    CLEANING_HEAD,
    CLEANING_LEGEND,
    CLEANING_TITLE,
    cleaning_cells,
)
from rm_optimizer.reporting.label_studies.label_savings import (
    SAVINGS_FILE,
    SAVINGS_HEAD,
    placebo_warning,
    plot_learning_curves,
    plot_savings,
    savings_cells,
    savings_title,
)
from rm_optimizer.reporting.pages.exhibits import Exhibits
from rm_optimizer.reporting.pages.html import answer, figures, page, paragraph, section
from rm_optimizer.reporting.pages.run_page import REPORT_FOLDER
from rm_optimizer.reporting.pages.study_trials import trials_section

RecordT = TypeVar("RecordT", bound=JsonRecord)


def write_savings_page(study: Path, folder: Path | None = None) -> Path:
    """Write the page of a study of saved labels and return its file.

    Args:
        study: folder of the study.
        folder: where to write; None takes `report/` of the study.

    Raises:
        ConfigError: if the study has no result yet, or it is damaged.
    """
    found = _read(study / SAVINGS_FILE, LabelSavings, f"rm-opt study labels {study}")
    exhibits, runner = Exhibits(), Study(study)
    rows = [row for row in runner.rows() if row["state"] == "finished"]
    content = [_savings_answer(found)]
    for number, pool in enumerate(found):
        own = [row for row in rows if row["pool"] == pool.pool]
        pictures = [exhibits.figure(f"savings_{number}", plot_savings(pool), f"Labels saved by each rule: {pool.pool}")]
        if own:
            drawn = plot_learning_curves(pool, *curves(own, "accuracy"))
            pictures += [exhibits.figure(f"curves_{number}", drawn, f"Test accuracy by labels: {pool.pool}")]
        table = exhibits.table(f"rules_{number}", savings_title(pool), SAVINGS_HEAD, savings_cells(pool))
        warning = "" if pool.is_accepted else paragraph(f"Not accepted: {placebo_warning(pool)}.")
        content.append(section(f"Pool {pool.pool}", warning, figures(*pictures), table))
    content.append(trials_section(runner))
    return exhibits.write(folder or study / REPORT_FOLDER, page("Labels saved by choosing pairs", content))


def _savings_answer(found: Sequence[LabelSavings]) -> str:
    accepted = [pool for pool in found if pool.is_accepted]
    said = []
    for pool in accepted:
        best = pool.rules[0]
        said.append(f"{pool.pool}: {best.rule} saves {best.saving:.0%} of {pool.budget:,} labels")
    if len(accepted) < len(found):
        refuted = ", ".join(pool.pool for pool in found if not pool.is_accepted)
        said.append(f"the placebo refutes what is measured in {refuted}")
    said.append("the interval of the best of several rules is somewhat too narrow, since it was picked")
    if not accepted:
        return answer("bad", "No saving is shown", *said)
    return answer("fair" if len(accepted) < len(found) else "good", "The best rule of each pool", *said)


def write_cleaning_page(study: Path, folder: Path | None = None) -> Path:
    """Write the page of a study of training without suspected labels and return its file.

    Args:
        study: folder of the study.
        folder: where to write; None takes `report/` of the study.

    Raises:
        ConfigError: if the study has no result yet, or it is damaged.
    """
    found = _read(study / CLEANING_FILE, CleaningRow, f"rm-opt study cleaning {study}")
    exhibits = Exhibits()
    gains = [row for row in found if row.gain.low is not None and row.gain.low > 0]
    said = [f"{row.pool}, {row.flips:.0%} turned: {100 * row.gain.value:+.2f} points of test accuracy" for row in gains]
    content = [
        answer("good", "Training without suspects helps here", *said)
        if gains
        else answer("open", "No gain is shown", "no interval of the gain lies above 0"),
        section(
            "Result",
            exhibits.table("cleaning", CLEANING_TITLE, CLEANING_HEAD, cleaning_cells(found)),
            paragraph(f"{CLEANING_LEGEND}."),
        ),
        trials_section(Study(study)),
    ]
    return exhibits.write(folder or study / REPORT_FOLDER, page("Training without suspected labels", content))


def _read(path: Path, kind: type[RecordT], command: str) -> list[RecordT]:
    """The records of a study's result.

    Raises:
        ConfigError: if it is missing or damaged.
    """
    try:
        return [from_values(kind, values) for values in json.loads(path.read_text(encoding="utf-8"))]
    except OSError as error:
        raise ConfigError(f"{path} is missing: the study has no result yet; {command} goes on") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is damaged; {command} writes it again") from error
