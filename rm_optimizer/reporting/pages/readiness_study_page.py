"""The page of a validation of the readiness score: its test first, or that there was none."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.readiness.predictors import FrozenChoice
from rm_optimizer.experiments.readiness.study import FROZEN_FILE, VALIDATION_FILE, WORDING
from rm_optimizer.experiments.readiness.validation import EIGHTFOLD, MATCHED, SCORE, Validation
from rm_optimizer.experiments.study.driver import Study
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.reporting.pages.exhibits import Exhibits
from rm_optimizer.reporting.pages.html import answer, bullets, figures, page, paragraph, section
from rm_optimizer.reporting.pages.run_page import REPORT_FOLDER
from rm_optimizer.reporting.pages.study_trials import trials_section
from rm_optimizer.reporting.readiness.study import (
    StudyTable,
    choice_lines,
    choice_table,
    plot_study,
    validation_lines,
    validation_tables,
)

RecordT = TypeVar("RecordT", bound=JsonRecord)


def write_readiness_study_page(study: Path, folder: Path | None = None) -> Path:
    """Write the page of a readiness study and return its file.

    Args:
        study: folder of the study.
        folder: where to write; None takes `report/` of the study.

    Raises:
        ConfigError: if a result is damaged.
    """
    exhibits = Exhibits()
    choice, found = _read(study / FROZEN_FILE, FrozenChoice), _read(study / VALIDATION_FILE, Validation)
    content = [
        _answer(found),
        "" if found is None else _test(found, exhibits),
        "" if choice is None else _choice(choice, exhibits),
        trials_section(Study(study)),
    ]
    return exhibits.write(folder or study / REPORT_FOLDER, page("Validation of the readiness score", content))


def _answer(found: Validation | None) -> str:
    if found is None:
        said = "the test worlds have no result yet; rm-opt study readiness FOLDER --worlds test makes the test"
        return answer("open", "Not tested", said, f"whatever is below is {WORDING}")
    gains = {each.baseline: each for each in found.differences if each.outcome == "rloo_kl_6"}
    lines = [
        f"with gold after RLOO to 6 nats, the score has Kendall's tau {found.of(SCORE, 'rloo_kl_6').tau:.2f}",
        *(
            f"that is {gains[name].over_models.value:+.2f} [{gains[name].over_models.low:.2f}, "
            f"{gains[name].over_models.high:.2f}] above {name}"
            for name in (MATCHED, EIGHTFOLD)
        ),
        f"all of this is {WORDING}",
    ]
    low = gains[MATCHED].over_models.low
    if low is not None and low > 0:
        return answer("good", "The score ranks reward models better than accuracy", *lines)
    return answer("bad", "The score is not shown to rank better than accuracy", *lines)


def _test(found: Validation, exhibits: Exhibits) -> str:
    alt = "Tau of the score and of accuracy for every outcome, and tau by labels"
    tables = (
        _table(exhibits, name, table)
        for name, table in zip(("taus", "differences"), validation_tables(found), strict=True)
    )
    picture = figures(exhibits.figure("validation", plot_study(found), alt))
    return section("Test", picture, *tables, bullets(validation_lines(found)))


def _choice(choice: FrozenChoice, exhibits: Exhibits) -> str:
    worlds = ", ".join(map(str, choice.development))
    about = f"Chosen on the worlds {worlds} of {choice.models} reward models each, before a test world was measured."
    table = _table(exhibits, "choice", choice_table(choice))
    return section("Choice", paragraph(about), bullets(choice_lines(choice)), table)


def _table(exhibits: Exhibits, name: str, table: StudyTable) -> str:
    return exhibits.table(name, table.title, table.head, table.rows)


def _read(path: Path, kind: type[RecordT]) -> RecordT | None:
    """A result of the study; None where it is not there yet.

    Raises:
        ConfigError: if it is damaged.
    """
    try:
        return kind.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is damaged; rm-opt study readiness {path.parent} writes it again") from error
