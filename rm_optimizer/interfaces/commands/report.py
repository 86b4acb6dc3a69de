"""`rm-opt report`: a page in one file about a run, several runs or a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option


def report(
    folder: Annotated[Path, Argument(help="Folder of a finished run, several runs or a study.")],
    output: Annotated[Path | None, Option("--output", "-o", help="Folder of the page; default: FOLDER/report.")] = None,
    form: Annotated[
        Literal["html", "md"], Option("--format", help="html writes the page; md prints Markdown for a pull request.")
    ] = "html",
) -> None:
    """Write a page about a run, several runs or a study.

    It shows results with intervals, pictures and settings, and lists missing parts. It needs no network.
    """
    from rm_optimizer.reporting.pages.folder_page import folder_markdown, write_page

    if form == "md":
        print(folder_markdown(folder), end="")
    else:
        print(f"page: {write_page(folder, output)}")
