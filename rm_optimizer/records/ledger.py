"""Finished pieces of a long measurement on disk, so that the same measurement goes on after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rm_optimizer.errors import DataError
from rm_optimizer.records.files import write_text


class Ledger:
    """One JSON line a piece as soon as it is done, below a line that says what they belong to.

    What a finished measurement of something else left is replaced when the first piece comes.

    Args:
        path: the file.
        identity: what the pieces belong to.
        num_wanted: pieces of the whole measurement.

    Raises:
        DataError: if the file holds part of a measurement of something else.
    """

    def __init__(self, path: Path, identity: str, num_wanted: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path = path
        self._header = {"identity": identity, "num_wanted": num_wanted}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        if lines:
            self._take(json.loads(lines[0]), lines[1:])

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a piece, on disk first."""
        if not self.rows:
            write_text(self._path, json.dumps(self._header) + "\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(dict(row))

    def _take(self, header: Mapping[str, Any], lines: list[str]) -> None:
        """The pieces of an earlier call, where they belong here; a torn last line is cut off."""
        if header == self._header:
            self.rows = [json.loads(line) for line in lines]
            write_text(self._path, "".join(f"{line}\n" for line in [json.dumps(self._header), *lines]))
        elif 0 < len(lines) < header["num_wanted"]:
            raise DataError(
                f"{self._path}: holds part of a measurement of other weights, pairs or options; remove it, or set "
                "another output_dir"
            )
