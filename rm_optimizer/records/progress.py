"""Progress of a long command on standard error: a bar on a terminal, else one line a minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

SECONDS_BETWEEN_LINES = 60.0
"""Seconds between two lines if there is no terminal."""

OnProgress = Callable[[int, int | None], None]
"""Function of the number of units done and of the number of all, which is None if unknown."""


@contextmanager
def progress(what: str, unit: str) -> Iterator[OnProgress]:
    """Show the progress of a computation while the block runs.

    Args:
        what: the computation, such as "scoring".
        unit: counted unit, such as "rows".
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(what, unit)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, count="")

        def show(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total, count=_count(done, total, unit))

        yield show


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar while the block runs, and yield the function that moves it.

    Its arguments are the name of the present stage, the number of stages done and the number of all stages.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading")
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _lines(what: str, unit: str) -> OnProgress:
    started = last = time.monotonic()

    def show(done: int, total: int | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            print(f"{what}: {_count(done, total, unit)}, {now - started:.0f} s", file=sys.stderr, flush=True)

    return show


def _count(done: int, total: int | None, unit: str) -> str:
    return f"{done:,} {unit}" if total is None else f"{done:,} of {total:,} {unit}"
