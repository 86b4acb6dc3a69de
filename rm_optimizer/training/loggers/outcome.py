"""The outcome of a run in Weights & Biases: its best metrics, the table of its groups, its model as an artifact."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pytorch_lightning.loggers import Logger, WandbLogger

from rm_optimizer.core.metrics.pairwise import ESTIMATES, PairwiseMetrics
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.training.folder.result import RunResult
from rm_optimizer.training.loggers.media import log_table


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
