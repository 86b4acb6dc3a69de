"""Numbers of every step, in metrics.csv."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.loggers import Logger

from rm_optimizer.records.files import csv_table, replacing, writing
from rm_optimizer.records.run_folder import METRICS_FILE, read_rows

COLUMNS = {
    "train/loss": "train_loss",
    "train/accuracy": "train_acc",
    "train/mean_margin": "train_margin",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "train/num_pairs": "train_pairs",
    "val/loss": "eval_loss",
    "val/accuracy": "eval_acc",
    "val/mean_margin": "eval_margin",
    "val/num_pairs": "eval_pairs",
    "val/nll": "eval_nll",
    "val/brier": "eval_brier",
    "val/ece": "eval_ece",
    "val/tie_rate": "eval_tie_rate",
}
"""Columns by metric name; other metrics go to the other loggers only."""

COUNTS = ("_pairs", "_products", "_bytes")
"""Endings of the names of columns with whole numbers."""


class MetricsCSV(Logger):
    """Logger that writes `metrics.csv`: one row a step, with empty cells if the step was not evaluated.

    The file holds no times, so that equal runs write equal bytes. Measurements of time go to a file of their own.

    Args:
        folder: the run folder.
        resume_step: rows after this step are dropped from an earlier file; None starts a new file.
        columns: columns by metric name; a step that logs none of them has no row.
        file_name: name of the file in the folder.
    """

    def __init__(
        self,
        folder: Path,
        resume_step: int | None = None,
        columns: Mapping[str, str] = MappingProxyType(COLUMNS),
        file_name: str = METRICS_FILE,
    ) -> None:
        super().__init__()
        self.path = folder / file_name
        self._columns = columns
        self._header = ["step", "epoch", *columns.values()]
        self._resume_step = resume_step
        self._file: TextIO | None = None
        self._row: dict[str, str] = {}
        self._row_start: int | None = None
        self._is_written = True

    @property
    def name(self) -> str:
        """Lightning's name of the logger."""
        return self.path.name.replace(".", "_")

    @property
    def version(self) -> str:
        """Empty version, which Lightning requires; there is one file a run."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing, since the composed configuration is next to the file."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add metrics to the row of `step`, also if it was saved already; a new step completes the row before."""
        if self._row and self._row["step"] != str(step):
            self._write_row()
            self._row, self._row_start = {}, None
        if not self._row and self._columns.keys().isdisjoint(metrics):
            return
        self._row["step"], self._is_written = str(step), False
        if "epoch" in metrics:
            self._row["epoch"] = repr(float(metrics["epoch"]))
        for name, column in self._columns.items():
            if name in metrics:
                is_count = column.endswith(COUNTS)
                self._row[column] = str(int(metrics[name])) if is_count else repr(float(metrics[name]))

    @rank_zero_only
    def save(self) -> None:
        """Write every row up to the present step to disk."""
        with writing(self.path):
            self._write_row()
            if self._file is not None:
                self._file.flush()
                os.fsync(self._file.fileno())

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the remaining row and close the file."""
        self.save()
        if self._file is not None:
            with writing(self.path):
                self._file.close()
            self._file = None
            self._row, self._row_start = {}, None

    def _write_row(self) -> None:
        """Write the row at the end of the file, in place of its earlier version."""
        if self._is_written:
            return
        with writing(self.path):
            if self._file is None:
                self._file = self._open()
            if self._row_start is None:
                self._row_start = self._file.tell()
            self._file.truncate(self._row_start)
            csv_table(self._file, self._header).writerow(self._row)
        self._is_written = True

    def _open(self) -> TextIO:
        kept = [] if self._resume_step is None else read_rows(self.path, self._resume_step)
        if kept and kept[-1]["step"] == self._row.get("step"):  # a resumed run repeats this step's missing evaluation
            self._row = {name: cell for name, cell in kept.pop().items() if cell} | self._row
        self._header = list(dict.fromkeys([*(kept[0] if kept else ()), *self._header]))
        with replacing(self.path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv_table(file, self._header)
            writer.writeheader()
            writer.writerows(kept)
        self._resume_step = None
        return self.path.open("a", newline="", encoding="utf-8")
