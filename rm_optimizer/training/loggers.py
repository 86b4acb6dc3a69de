"""Outlets of a run's numbers: `metrics.csv`, TensorBoard, Weights & Biases, and a bar or lines in the terminal."""

from __future__ import annotations

import logging
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import numpy as np
import pytorch_lightning as pl
from jaxtyping import Float
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.callbacks import RichProgressBar
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from rich.console import Console

from rm_optimizer.core.metrics.pairwise import ESTIMATES
from rm_optimizer.errors import ConfigError
from rm_optimizer.records.files import csv_table, replacing, writing
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.records.quoting import markdown_table
from rm_optimizer.records.run_folder import METRICS_FILE, read_rows
from rm_optimizer.schema import LoggerConfig
from rm_optimizer.schema.config import WandbMode
from rm_optimizer.training.folder.record import RunResult
from rm_optimizer.training.lightning_module import RunModule

log = logging.getLogger("rm_optimizer")

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

    The file holds no times, so that equal runs write equal bytes. Measurements of time go to another file.

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


@contextmanager
def open_loggers(config: LoggerConfig, folder: Path, options: Mapping[str, Any]) -> Iterator[list[Logger]]:
    """TensorBoard and W&B as configured, closed after the block; W&B shows the options as its config.

    Args:
        config: the loggers' options.
        folder: folder of the run or analysis, in which they write.
        options: options of the whole run or analysis.
    """
    loggers: list[Logger] = []
    if config.tensorboard:
        loggers.append(TensorBoardLogger(str(folder), name="", version="tensorboard"))
    wandb = None
    if config.wandb:
        wandb = WandbLogger(
            project=config.project,
            name=config.name or folder.name,
            group=config.group,
            tags=config.tags,
            save_dir=str(folder),
            mode=config.wandb_mode.value,
        )
        loggers.append(wandb)
    try:
        if wandb is not None:
            wandb.log_hyperparams(dict(options))
        yield loggers
    finally:
        if wandb is not None:
            wandb.experiment.finish()  # so that its files are complete; Lightning leaves it open


def require_wandb_key(config: LoggerConfig) -> None:
    """Refuse W&B online without a key, before a model is loaded.

    Raises:
        ConfigError: if there is no key.
    """
    if not config.wandb or config.wandb_mode != WandbMode.online or os.environ.get("WANDB_API_KEY"):
        return
    import wandb

    if not wandb.api.api_key:
        raise ConfigError(
            "logger.wandb_mode=online needs a W&B API key, and there is none on this machine; run wandb login, set "
            "WANDB_API_KEY, or write logger.wandb_mode=offline"
        )


def log_figure(loggers: Iterable[Logger], name: str, png: Path, step: int) -> None:
    """Log a figure to TensorBoard and Weights & Biases.

    Args:
        loggers: loggers of the run; those for numbers only are skipped.
        name: name of the figure, as `stage/name`.
        png: file of the figure.
        step: optimizer step it belongs to.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            from matplotlib.image import imread

            logger.experiment.add_image(name, imread(png)[..., :3], step, dataformats="HWC")
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [str(png)], step)


def log_histogram(loggers: Iterable[Logger], name: str, values: Float[np.ndarray, " values"], step: int) -> None:
    """Log a histogram of values to TensorBoard and Weights & Biases.

    Args:
        loggers: loggers of the run; those for numbers only are skipped.
        name: name of the values, as `stage/name`.
        values: the values, all finite.
        step: optimizer step they belong to.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(name, values, step)
        elif isinstance(logger, WandbLogger):
            import wandb

            logger.experiment.log({name: wandb.Histogram(values), "trainer/global_step": step})


def log_table(loggers: Iterable[Logger], name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
    """Log a table to TensorBoard, as text, and to Weights & Biases.

    Args:
        loggers: loggers of the run; those for numbers only are skipped.
        name: name of the table, as `stage/name`.
        rows: values by column, the same columns in each.
        step: optimizer step it belongs to.
    """
    columns = list(rows[0]) if rows else []
    cells = [[row[column] for column in columns] for row in rows]
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            text = markdown_table(columns, [list(map(str, line)) for line in cells])
            logger.experiment.add_text(name, text, step)
        elif isinstance(logger, WandbLogger):
            logger.log_table(name, columns, cells, step=step)


def log_outcome(loggers: Iterable[Logger], result: RunResult, *, log_model: bool) -> None:
    """Log the metrics of the exported weights with their intervals, and the metrics of each group.

    Args:
        loggers: loggers of the run. The metrics and the model go to W&B only, the tables to TensorBoard too.
        result: the run's result.
        log_model: True to log the exported model as an artifact by reference; `wandb sync` uploads its files.
    """
    loggers, metrics = list(loggers), result.metrics
    ends = {"": "value", "_low": "low", "_high": "high"}
    for column, groups in metrics.groups.items():
        rows = [
            {column: name, "pairs": group.num_pairs, "accuracy": group.accuracy.value}
            | {"low": group.accuracy.low, "high": group.accuracy.high, "nll": group.nll.value}
            for name, group in groups.items()
        ]
        log_table(loggers, f"best/by_{column}", rows, result.best_step)
    summary: dict[str, float | int | str | None] = {"best/step": result.best_step, "status": result.status.value}
    for name in ESTIMATES:
        summary |= {f"best/{name}{end}": getattr(getattr(metrics, name), part) for end, part in ends.items()}
    for logger in loggers:
        if not isinstance(logger, WandbLogger):
            continue
        logger.experiment.summary.update(summary)
        if log_model:
            import wandb

            about = {"step": result.best_step, "monitor": result.monitor, "accuracy": metrics.accuracy.value}
            artifact = wandb.Artifact(f"model-{result.run_id}", type="model", metadata=about)
            artifact.add_dir(str(Path(result.run_dir) / BEST_FOLDER), policy="immutable")
            logger.experiment.log_artifact(artifact, aliases=["best"])


SECONDS = 60.0
"""Seconds between two lines."""


def shows_bars() -> bool:
    """True if standard output is a terminal, or a notebook with ipywidgets, where a bar can be redrawn."""
    console = Console()
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


class ProgressLines(pl.Callback):
    """Callback that logs a line every `seconds`: step, loss, accuracy, speed and time left, or an evaluation's pairs.

    Args:
        seconds: seconds between two lines.
        clock: function that returns monotonic seconds.
    """

    def __init__(self, *, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.clock = clock
        self._last = self._started = clock()
        self._first_step = self._pairs_before = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the steps."""
        assert isinstance(pl_module, RunModule)
        self._started, self._first_step = self.clock(), trainer.global_step
        self._pairs_before = pl_module.pairs_seen

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Log the step if a line is due."""
        assert isinstance(pl_module, RunModule)
        if not (trainer.is_global_zero and self._is_due()):
            return
        step, num_steps = trainer.global_step, pl_module.num_steps
        seconds = max(self.clock() - self._started, 1e-9)
        left = seconds / max(step - self._first_step, 1) * (num_steps - step)
        loss, accuracy = (pl_module.step_metrics.get(f"train/{name}", float("nan")) for name in ("loss", "accuracy"))
        speed = (pl_module.pairs_seen - self._pairs_before) / seconds
        told = "step %d of %d: loss %.4f, accuracy %.3f, %.1f pairs/s with evaluations, %s left"
        log.info(told, step, num_steps, loss, accuracy, speed, duration(left))

    def evaluated(self, total: int, done: int) -> None:
        """Log the progress of an evaluation if a line is due.

        Args:
            total: pairs to score.
            done: pairs scored.
        """
        if self._is_due():
            log.info("evaluation: %d of %d pairs", done, total)

    def _is_due(self) -> bool:
        now = self.clock()
        if now - self._last < self.seconds:
            return False
        self._last = now
        return True


class StepProgress(RichProgressBar):
    """Lightning's bar over the optimizer steps of the run, with metrics of the step and of the last validation."""

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Training loss and accuracy of the step, and the last validation accuracy."""
        assert isinstance(pl_module, RunModule)
        shown = {"loss": "train/loss", "acc": "train/accuracy"}
        metrics: dict[str, int | str | float | dict[str, float]]
        metrics = {name: f"{pl_module.step_metrics.get(key, float('nan')):.3f}" for name, key in shown.items()}
        return metrics | {"val": f"{pl_module.validation_metrics.get('val/accuracy', float('nan')):.3f}"}

    def _get_train_description(self, current_epoch: int) -> str:
        return "training"


def duration(seconds: float) -> str:
    """Duration in words, with its two largest units.

    Example:
        >>> duration(59.6), duration(61), duration(7384)
        ('1 min 0 s', '1 min 1 s', '2 h 3 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
