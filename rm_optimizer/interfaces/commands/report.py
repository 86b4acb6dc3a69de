"""`rm-opt report`: a page in one file about a run or a study, or an index of a folder of runs and studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from rm_optimizer.errors import ConfigError


def report(
    folder: Annotated[
        Path, Argument(help="Folder of a finished run or a study; with --serve, a folder of runs and studies.")
    ],
    output: Annotated[Path | None, Option("--output", "-o", help="Folder of the page; default: FOLDER/report.")] = None,
    form: Annotated[
        Literal["html", "md"], Option("--format", help="html writes the page; md prints Markdown for a pull request.")
    ] = "html",
    serve: Annotated[
        bool, Option("--serve", help="Serve a list of the runs and studies in FOLDER on this machine.")
    ] = False,
    port: Annotated[int, Option("--port", min=0, max=65535, help="Port of --serve; 0 picks a free one.")] = 0,
) -> None:
    """Write a page about a run or a study.

    It shows results with intervals, pictures and settings, and lists missing parts. It needs no network.
    """
    if serve:
        if output is not None or form == "md":
            raise ConfigError("--serve writes no file; leave out --output and --format")
        _serve(folder, port)
        return
    from rm_optimizer.reporting.pages.folder_page import folder_markdown, write_page

    if form == "md":
        print(folder_markdown(folder), end="")
    else:
        print(f"page: {write_page(folder, output)}")


def _serve(folder: Path, port: int) -> None:
    from rm_optimizer.reporting.runs_index.index_server import IndexServer

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name one that holds runs or studies")
    with IndexServer(folder, port) as server:
        print(f"{len(server.listing.look()):,} runs and studies in {folder}")
        print(f"open {server.url}", flush=True)
        print("Ctrl-C stops", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
