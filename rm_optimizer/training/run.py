"""`train_reward_model`, the function behind every training run."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig
from pytorch_lightning.callbacks import Callback

from rm_optimizer.core.pairs.orders import PairOrder
from rm_optimizer.core.tokens.dataset import TrainVal
from rm_optimizer.errors import Interrupted, TrainingDiverged
from rm_optimizer.optim import check_compatible
from rm_optimizer.records.files import write_text
from rm_optimizer.records.run_folder import DIVERGED_FILE, require_usable
from rm_optimizer.records.run_options import RunRequest
from rm_optimizer.schema import TrainConfig, typed
from rm_optimizer.training.callbacks.interrupt import StopNow, StopSignal, stopped_at_once
from rm_optimizer.training.callbacks.run_callback import require_callbacks
from rm_optimizer.training.finishing import finish
from rm_optimizer.training.fitting import fit
from rm_optimizer.training.folder.lock import run_lock
from rm_optimizer.training.folder.record import RunResult, write_record
from rm_optimizer.training.folder.start import begin, ended_run, require_same_order, require_same_pairs
from rm_optimizer.training.loggers import log_outcome, open_loggers, require_wandb_key
from rm_optimizer.training.preparation import Run, prepare
from rm_optimizer.training.processes import require_devices

log = logging.getLogger("rm_optimizer")


def train_reward_model(
    config: TrainConfig | DictConfig,
    *,
    data: TrainVal | None = None,
    order: PairOrder | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Train, evaluate and export one reward model, and write all results to `config.output_dir`.

    The folder holds `identity.json`, `options.json`, `metrics.csv`, `evaluations/`, `checkpoints/`, `best/` (for
    `transformers`), `pair_rewards.jsonl` and `run.json`. It belongs to one run; see the option `resume`.

    Args:
        config: the composed options, as `rm_optimizer.compose` or `rm_optimizer.schema.typed` returns them.
        data: pairs in memory, in place of those in `config.data`.
        order: order of the training pairs by epoch; None shuffles them by the seed.
        callbacks: Lightning callbacks, called after the evaluation and before the checkpoint of a step; one may set
            `trainer.should_stop`. Hooks of Lightning's validation are not called.

    Returns:
        The result, with the validation metrics of the best weights.

    Raises:
        ConfigError: if options conflict, or the folder holds another run or is in use.
        DataError: if the pairs cannot be used.
        CheckpointError: if the base model cannot be loaded, or a checkpoint to resume from is of another run.
        TrainingDiverged: if the loss stops being finite.
        Interrupted: if the user stops the run; a checkpoint is left.
        DiskError: if a file cannot be written.
    """
    if isinstance(config, DictConfig):
        config = typed(config, TrainConfig)
    if not isinstance(config, TrainConfig):
        raise TypeError(
            f"config must be the options of a run, got {type(config).__name__}; make them by compose(['model=tiny', …])"
        )
    require_callbacks(config, callbacks)
    check_compatible(config.optimizer, config.hardware, config.schedule)
    require_devices(config.hardware)
    require_wandb_key(config.logger)
    request = RunRequest.of(config)
    run_dir = request.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    is_first_rank = getattr(rank_zero_only, "rank", 0) == 0
    with run_lock(run_dir) if is_first_rank else nullcontext():
        if is_first_rank:
            require_usable(request)
        if (ended := ended_run(request)) is not None:
            require_same_pairs(ended.result.data, data)
            if config.data.curriculum is None:  # the order follows from the options, which are the same
                require_same_order(ended.result.data, order)
            log.info("%s", ended)
            return ended.result
        start = begin(request, is_first_rank=is_first_rank)
        pl.seed_everything(config.seed, workers=True, verbose=False)
        if config.hardware.num_threads:
            torch.set_num_threads(config.hardware.num_threads)
        run = prepare(config, start, data, order)
        if is_first_rank:
            write_record(run.record, config.data if data is None else None, run_dir)
        return _fitted_and_finished(run, start.checkpoint, callbacks, run_dir, is_first_rank=is_first_rank)


def _fitted_and_finished(
    run: Run, checkpoint: Path | None, callbacks: Sequence[Callback], run_dir: Path, *, is_first_rank: bool
) -> RunResult:
    """Fit, evaluate and export, and log the outcome.

    Raises:
        Interrupted: if the user stops the run.
    """
    options = run.config.logger
    with StopSignal() as stop, open_loggers(options, run_dir, run.record.options) as loggers:
        try:
            result = finish(run, fit(run, stop, checkpoint, callbacks, loggers))
        except StopNow:
            raise Interrupted(stopped_at_once(run_dir)) from None
        except TrainingDiverged as error:
            write_text(run_dir / DIVERGED_FILE, json.dumps({"error": str(error)}) + "\n")
            raise
        if is_first_rank:
            log_outcome(loggers, result, log_model=options.log_model)
        return result
