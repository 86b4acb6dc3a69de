"""`rm-opt report`: one page on a run, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option


def report(
    run: Annotated[Path, Argument(help="Folder of a finished run.")],
    output: Annotated[Path | None, Option("--output", "-o", help="Folder of the page; default: RUN/report.")] = None,
    form: Annotated[
        Literal["html", "md"], Option("--format", help="html writes the page, md prints Markdown for a pull request.")
    ] = "html",
) -> None:
    """Write one page on a run: result, curves, calibration, landscape, readiness and settings; it needs no network."""
    from rm_optimizer.reporting.model_card import markdown_report
    from rm_optimizer.reporting.pages.run_page import write_run_page

    if form == "md":
        print(markdown_report(run))
    else:
        print(f"page: {write_run_page(run, output)}")
