"""`rm-opt report`: one page on a run or a study, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from rm_optimizer.errors import ConfigError

if TYPE_CHECKING:
    from rm_optimizer.experiments.study.plan import StudyKind
    from rm_optimizer.reporting.pages.document import Document


def report(
    folder: Annotated[Path, Argument(help="Folder of a finished run, or of a study.")],
    output: Annotated[Path | None, Option("--output", "-o", help="Folder of the page; default: FOLDER/report.")] = None,
    form: Annotated[
        Literal["html", "md"], Option("--format", help="html writes the page, md prints Markdown for a pull request.")
    ] = "html",
) -> None:
    """Write one page on a run or a study: results with intervals, pictures, settings, what is missing; no network."""
    from rm_optimizer.experiments.study.plan import PLAN_FILE, study_kind
    from rm_optimizer.reporting.model_card import markdown_report
    from rm_optimizer.reporting.pages.run_page import REPORT_FOLDER, write_run_page

    kind = study_kind(folder)
    if kind is None and not (folder / PLAN_FILE).is_file():
        print(markdown_report(folder) if form == "md" else f"page: {write_run_page(folder, output)}")
        return
    document = _study_document(kind, folder)
    if form == "md":
        print(document.markdown(), end="")
    else:
        print(f"page: {document.write(output or folder / REPORT_FOLDER)}")


def _study_document(kind: StudyKind | None, folder: Path) -> Document:
    """The content of a study's page.

    Raises:
        ConfigError: if the study is of a kind that has none.
    """
    from rm_optimizer.experiments.study.plan import StudyKind
    from rm_optimizer.reporting.pages import label_study_page, readiness_study_page, study_page

    documents = {
        StudyKind.optimizers: study_page.comparison_document,
        StudyKind.readiness: readiness_study_page.readiness_study_document,
        StudyKind.labels: label_study_page.savings_document,
        StudyKind.cleaning: label_study_page.cleaning_document,
    }
    if kind not in documents:
        raise ConfigError(
            f"{folder} holds a study without a page; there are pages of runs, of comparisons of optimizers, and of "
            f"rm-opt study readiness, labels and cleaning; rm-opt compare report {folder} reports on other studies"
        )
    return documents[kind](folder)
