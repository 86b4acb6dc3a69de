"""Options of other libraries and their counterparts here, read from `coming_from.csv`. Imports no torch."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

LIBRARIES = ("TRL", "OpenRLHF", "LLaMA-Factory")


@cache
def counterparts() -> tuple[dict[str, str], ...]:
    """Rows of the table: `ours`, `meaning`, and the names of each library, separated by blanks."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def counterpart(name: str) -> str | None:
    """Sentence about the option here that does what another library's option does; None for an unknown name.

    Example:
        >>> counterpart("num_train_epochs")
        'for num_train_epochs of TRL and LLaMA-Factory set training.epochs (passes over the pairs)'
    """
    rows = [row for row in counterparts() if any(name in row[library].split() for library in LIBRARIES)]
    if not rows:
        return None
    libraries = [library for library in LIBRARIES if any(name in row[library].split() for row in rows)]
    options = ", or ".join(f"{row['ours']} ({row['meaning']})" for row in rows)
    return f"for {name} of {' and '.join(libraries)} set {options}"
