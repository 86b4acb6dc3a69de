"""Loggers in addition to metrics.csv: TensorBoard and Weights & Biases."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger

from rm_optimizer.core.metrics.pairwise import ESTIMATES, PairwiseMetrics
from rm_optimizer.errors import ConfigError, MissingExtra
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.records.quoting import markdown_table
from rm_optimizer.schema import LoggerConfig
from rm_optimizer.schema.config import WandbMode
from rm_optimizer.training.folder.record import RunResult


@contextmanager
def open_loggers(config: LoggerConfig, run_dir: Path, options: Mapping[str, Any]) -> Iterator[list[Logger]]:
    """Loggers of a run, closed after the block; W&B shows the run's options as its config.

    Args:
        config: the loggers' options.
        run_dir: the run folder.
        options: options of the whole run, as `options.json` holds them.
    """
    loggers = build_loggers(config, run_dir)
    try:
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                logger.log_hyperparams(dict(options))
        yield loggers
    finally:
        close_loggers(loggers)


def build_loggers(config: LoggerConfig, run_dir: Path) -> list[Logger]:
    """TensorBoard and W&B as configured.

    Args:
        config: the loggers' options.
        run_dir: folder of the run or analysis, in which they write.
    """
    loggers: list[Logger] = []
    if config.tensorboard:
        loggers.append(TensorBoardLogger(str(run_dir), name="", version="tensorboard"))
    if config.wandb:
        wandb = WandbLogger(
            project=config.project,
            name=config.name or run_dir.name,
            group=config.group,
            tags=config.tags,
            save_dir=str(run_dir),
            mode=config.wandb_mode.value,
        )
        loggers.append(wandb)
    return loggers


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


def close_loggers(loggers: list[Logger]) -> None:
    """End the W&B run, so that its files are complete; Lightning leaves it open."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()


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


STEP = "trainer/global_step"
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Validation": {
        "NLL (chance 0.693)": ("val/nll",),
        "Accuracy": ("val/accuracy",),
        "Brier score": ("val/brier",),
        "ECE": ("val/ece",),
        "Mean margin": ("val/mean_margin",),
        "Ties": ("val/tie_rate",),
    },
    "Training": {
        "Loss": ("train/loss",),
        "Accuracy": ("train/accuracy",),
        "Learning rate": ("train/lr",),
        "Gradient norm": ("train/grad_norm",),
    },
    "Calibration": {
        "ECE and its noise floor": ("calibration/ece", "calibration/ece_noise_floor"),
        "Temperature": ("calibration/temperature",),
    },
    "Curvature": {
        "Top eigenvalue": ("curvature/top_eigenvalue",),
        "Trace": ("curvature/trace",),
        "Edge of stability": ("curvature/preconditioned_sharpness", "curvature/stability_limit"),
    },
}
"""Sections of the workspace, their panels, and the metrics of each panel."""
COMPARED = ("best/nll", "best/accuracy", "best/ece")
"""Summary metrics drawn as bars, one a run."""
GROUPED_BY = "optimizer.name"
"""Option that groups the runs."""


def _workspaces_and_panels() -> tuple[Any, Any]:
    """Modules of wandb-workspaces."""
    try:
        with warnings.catch_warnings():  # it still uses pydantic's first API
            warnings.simplefilter("ignore", DeprecationWarning)
            from wandb_workspaces import workspaces
            from wandb_workspaces.reports import v2 as panels
    except ImportError as error:
        raise MissingExtra("wandb-workspaces", "dashboards") from error
    return workspaces, panels


def dashboard(entity: str, project: str, *, name: str = "RM-Optimizer") -> Any:
    """The workspace as `wandb_workspaces.workspaces.Workspace`; its `save()` publishes it and needs an account.

    Args:
        entity: W&B user or team.
        project: W&B project, `logger.project` of the runs.
        name: name of the workspace.

    Raises:
        MissingExtra: if wandb-workspaces is not installed.

    Example:
        >>> dashboard("team", "rm-optimizer").sections[0].name  # doctest: +SKIP
        'Best weights'
    """
    workspaces, panels = _workspaces_and_panels()
    bars = [panels.BarPlot(title=metric, metrics=[metric], orientation="h") for metric in COMPARED]
    sections = [workspaces.Section(name="Best weights", panels=bars, is_open=True)]
    for section, plots in SECTIONS.items():
        lines = [panels.LinePlot(title=title, x=STEP, y=list(metrics)) for title, metrics in plots.items()]
        sections.append(workspaces.Section(name=section, panels=lines, is_open=section in ("Validation", "Training")))
    grouping = workspaces.RunsetSettings(groupby=[workspaces.Config(GROUPED_BY)])
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections, runset_settings=grouping)


def _scores(group: PairwiseMetrics) -> dict[str, float | int | None]:
    accuracy = group.accuracy
    interval = {"accuracy": accuracy.value, "low": accuracy.low, "high": accuracy.high}
    return {"pairs": group.num_pairs, **interval, "nll": group.nll.value}


def log_outcome(loggers: Iterable[Logger], result: RunResult, *, log_model: bool) -> None:
    """Log the metrics of the exported weights with their intervals, and those of each group.

    Args:
        loggers: loggers of the run. The metrics and the model go to W&B only, the tables to TensorBoard too.
        result: the run's result.
        log_model: True to log the exported model as an artifact by reference; `wandb sync` uploads its files.
    """
    loggers = list(loggers)
    for column, groups in result.metrics.groups.items():
        rows = [{column: name} | _scores(group) for name, group in groups.items()]
        log_table(loggers, f"best/by_{column}", rows, result.best_step)
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.summary.update(_summary(result))
            if log_model:
                _log_model(logger, result)


def _summary(result: RunResult) -> dict[str, float | int | str | None]:
    estimates = {name: getattr(result.metrics, name) for name in ESTIMATES}
    values = {f"best/{name}": estimate.value for name, estimate in estimates.items()}
    ends = {
        f"best/{name}_{end}": getattr(estimate, end) for name, estimate in estimates.items() for end in ("low", "high")
    }
    return values | ends | {"best/step": result.best_step, "status": result.status.value}


def _log_model(logger: WandbLogger, result: RunResult) -> None:
    import wandb

    metadata = {"step": result.best_step, "monitor": result.monitor, "accuracy": result.metrics.accuracy.value}
    artifact = wandb.Artifact(f"model-{result.run_id}", type="model", metadata=metadata)
    artifact.add_dir(str(Path(result.run_dir) / BEST_FOLDER), policy="immutable")
    logger.experiment.log_artifact(artifact, aliases=["best"])
