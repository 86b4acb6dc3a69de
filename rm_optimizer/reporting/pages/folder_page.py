"""The page of a folder with a run or a study."""

from __future__ import annotations

from pathlib import Path

from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.study import PLAN_FILE, StudyPlan, compares_optimizers
from rm_optimizer.reporting.model_card import markdown_report
from rm_optimizer.reporting.pages.document import Document
from rm_optimizer.reporting.pages.exhibits import Exhibits
from rm_optimizer.reporting.pages.run_page import run_page
from rm_optimizer.reporting.pages.study_page import comparison_document

REPORT_FOLDER = "report"
"""Name of the page's folder, in the folder of the run or study."""


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a run or study and return its path; the same folder gives the same bytes.

    Args:
        folder: folder of the run or study.
        output: folder to write into; None takes `report/` of the folder.

    Raises:
        ConfigError: if the folder holds a study without a page or without a result.
        DataError: if the folder holds neither a study nor a finished run.
    """
    exhibits = Exhibits()
    return exhibits.write(output or folder / REPORT_FOLDER, folder_page(folder, exhibits))


def folder_page(folder: Path, exhibits: Exhibits) -> str:
    """The page of a run or study as HTML; it raises the errors of `write_page`.

    Args:
        folder: folder of the run or study.
        exhibits: gains the figures and tables of the page.
    """
    document = _study_document(folder)
    return run_page(folder, exhibits) if document is None else document.html(exhibits)


def folder_markdown(folder: Path) -> str:
    """The numbers of a run or study as Markdown for a pull request; it raises the errors of `write_page`."""
    document = _study_document(folder)
    return markdown_report(folder) if document is None else document.markdown()


def _study_document(folder: Path) -> Document | None:
    """The content of a study's page; None if the folder holds no study.

    Raises:
        ConfigError: if this kind of study has no page.
    """
    if compares_optimizers(folder):
        return comparison_document(folder)
    if (folder / PLAN_FILE).is_file():
        StudyPlan.read(folder)  # raises if the plan is damaged
        raise ConfigError(
            f"{folder} holds a study without a page; there are pages of runs and of comparisons of optimizers; "
            f"rm-opt compare report {folder} reports on other studies"
        )
    return None
