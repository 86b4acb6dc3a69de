"""The optimizer steps of a run, with its evaluations and checkpoints between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger

from rm_optimizer.errors import Interrupted
from rm_optimizer.records.run_folder import METRICS_FILE, checkpoint_step
from rm_optimizer.schema.data import Streaming
from rm_optimizer.training.callbacks.evaluation_plan import PER_EPOCH
from rm_optimizer.training.callbacks.interrupt import StopSignal, stopped_after
from rm_optimizer.training.callbacks.loop import Checkpoints, StepProgress
from rm_optimizer.training.callbacks.memory_profile import PROFILE_COLUMNS, PROFILE_ROWS, MemoryProfile
from rm_optimizer.training.callbacks.progress import ProgressLines, shows_bars
from rm_optimizer.training.callbacks.run_callback import columns_of
from rm_optimizer.training.folder.checkpoints import extension_at
from rm_optimizer.training.folder.metrics_csv import COLUMNS, MetricsCSV
from rm_optimizer.training.folder.record import RunStatus
from rm_optimizer.training.preparation import Run
from rm_optimizer.training.trainer import build_trainer

log = logging.getLogger("rm_optimizer")


@dataclass(frozen=True)
class Fit:
    """Result of the optimizer steps of a run.

    Args:
        status: end of the run.
        steps: optimizer steps done.
        seconds: duration since the start or the last resume, evaluations included.
        device: device that the model was trained on.
        is_first_rank: True for the process that writes the results.
    """

    status: RunStatus
    steps: int
    seconds: float
    device: torch.device
    is_first_rank: bool


def fit(
    run: Run, stop: StopSignal, checkpoint: Path | None, given: Sequence[Callback], others: Sequence[Logger]
) -> Fit:
    """Take the optimizer steps of a run.

    Args:
        run: the parts of the run.
        stop: signal of the user to stop.
        checkpoint: checkpoint to continue from; None starts a new run.
        given: callbacks of the caller.
        others: loggers in addition to `metrics.csv`.

    Raises:
        Interrupted: if the user stops the run; a checkpoint is left.
    """
    config = run.config
    shown = [_progress(run)] if config.training.progress else []
    every = config.training.checkpoint_every or max(
        1, run.datamodule.steps_per_epoch // (config.training.evals_per_epoch or PER_EPOCH)
    )
    is_streamed = config.data.streaming != Streaming.off  # the pairs are known only once they are read
    callbacks: list[Callback] = [
        *([MemoryProfile(run.run_dir)] if config.profile_memory else []),
        run.evaluation,
        *given,
        Checkpoints(
            run.run_dir,
            every=every,
            keep=config.training.keep_checkpoints,
            stop=stop,
            before_saving=run.keep_trained_pairs if is_streamed else None,
        ),
    ]
    run.evaluation.stop = stop
    if checkpoint is not None:
        callbacks += extension_at(checkpoint_step(checkpoint), run.record.extensions, config.schedule)
    callbacks += shown
    resume_step = checkpoint_step(checkpoint) if checkpoint else None
    own = {f"val/{name}": f"eval_{name}" for name in run.evaluation.own}
    loggers: list[Logger] = [MetricsCSV(run.run_dir, resume_step, COLUMNS | columns_of(given) | own)]
    if config.profile_memory:
        loggers.append(MetricsCSV(run.run_dir, resume_step, PROFILE_COLUMNS, PROFILE_ROWS))
    loggers += others
    # The data end the run. One step more lets a run that was stopped in its last evaluation start, and repeat it.
    trainer = build_trainer(config.hardware, loggers, callbacks, run.module.num_steps + 1)
    before = time.perf_counter()
    try:
        trainer.fit(run.module, datamodule=run.datamodule, ckpt_path=checkpoint, weights_only=True)
    finally:
        if trainer.is_global_zero and is_streamed:
            run.keep_trained_pairs()
    seconds, steps = time.perf_counter() - before, trainer.global_step
    # A signal may have reached one process only.
    if trainer.strategy.reduce_boolean_decision(stop.requested, all=False):
        where = " in its evaluation" if run.evaluation.missed else ""
        raise Interrupted(stopped_after(steps, run.module.num_steps, where, run.run_dir, run.module.last_checkpoint))
    is_whole = steps == run.module.num_steps
    assert is_whole or trainer.should_stop, f"training ended after step {steps} of {run.module.num_steps}"
    status = RunStatus.finished if is_whole and not run.evaluation.stopped_early else RunStatus.early_stopped
    return Fit(status, steps, seconds, trainer.strategy.root_device, trainer.is_global_zero)


def _progress(run: Run) -> Callback:
    """A progress bar if one can be drawn, or else lines; and a log line with the file of the metrics."""
    log.info("the metrics of every step are in %s", run.run_dir / METRICS_FILE)
    if shows_bars():
        return StepProgress(leave=True)
    run.evaluation.lines = ProgressLines()
    return run.evaluation.lines
