"""`rm-opt report`: one page on a run or a study, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from rm_optimizer.errors import ConfigError

if TYPE_CHECKING:
    from rm_optimizer.experiments.study.plan import StudyKind


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
    from rm_optimizer.reporting.pages.run_page import write_run_page

    kind = study_kind(folder)
    if kind is None and not (folder / PLAN_FILE).is_file():
        print(markdown_report(folder) if form == "md" else f"page: {write_run_page(folder, output)}")
    elif form == "md":
        raise ConfigError(
            f"--format md is of a run, and {folder} holds a study; for a comparison of optimizers, rm-opt compare "
            f"report {folder} writes report/report.md"
        )
    else:
        print(f"page: {_study_page(kind, folder, output)}")


def _study_page(kind: StudyKind | None, folder: Path, output: Path | None) -> Path:
    """Write the page of a study and return its file.

    Raises:
        ConfigError: if the study is of a kind that has none.
    """
    from rm_optimizer.experiments.study.plan import StudyKind
    from rm_optimizer.reporting.pages import label_study_page, readiness_study_page, study_page

    writers = {
        StudyKind.optimizers: study_page.write_study_page,
        StudyKind.readiness: readiness_study_page.write_readiness_study_page,
        StudyKind.labels: label_study_page.write_savings_page,
        StudyKind.cleaning: label_study_page.write_cleaning_page,
    }
    if kind not in writers:
        raise ConfigError(
            f"{folder} holds a study without a page; there are pages of runs, of comparisons of optimizers, and of "
            f"rm-opt study readiness, labels and cleaning; rm-opt compare report {folder} reports on other studies"
        )
    return writers[kind](folder, output)
