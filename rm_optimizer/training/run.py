"""`train_reward_model`, the function behind every training run."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Never, TypeAlias

import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig
from pytorch_lightning.callbacks import Callback

from rm_optimizer.core.model.losses import MarginLoss, PairLoss, loss_named, register_loss
from rm_optimizer.core.tokens.dataset import names_files
from rm_optimizer.core.tokens.splits import TrainVal
from rm_optimizer.errors import ConfigError, Interrupted, TrainingDiverged, did_you_mean
from rm_optimizer.optim import check_compatible
from rm_optimizer.records.files import write_text
from rm_optimizer.records.orders import PairOrder
from rm_optimizer.records.recall import written
from rm_optimizer.records.run_folder import DIVERGED_FILE, require_usable
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.composition import model_overrides
from rm_optimizer.schema.config import CalibrationConfig, HessianConfig
from rm_optimizer.schema.data import Streaming
from rm_optimizer.schema.diagnose import counterpart
from rm_optimizer.schema.publish import PublishConfig
from rm_optimizer.training.callbacks.evaluation_plan import PairMetric
from rm_optimizer.training.callbacks.memory_profile import CPU_MEMORY, GPU_MEMORY, PROFILE_FILE
from rm_optimizer.training.callbacks.run_callback import require_callbacks
from rm_optimizer.training.data.run_data import pairs_in_memory
from rm_optimizer.training.estimate import count_run, duration, size
from rm_optimizer.training.fitting import fit
from rm_optimizer.training.folder.lock import run_lock
from rm_optimizer.training.folder.record import RunResult
from rm_optimizer.training.folder.start import (
    begin,
    ended_run,
    new_folder,
    require_same_order,
    require_same_pairs,
    write_record,
)
from rm_optimizer.training.loggers import log_outcome, open_loggers, require_wandb_key
from rm_optimizer.training.preparation import prepare
from rm_optimizer.training.processes import require_devices
from rm_optimizer.training.stopping import StopNow, StopSignal, stopped_at_once

log = logging.getLogger("rm_optimizer")

Source: TypeAlias = str | os.PathLike[str]
"""Path or name."""


def train_reward_model(
    model_name: Source | TrainConfig | DictConfig = "tiny",
    optimizer: str = "adamw",
    data_path: object = None,
    epochs: float = 1.0,
    batch_size: int | None = None,
    *,
    val: object = None,
    learning_rate: float | None = None,
    max_length: int | None = None,
    adapter: str | None = None,
    seed: int = 0,
    output_dir: Source | None = None,
    precision: str | None = None,
    order: PairOrder | None = None,
    callbacks: Sequence[Callback] = (),
    loss: str | PairLoss | MarginLoss | None = None,
    metrics: Mapping[str, PairMetric] = MappingProxyType({}),
    options: Mapping[str, object] = MappingProxyType({}),
    **unknown: Never,
) -> RunResult:
    """Train, evaluate and export one reward model, and write all results to `output_dir`.

    The folder holds `identity.json`, `options.json`, `metrics.csv`, `evaluations/`, `checkpoints/`, `best/` (for
    `transformers`), `pair_rewards.jsonl` and `run.json`. It belongs to one run; see the option `resume`. The result can
    be given wherever a path of a model is taken.

    Args:
        model_name: preset, hub id or path of the base model; or the composed options of the whole run, to which only
            pairs, `order`, `callbacks` and `metrics` are added.
        optimizer: name of the optimizer.
        data_path: training pairs: a path or hub name as `data.train` takes it, or whatever `PreferenceDataset` takes in
            memory, such as a data frame or a list of rows; None is the synthetic world.
        epochs: passes over the training pairs.
        batch_size: pairs of an optimizer step; None is the model's preset.
        val: validation pairs, in the same forms; None holds out a share of the training prompts.
        learning_rate: peak rate; None is the one that suits model and optimizer.
        max_length: most tokens of prompt and response.
        adapter: preset of a LoRA adapter, such as `lora`; None trains all weights.
        seed: seed of weights and order.
        output_dir: the run folder; None is a new one with the time in `outputs/train`.
        precision: `32-true`, `bf16-mixed` or another value of `hardware.precision`.
        order: order of the training pairs by epoch; None shuffles them by the seed.
        callbacks: Lightning callbacks, called after the evaluation and before the checkpoint of a step; one may set
            `trainer.should_stop`. Hooks of Lightning's validation are not called.
        loss: function of the rewards or margins that `register_loss` accepts, or the value of `loss.name`.
        metrics: further numbers of each evaluation, logged as `val/NAME`: functions of the rewards of the chosen and of
            the rejected responses.
        options: any options by their names on the command line, such as `{"optimizer.beta2": 0.95}`; they win over the
            other arguments.
        unknown: refused.

    Returns:
        The result, with the validation metrics of the best weights.

    Raises:
        ConfigError: if options are unknown or conflict, or the folder holds another run or is in use.
        DataError: if the pairs cannot be used.
        CheckpointError: if the base model cannot be loaded, or a checkpoint to resume from is of another run.
        TrainingDiverged: if the loss stops being finite.
        Interrupted: if the user stops the run; a checkpoint is left.
        DiskError: if a file cannot be written.
        TypeError: if an argument is unknown.
    """
    if unknown:
        known = [name for name in signature(train_reward_model).parameters if name not in ("model_name", "unknown")]
        name = next(iter(unknown))
        found = did_you_mean("argument of train_reward_model", name, ["model_name", *known])
        if (other := counterpart(name)) is not None:
            found = f"unknown argument of train_reward_model '{name}'; {other}"
        raise TypeError(f"{found}; any option of the command line fits into options={{...}}")
    if isinstance(model_name, TrainConfig | DictConfig):
        rest = (batch_size, learning_rate, max_length, adapter, output_dir, precision, loss)
        if (optimizer, epochs, seed, options or None, *rest) != ("adamw", 1.0, 0, None, *[None] * len(rest)):
            raise TypeError("the composed options hold every option of the run; set them there, not as arguments")
        config = model_name if isinstance(model_name, TrainConfig) else typed(model_name, TrainConfig)
        data = None if data_path is None and val is None else pairs_in_memory(data_path, val, config.data)
        return run_training(config, data=data, order=order, callbacks=callbacks, metrics=metrics)
    if not isinstance(model_name, str | os.PathLike):
        raise TypeError(f"model_name must be a preset, a hub id or a path, got {type(model_name).__name__}")
    if callable(loss):
        function, loss = loss, getattr(loss, "__name__", "loss")
        register_loss(loss)(function)
    name = os.fspath(model_name)
    is_in_memory = not all(each is None or names_files(each) for each in (data_path, val))
    given = {
        model_overrides(name)[0].partition("=")[0]: name,
        "optimizer": optimizer,
        "data.train": None if is_in_memory else data_path,
        "training.epochs": epochs,
        "batching.batch_size": batch_size,
        "data.val": None if is_in_memory else val,
        "optimizer.lr": learning_rate,
        "model.max_length": max_length,
        "adapter": adapter,
        "seed": seed,
        "output_dir": output_dir or new_folder(),
        "hardware.precision": precision,
        "loss.name": loss,
    }
    chosen = {name: value for name, value in given.items() if value is not None} | dict(options)
    config = typed(compose([f"{name}={written(value)}" for name, value in chosen.items()]), TrainConfig)
    if config.hardware.devices * config.hardware.num_nodes > 1 and output_dir is None and "output_dir" not in options:
        raise ConfigError("a run of several processes needs output_dir=FOLDER, so that all of them write into one")
    data = pairs_in_memory(data_path, val, config.data) if is_in_memory else None
    return run_training(config, data=data, order=order, callbacks=callbacks, metrics=metrics)


def run_training(
    config: TrainConfig | DictConfig,
    *,
    data: TrainVal | None = None,
    order: PairOrder | None = None,
    callbacks: Sequence[Callback] = (),
    metrics: Mapping[str, PairMetric] = MappingProxyType({}),
) -> RunResult:
    """`train_reward_model` with composed options.

    Args:
        config: the options, as `rm_optimizer.compose` or `rm_optimizer.schema.typed` returns them.
        data: pairs in memory, in place of those in `config.data`.
        order: order of the training pairs by epoch; None shuffles them by the seed.
        callbacks: Lightning callbacks.
        metrics: further numbers of each evaluation.
    """
    if isinstance(config, DictConfig):
        config = typed(config, TrainConfig)
    if not isinstance(config, TrainConfig):
        raise TypeError(
            f"config must be the options of a run, got {type(config).__name__}; make them by compose(['model=tiny', …])"
        )
    if config.loss.name is not None:
        loss_named(config.loss.name)  # an unknown name is refused before anything is loaded
    require_callbacks(config, callbacks)
    half = config.trains_half_weights
    check_compatible(config.optimizer, config.hardware, config.schedule, trains_half_weights=half)
    require_devices(config.hardware)
    require_wandb_key(config.logger)
    run_dir = Path(config.output_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    is_first_rank = getattr(rank_zero_only, "rank", 0) == 0
    with run_lock(run_dir) if is_first_rank else nullcontext():
        if is_first_rank:
            require_usable(config)
        if (ended := ended_run(config)) is not None:
            result, said = ended
            require_same_pairs(result.data, data)
            if config.data.curriculum is None:  # the order follows from the options, which are the same
                require_same_order(result.data, order)
            log.info("%s", said)
            return result
        start = begin(config, is_first_rank=is_first_rank)
        pl.seed_everything(config.seed, workers=True, verbose=False)
        if config.hardware.num_threads:
            torch.set_num_threads(config.hardware.num_threads)
        run = prepare(config, start, data, order, metrics)
        if is_first_rank:
            write_record(run.record, config.data if data is None else None, run_dir)
            try:
                needs = count_run(config, run.module.model, run.datamodule)
                log.info("%s\n%s", *needs.sentences()[:2])
                if start.checkpoint is None and (free := shutil.disk_usage(run_dir).free) < needs.disk:
                    log.warning("only %s are free in %s, so a later checkpoint will stop the run", size(free), run_dir)
            except Exception as error:  # of the model's own code, on tensors without data
                log.info("memory and disk are not estimated (%s: %s)", type(error).__name__, error)
        with StopSignal() as stop, open_loggers(config.logger, run_dir, run.record.options) as loggers:
            try:
                result = fit(run, stop, start.checkpoint, callbacks, loggers)
            except StopNow:
                raise Interrupted(stopped_at_once(run_dir)) from None
            except TrainingDiverged as error:
                write_text(run_dir / DIVERGED_FILE, json.dumps({"error": str(error)}) + "\n")
                raise
            if is_first_rank:
                log_outcome(loggers, result, log_model=config.logger.log_model)
            return result


def quiet(config: TrainConfig, *, in_memory: bool = False) -> TrainConfig:
    """The options of a run without those that need callbacks, servers, loggers or suites.

    Args:
        config: the options, which stay as they are.
        in_memory: true for a run whose pairs are passed to it, so that options of their files are left out too.
    """
    training = replace(
        config.training, calibration=CalibrationConfig(), hessian=HessianConfig(), suites=None, suites_every=None
    )
    data = config.data
    if in_memory:
        data = replace(data, train=None, val=None, max_pairs=None, streaming=Streaming.off)
    logger = replace(config.logger, tensorboard=False, wandb=False)
    return replace(config, training=training, data=data, publish=PublishConfig(), logger=logger)


def measured(config: TrainConfig, steps: int) -> str:
    """Run three steps in a temporary folder, and tell the time of a run and the memory in one sentence.

    Args:
        config: the composed options.
        steps: optimizer steps of the run.
    """
    config = quiet(config)
    config.training.max_steps, config.training.eval_at_start, config.profile_memory = 3, False, True
    config.schedule.warmup_steps, config.schedule.warmup_ratio = None, 0.0
    with tempfile.TemporaryDirectory() as folder:
        config.output_dir = folder
        run_training(config)
        profile = json.loads((Path(folder) / PROFILE_FILE).read_text(encoding="utf-8"))
    median = profile["median"]
    memory = next(median[name] for name in (GPU_MEMORY[0], CPU_MEMORY[1]) if name in median)
    return (
        f"measured: {median['step_seconds']:.3g} s a step on {profile['device']}, "
        f"{duration(median['step_seconds'] * steps)} for all without evaluations; "
        f"{size(memory)} ({profile['memory']})"
    )
