"""`rm-opt report`: one page on a run or a comparison of optimizers, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from rm_optimizer.errors import ConfigError


def report(
    folder: Annotated[Path, Argument(help="Folder of a finished run, or of a comparison of optimizers.")],
    output: Annotated[Path | None, Option("--output", "-o", help="Folder of the page; default: FOLDER/report.")] = None,
    form: Annotated[
        Literal["html", "md"], Option("--format", help="html writes the page, md prints Markdown for a pull request.")
    ] = "html",
) -> None:
    """Write one page on a run or a study: results with intervals, pictures, settings, what is missing; no network."""
    from rm_optimizer.experiments.study.plan import FROZEN_FILE, PLAN_FILE
    from rm_optimizer.reporting.model_card import markdown_report
    from rm_optimizer.reporting.pages.run_page import write_run_page
    from rm_optimizer.reporting.pages.study_page import write_study_page

    is_study = (folder / FROZEN_FILE).is_file()
    if (folder / PLAN_FILE).is_file() and not is_study:
        raise ConfigError(
            f"{folder} holds a study of another kind; its own command reports on it, rm-opt compare report {folder} or "
            "the rm-opt study that made it"
        )
    if form == "md" and is_study:
        raise ConfigError(f"rm-opt compare report {folder} writes Markdown of a comparison, report/report.md")
    if form == "md":
        print(markdown_report(folder))
    else:
        print(f"page: {(write_study_page if is_study else write_run_page)(folder, output)}")
