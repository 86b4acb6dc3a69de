"""`train_reward_model`: the one way to train."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.model.sharding import is_sharded, load_whole_weights
from rm_optimizer.core.pairs.audit import length_baseline
from rm_optimizer.core.pairs.dataset import TrainVal
from rm_optimizer.core.pairs.orders import PairOrder
from rm_optimizer.core.pairs.trained_pairs import TRAINED_PAIRS_FILE, TrainedPairs
from rm_optimizer.core.rows.bad_rows import SkippedRow
from rm_optimizer.core.storage.checkpoint import read_checkpoint
from rm_optimizer.core.storage.loading import load_weights
from rm_optimizer.errors import CheckpointError, Interrupted
from rm_optimizer.evaluation.pair_rewards import PairRewards, ScoringStopped, write_evaluation, write_pair_rewards
from rm_optimizer.optim import check_compatible
from rm_optimizer.records.files import write_text
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.records.provenance import commit, machine, versions
from rm_optimizer.records.run_folder import METRICS_FILE, PAIR_REWARDS_FILE, RunFolder, checkpoint_step, require_usable
from rm_optimizer.schema import ModelConfig, TrainConfig
from rm_optimizer.schema.data import Streaming
from rm_optimizer.training.base_model import trainable_model
from rm_optimizer.training.callbacks.best import require_monitored, warn_of_unmeasured
from rm_optimizer.training.callbacks.evaluation_plan import PER_EPOCH, plan_of
from rm_optimizer.training.callbacks.interrupt import StopNow, StopSignal
from rm_optimizer.training.callbacks.loop import Checkpoints, Evaluation, StepProgress
from rm_optimizer.training.callbacks.memory_profile import PROFILE_COLUMNS, PROFILE_ROWS, MemoryProfile
from rm_optimizer.training.callbacks.progress import ProgressLines, shows_bars
from rm_optimizer.training.callbacks.run_callback import columns_of, require_callbacks
from rm_optimizer.training.compiling import compile_backbone
from rm_optimizer.training.data.in_memory import PreferenceDataModule
from rm_optimizer.training.data.run_data import data_module, load_data
from rm_optimizer.training.divergence import require_finite
from rm_optimizer.training.folder.extension import extension_at
from rm_optimizer.training.folder.lock import run_lock
from rm_optimizer.training.folder.record import RUN_KEY, RunRecord, Start, recorded, write_record
from rm_optimizer.training.folder.recorder import COLUMNS, MetricsCSV
from rm_optimizer.training.folder.result import TOY_WARNING, DataSummary, RunResult, RunStatus, is_toy
from rm_optimizer.training.folder.start import (
    begin,
    finished_result,
    finished_sentence,
    require_same_data,
    require_same_order,
)
from rm_optimizer.training.lightning_module import RewardModelLightning
from rm_optimizer.training.processes import require_devices
from rm_optimizer.training.trainer import build_loggers, build_trainer, close_loggers, require_wandb_key

log = logging.getLogger("rm_optimizer")

SKIPPED_FILE = "skipped_rows.txt"
"""Rows that gave no pair, one a line, in the run folder."""


def train_reward_model(
    config: TrainConfig,
    *,
    data: TrainVal | None = None,
    order: PairOrder | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Train, evaluate and export one reward model, and leave everything in `config.output_dir`.

    The folder holds `identity.json`, `options.json`, `metrics.csv`, `evaluations/`, `checkpoints/`, `best/` (what
    `transformers` loads), `pair_rewards.jsonl` and `run.json`. It belongs to one run: see `resume`.

    Args:
        config: the composed options, as `rm_optimizer.schema.typed` returns them.
        data: pairs in memory, in place of those that `config.data` names.
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
    require_callbacks(config, callbacks)
    check_compatible(config.optimizer, config.hardware, config.schedule)
    require_devices(config.hardware)
    require_wandb_key(config.logger)
    run_dir = Path(config.output_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    is_first_rank = getattr(rank_zero_only, "rank", 0) == 0
    with run_lock(run_dir) if is_first_rank else nullcontext():
        if is_first_rank:
            require_usable(config)
        if (result := finished_result(config)) is not None:
            if data is not None:
                require_same_data(result.data, data)
            require_same_order(result.data, order)
            log.info("%s", finished_sentence(result, config))
            return result
        start = begin(config, run_dir, is_first_rank=is_first_rank)
        pl.seed_everything(config.seed, workers=True, verbose=False)
        if config.hardware.num_threads:
            torch.set_num_threads(config.hardware.num_threads)
        run = _prepare(config, run_dir, start, data, order)
        if is_first_rank:
            write_record(run.record, config.data if data is None else None, run_dir)
        with StopSignal() as stop:
            try:
                return _finish(run, _fit(run, stop, start.checkpoint, callbacks))
            except StopNow:
                raise Interrupted(_stopped_at_once(run_dir)) from None


_ANEW = Start()


@dataclass
class _Run:
    """Parts of one run."""

    config: TrainConfig
    run_dir: Path
    started: float
    module: RewardModelLightning
    datamodule: PreferenceDataModule
    evaluation: Evaluation
    record: RunRecord
    notes: tuple[str, ...]
    device: torch.device | None = None
    fit_seconds: float = 0.0
    steps: int = 0
    is_first_rank: bool = True


def _prepare(
    config: TrainConfig,
    run_dir: Path,
    start: Start = _ANEW,
    given: TrainVal | None = None,
    order: PairOrder | None = None,
) -> _Run:
    started = time.perf_counter()
    if is_toy(config.model.path, given or config.data.train):
        log.warning(TOY_WARNING, config.model.name)
    data = load_data(config, given)
    if start.before is not None:
        require_same_data(start.before, data)
        require_same_order(start.before, order)
    require_monitored(config.training.monitor, data.val)
    _list_skipped([*data.train.skipped, *data.val.skipped], run_dir)
    notes = data.notes(uses_margins=config.loss.margin_scale > 0)
    for note in notes:
        log.warning(note)
    model = trainable_model(config, data.train)
    datamodule = data_module(data, config, model, order)
    dropped = [*datamodule.data.train.skipped, *datamodule.data.val.skipped]
    if len(dropped) > len(data.train.skipped) + len(data.val.skipped):  # by the chat template
        _list_skipped(dropped, run_dir)
    record = recorded(config, start, data, order, datamodule.num_steps)
    module = RewardModelLightning(
        model,
        loss=config.loss,
        optimizer=config.optimizer,
        schedule=config.schedule,
        num_steps=datamodule.num_steps,
        gradient_clip_norm=config.training.gradient_clip_norm,
        pair_ids=datamodule.pair_ids,
        run_dir=run_dir,
    )
    module.record = record
    evaluation = Evaluation(
        datamodule,
        run_dir,
        config.training,
        plan=plan_of(config, datamodule),
        beta=config.loss.beta,
    )
    if config.hardware.compile:
        compile_backbone(model)
    run = _Run(config, run_dir, started, module, datamodule, evaluation, record, notes)
    _keep_trained_pairs(run)
    return run


def _keep_trained_pairs(run: _Run) -> None:
    """Write fingerprints of the training pairs, with those of the base model and of the run before it was resumed."""
    found, path = run.datamodule.trained_pairs(), run.run_dir / TRAINED_PAIRS_FILE
    for source in (run.config.model.path, path.parent if path.is_file() else None):
        earlier = None if source is None else TrainedPairs.recorded(source)
        found = found if earlier is None else found.merged(earlier)
    found.write(path)


def _list_skipped(skipped: Sequence[SkippedRow], run_dir: Path) -> None:
    """Say how many rows gave no pair, and list them in a file."""
    if skipped:
        path = write_text(run_dir / SKIPPED_FILE, "".join(f"{row}\n" for row in skipped))
        log.warning("%d rows gave no pair; %s lists them, the first is %s", len(skipped), path, skipped[0])


def _fit(run: _Run, stop: StopSignal, checkpoint: Path | None, given: Sequence[Callback]) -> RunStatus:
    config = run.config
    every = config.training.checkpoint_every or max(
        1, run.datamodule.steps_per_epoch // (config.training.evals_per_epoch or PER_EPOCH)
    )
    is_streamed = config.data.streaming != Streaming.off  # the pairs read are known only as they are
    callbacks: list[Callback] = [
        *([MemoryProfile(run.run_dir)] if config.profile_memory else []),
        run.evaluation,
        *given,
        Checkpoints(
            run.run_dir,
            every=every,
            keep=config.training.keep_checkpoints,
            stop=stop,
            before_saving=partial(_keep_trained_pairs, run) if is_streamed else None,
        ),
    ]
    run.evaluation.stop = stop
    if checkpoint is not None:
        callbacks += extension_at(checkpoint_step(checkpoint), run.record.extensions, config.schedule)
    if config.training.progress:
        callbacks.append(_progress(run))
    resume_step = checkpoint_step(checkpoint) if checkpoint else None
    loggers: list[Logger] = [MetricsCSV(run.run_dir, resume_step, COLUMNS | columns_of(given))]
    if config.profile_memory:
        loggers.append(MetricsCSV(run.run_dir, resume_step, PROFILE_COLUMNS, PROFILE_ROWS))
    loggers += build_loggers(config.logger, run.run_dir)
    # The data end the run; one step more lets a run that was stopped in its last evaluation start, and make it.
    trainer = build_trainer(config.hardware, loggers, callbacks, run.module.num_steps + 1)
    before = time.perf_counter()
    try:
        trainer.fit(run.module, datamodule=run.datamodule, ckpt_path=checkpoint, weights_only=True)
    finally:
        close_loggers(trainer.loggers)
        if trainer.is_global_zero and is_streamed:
            _keep_trained_pairs(run)
    run.fit_seconds = time.perf_counter() - before
    run.steps = trainer.global_step
    run.is_first_rank = trainer.is_global_zero
    run.device = trainer.strategy.root_device
    if trainer.strategy.reduce_boolean_decision(stop.requested, all=False):  # a signal may have reached one process
        raise Interrupted(_stopped(run, " in its evaluation" if run.evaluation.missed else ""))
    is_whole = run.steps == run.module.num_steps
    assert is_whole or trainer.should_stop, f"training ended after step {run.steps} of {run.module.num_steps}"
    return RunStatus.finished if is_whole and not run.evaluation.stopped_early else RunStatus.early_stopped


def _progress(run: _Run) -> Callback:
    """A bar where one can be drawn, or else lines; and where to follow the numbers."""
    log.info("the metrics of every step are in %s", run.run_dir / METRICS_FILE)
    if shows_bars():
        return StepProgress(leave=True)
    run.evaluation.lines = ProgressLines()
    return run.evaluation.lines


def _stopped(run: _Run, where: str) -> str:
    """The sentence of a run that the user stopped."""
    best = RunFolder(run.run_dir).best_checkpoint
    so_far = f", the best so far {best}" if best.exists() else ""
    saved = f"its checkpoint is {run.module.last_checkpoint}{so_far}; resume=auto goes on from there"
    return f"stopped after step {run.steps} of {run.module.num_steps}{where}; {saved}"


def _stopped_at_once(run_dir: Path) -> str:
    """The sentence of a run that a second signal ended."""
    newest = list(RunFolder(run_dir).checkpoints.values())
    saved = (
        f"the newest checkpoint is {newest[-1]}; resume=auto goes on from there" if newest else "nothing was saved yet"
    )
    return f"stopped at once, without a checkpoint of this step; {saved}"


def _finish(run: _Run, status: RunStatus) -> RunResult:
    """Evaluate the best weights on every rank; the first one writes them and what is known of them."""
    config, model, val = run.config, run.module.model, run.datamodule.data.val
    best = RunFolder(run.run_dir).best_checkpoint
    warn_of_unmeasured(config.training.monitor, run.evaluation.best)
    run.evaluation.best.step = _load_best(model, best, run)
    model.to(run.device)  # Lightning left it on the CPU
    try:
        rewards = run.evaluation.rewards(model)
    except ScoringStopped:
        raise Interrupted(_stopped(run, " in the evaluation of the best weights")) from None
    model.cpu()
    require_finite(rewards, val, run.run_dir, run.evaluation.best.step)
    metrics = run.evaluation.metrics(rewards, num_bootstrap=config.training.num_bootstrap, seed=config.seed)
    result = _result(run, status, metrics)
    if run.is_first_rank:
        if config.data.streaming != Streaming.off:  # only now have its rows been read
            _list_skipped(run.datamodule.skipped, run.run_dir)
        report, step = run.datamodule.val_tokens.report, run.evaluation.best.step
        write_evaluation(run.run_dir / "evaluations" / "best", rewards, metrics, report, step)
        write_pair_rewards(run.run_dir / PAIR_REWARDS_FILE, rewards, val)
        exported = _whole_model(model, best, config.model)
        seen = [run.run_dir / TRAINED_PAIRS_FILE]
        exported.save_pretrained(result.export, statistics=_statistics(rewards, config.loss.beta), beside=seen)
        result.save()
    return result


def _whole_model(model: BradleyTerryRM, best: Path, config: ModelConfig) -> BradleyTerryRM:
    """The model to export: where shards of it are on other ranks, what the best checkpoint holds, on the CPU."""
    if not is_sharded(model):
        return model
    return BradleyTerryRM.from_pretrained(best, trust_remote_code=config.trust_remote_code)


def _load_best(model: BradleyTerryRM, path: Path, run: _Run) -> int:
    """Load the best weights; return the step that they are of."""
    payload, weights = read_checkpoint(path)
    if is_sharded(model):
        load_whole_weights(model.model, weights)
    else:
        load_weights(model.model, weights, path)
    record, expected = payload.get(RUN_KEY) or {}, run.evaluation.best.step
    if record.get("run_id", run.record.run_id) != run.record.run_id and run.is_first_rank:
        raise CheckpointError(f"{path} belongs to run {record['run_id']}, but this is run {run.record.run_id}")
    step = int(record.get("step", expected))
    if step != expected:
        log.warning("%s holds the weights of step %d, not %d, of before the run was resumed", path, step, expected)
    return step


def _statistics(rewards: PairRewards, beta: float) -> dict[str, float]:
    both = np.concatenate([rewards.chosen, rewards.rejected])
    return {"mean": float(both.mean()), "std": float(both.std()), "num": len(both), "beta": beta}


def _result(run: _Run, status: RunStatus, metrics: PairwiseMetrics) -> RunResult:
    config = run.config
    return RunResult(
        status=status,
        run_dir=str(run.run_dir),
        model=config.model.name,
        optimizer=config.optimizer.name,
        seed=config.seed,
        steps=run.steps,
        best_step=run.evaluation.best.step,
        monitor=config.training.monitor,
        export=str(run.run_dir / BEST_FOLDER),
        metrics=metrics,
        data=_data_summary(run),
        parameters=sum(p.numel() for p in run.module.parameters() if p.requires_grad),
        wall_seconds=time.perf_counter() - run.started,
        pairs_per_second=_pairs_per_second(run),
        versions=versions(),
        machine=machine(),
        commit=commit(),
        config=run.record.options,
        run_id=run.record.run_id,
        extensions=run.record.extensions,
        evaluations=dataclasses.asdict(run.evaluation.plan) | {"seconds": run.evaluation.seconds},
    )


def _pairs_per_second(run: _Run) -> float | None:
    pairs, seconds = run.module.pairs_seen, run.fit_seconds - run.evaluation.seconds
    return pairs / max(seconds, 1e-9) if pairs else None


def _data_summary(run: _Run) -> DataSummary:
    datamodule, data = run.datamodule, run.datamodule.data
    return DataSummary(
        train_pairs=datamodule.num_train_pairs,
        val_pairs=len(data.val),
        val_origin=data.val_origin,
        train_fingerprint=run.record.train_fingerprint,
        val_fingerprint=run.record.val_fingerprint,
        skipped_rows=datamodule.num_skipped,
        truncation=datamodule.truncation(),
        length_baseline=length_baseline(data.val.pairs).value,
        ceiling=data.ceiling,
        notes=run.notes,
        order=run.record.order,
    )
