"""Fit of a run: its optimizer steps, and the evaluation and export of its best weights."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.model.sharding import is_sharded, load_whole_weights
from rm_optimizer.core.storage.adapter_files import adapter_tensor_names
from rm_optimizer.core.storage.loading import load_weights, read_checkpoint
from rm_optimizer.core.storage.model_files import TRAINED_PAIRS_FILE
from rm_optimizer.core.tokens.audit import length_baseline
from rm_optimizer.errors import CheckpointError, Interrupted
from rm_optimizer.evaluation.pair_rewards import PairRewards, ScoringStopped, write_evaluation, write_pair_rewards
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.records.provenance import commit, machine, versions
from rm_optimizer.records.run_folder import METRICS_FILE, PAIR_REWARDS_FILE, RunFolder, checkpoint_step
from rm_optimizer.schema import HardwareConfig
from rm_optimizer.schema.data import Streaming
from rm_optimizer.training.callbacks.checkpoints import Checkpoints, Extension
from rm_optimizer.training.callbacks.evaluation import SCORE_METRICS
from rm_optimizer.training.callbacks.evaluation_plan import PER_EPOCH
from rm_optimizer.training.callbacks.memory_profile import PROFILE_COLUMNS, PROFILE_ROWS, MemoryProfile
from rm_optimizer.training.callbacks.run_callback import columns_of
from rm_optimizer.training.folder.model_card import write_card
from rm_optimizer.training.folder.record import RUN_KEY, DataSummary, RunResult, RunStatus
from rm_optimizer.training.loggers import COLUMNS, MetricsCSV, ProgressLines, StepProgress, shows_bars
from rm_optimizer.training.preparation import Run, list_skipped
from rm_optimizer.training.stopping import StopSignal, require_finite
from rm_optimizer.training.strategy import cluster_plugins, strategy_of

log = logging.getLogger("rm_optimizer")


def fit(
    run: Run, stop: StopSignal, checkpoint: Path | None, given: Sequence[Callback], others: Sequence[Logger]
) -> RunResult:
    """Take the optimizer steps of a run; evaluate and export its best weights.

    Args:
        run: the parts of the run.
        stop: signal of the user to stop.
        checkpoint: checkpoint to continue from; None starts a new run.
        given: callbacks of the caller.
        others: loggers in addition to `metrics.csv`.

    Raises:
        Interrupted: if the user stops the run; a checkpoint is left.
        TrainingDiverged: if a number stops being finite.
    """
    config, evaluation = run.config, run.evaluation
    evaluation.stop = stop
    resume_step = checkpoint_step(checkpoint) if checkpoint else None
    every = config.training.checkpoint_every or max(
        1, run.datamodule.steps_per_epoch // (config.training.evals_per_epoch or PER_EPOCH)
    )
    is_streamed = config.data.streaming != Streaming.off  # the pairs are known only once they are read
    callbacks: list[Callback] = [
        *([MemoryProfile(run.run_dir)] if config.profile_memory else []),
        evaluation,
        *([] if run.suites is None else [run.suites]),
        *given,
        Checkpoints(
            run.run_dir,
            every=every,
            keep=config.training.keep_checkpoints,
            stop=stop,
            before_saving=run.keep_trained_pairs if is_streamed else None,
        ),
    ]
    for each in run.record.extensions[-1:]:
        if each["after_step"] == resume_step:
            callbacks.append(Extension(config.schedule, from_steps=each["from_steps"], to_steps=each["to_steps"]))
    if config.training.progress:
        log.info("the metrics of every step are in %s", run.run_dir / METRICS_FILE)
        evaluation.lines = None if shows_bars() else ProgressLines()
        callbacks.append(evaluation.lines or StepProgress(leave=True))
    names = [*evaluation.own, *(SCORE_METRICS if config.loss.score_range is not None else ())]
    own = {f"val/{name}": f"eval_{name}" for name in names}
    if config.model.router_aux_loss_coef is not None:
        own["train/router_loss"] = "train_router_loss"
    own |= {} if run.suites is None else run.suites.columns
    loggers: list[Logger] = [MetricsCSV(run.run_dir, resume_step, COLUMNS | columns_of(given) | own)]
    if config.profile_memory:
        loggers.append(MetricsCSV(run.run_dir, resume_step, PROFILE_COLUMNS, PROFILE_ROWS))
    # The data end the run. One step more lets a run that was stopped in its last evaluation start, and repeat it.
    trainer = build_trainer(config.hardware, [*loggers, *others], callbacks, run.module.num_steps + 1)
    before = time.perf_counter()
    try:
        trainer.fit(run.module, datamodule=run.datamodule, ckpt_path=checkpoint, weights_only=True)
    finally:
        if trainer.is_global_zero and is_streamed:
            run.keep_trained_pairs()
    seconds = time.perf_counter() - before
    # A signal may have reached one process only.
    if trainer.strategy.reduce_boolean_decision(stop.requested, all=False):
        raise _interrupted(run, trainer.global_step, " in its evaluation" if evaluation.missed else "")
    steps, planned = trainer.global_step, run.module.num_steps
    assert steps == planned or trainer.should_stop, f"training ended after step {steps} of {planned}"
    return _finished(run, trainer, seconds)


def build_trainer(
    hardware: HardwareConfig, loggers: list[Logger], callbacks: list[Callback], num_steps: int
) -> pl.Trainer:
    """Lightning trainer that only drives steps; evaluation, checkpoints and logging are this package's callbacks."""
    quiet_libraries()
    return pl.Trainer(
        accelerator=hardware.accelerator,
        devices=hardware.devices,
        num_nodes=hardware.num_nodes,
        strategy=strategy_of(hardware),
        plugins=cluster_plugins(),
        precision=hardware.precision,  # type: ignore[arg-type]
        max_steps=num_steps,
        max_epochs=1,
        logger=loggers,
        callbacks=callbacks,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=any(isinstance(callback, StepProgress) for callback in callbacks),
        use_distributed_sampler=False,
        log_every_n_steps=1,
    )


def quiet_libraries() -> None:
    """Silence Lightning's start-up notices, and one deprecation warning of torch 2.13 that it causes."""
    # Lightning 2.6 still calls LeafSpec(); harmless until torch removes it.
    warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated", category=FutureWarning)
    for name in ("pytorch_lightning", "lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _interrupted(run: Run, steps: int, where: str) -> Interrupted:
    """The error for a run that the user stopped; `where` names the interrupted activity."""
    best = RunFolder(run.run_dir).best_checkpoint
    so_far = f", the best so far {best}" if best.exists() else ""
    saved = f"its checkpoint is {run.module.last_checkpoint}{so_far}; resume=auto continues there"
    return Interrupted(f"stopped after step {steps} of {run.module.num_steps}{where}; {saved}")


def _finished(run: Run, trainer: pl.Trainer, seconds: float) -> RunResult:
    """Evaluate the best weights on every rank; the first rank writes them and the result."""
    config, model, val, evaluation = run.config, run.module.model, run.datamodule.data.val, run.evaluation
    best = RunFolder(run.run_dir).best_checkpoint
    evaluation.best.step = _load_best(run, best, trainer.is_global_zero)
    if evaluation.best.value is None:
        log.warning(
            "training.monitor=%s had no finite value at any evaluation; the weights of the last one, after step %d, "
            "are exported",
            config.training.monitor,
            evaluation.best.step,
        )
    model.to(trainer.strategy.root_device)  # Lightning left it on the CPU
    try:
        rewards = evaluation.rewards(model)
    except ScoringStopped:
        raise _interrupted(run, trainer.global_step, " in the evaluation of the best weights") from None
    model.cpu()
    require_finite(rewards, val, run.run_dir, evaluation.best.step)
    metrics = evaluation.metrics(rewards, num_bootstrap=config.training.num_bootstrap, seed=config.seed)
    result = _result(run, trainer, seconds, rewards, metrics)
    if trainer.is_global_zero:
        if config.data.streaming != Streaming.off:  # its rows have been read only now
            list_skipped(run.datamodule.skipped, run.run_dir)
        report = run.datamodule.val_tokens.report
        write_evaluation(run.run_dir / "evaluations" / "best", rewards, metrics, report, evaluation.best.step)
        write_pair_rewards(run.run_dir / PAIR_REWARDS_FILE, rewards, val)
        if is_sharded(model):  # its shards are on several ranks; the checkpoint holds whole weights
            model = BradleyTerryRM.from_pretrained(best, trust_remote_code=config.model.trust_remote_code)
        both = np.concatenate([rewards.chosen, rewards.rejected])
        spread = {"mean": float(both.mean()), "std": float(both.std()), "num": len(both), "beta": config.loss.beta}
        model.save_pretrained(result.export, statistics=spread, beside=[run.run_dir / TRAINED_PAIRS_FILE])
        write_card(run.run_dir, result)
        if run.suites is not None:
            run.suites.score(model.to(trainer.strategy.root_device), run.run_dir)
        result.save()
    return result


def _load_best(run: Run, path: Path, is_first_rank: bool) -> int:
    """Load the best weights, and return their step."""
    model = run.module.model
    payload, weights = read_checkpoint(path)
    if is_sharded(model):
        names = model.model.state_dict().keys() if run.module.base is None else adapter_tensor_names(model.model)
        if missing := sorted(names - weights.keys()):
            raise CheckpointError(f"{path} is damaged: {len(missing)} weights are missing, among them {missing[0]}")
        load_whole_weights(model.model, weights)
    else:
        load_weights(model.model, weights, path)
    record, expected = payload.get(RUN_KEY) or {}, run.evaluation.best.step
    if record.get("run_id", run.record.run_id) != run.record.run_id and is_first_rank:
        raise CheckpointError(f"{path} belongs to run {record['run_id']}, but this is run {run.record.run_id}")
    step = int(record.get("step", expected))
    if step != expected:
        log.warning(
            "%s holds the weights of step %d, not of step %d, from before the run was resumed", path, step, expected
        )
    return step


def _result(run: Run, trainer: pl.Trainer, seconds: float, rewards: PairRewards, metrics: PairwiseMetrics) -> RunResult:
    config, record, evaluation, pairs = run.config, run.record, run.evaluation, run.module.pairs_seen
    datamodule, data, steps = run.datamodule, run.datamodule.data, trainer.global_step
    is_whole = steps == run.module.num_steps and not evaluation.stopped_early
    summary = DataSummary(
        train_pairs=datamodule.num_train_pairs,
        val_pairs=len(data.val),
        val_origin=data.val_origin,
        train_fingerprint=record.train_fingerprint,
        val_fingerprint=record.val_fingerprint,
        skipped_rows=datamodule.num_skipped,
        truncation=datamodule.truncation(),
        length_baseline=length_baseline(data.val.pairs).value,
        ceiling=data.ceiling,
        notes=run.notes,
        order=record.order,
    )
    return RunResult(
        status=RunStatus.finished if is_whole else RunStatus.early_stopped,
        run_dir=str(run.run_dir),
        model=config.model.name,
        optimizer=config.optimizer.name,
        seed=config.seed,
        steps=steps,
        best_step=evaluation.best.step,
        monitor=config.training.monitor,
        export=str(run.run_dir / BEST_FOLDER),
        metrics=metrics,
        data=summary,
        parameters=sum(p.numel() for p in run.module.parameters() if p.requires_grad),
        wall_seconds=time.perf_counter() - run.started,
        pairs_per_second=pairs / max(seconds - evaluation.seconds, 1e-9) if pairs else None,
        versions=versions(),
        machine=machine(),
        commit=commit(),
        config=record.options,
        run_id=record.run_id,
        extensions=record.extensions,
        evaluations=asdict(evaluation.plan) | {"seconds": evaluation.seconds},
        own_metrics=evaluation.own_metrics(rewards),
    )
