"""End of a run: evaluation, export and result of its best weights."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.model.sharding import is_sharded, load_whole_weights
from rm_optimizer.core.pairs.overlap import TRAINED_PAIRS_FILE
from rm_optimizer.core.storage.loading import load_weights, read_checkpoint
from rm_optimizer.core.tokens.audit import length_baseline
from rm_optimizer.errors import CheckpointError, Interrupted
from rm_optimizer.evaluation.pair_rewards import ScoringStopped, write_evaluation, write_pair_rewards
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.records.provenance import commit, machine, versions
from rm_optimizer.records.run_folder import PAIR_REWARDS_FILE, RunFolder
from rm_optimizer.schema.data import Streaming
from rm_optimizer.training.callbacks.evaluation_plan import warn_of_unmeasured
from rm_optimizer.training.callbacks.interrupt import stopped_after
from rm_optimizer.training.divergence import require_finite
from rm_optimizer.training.fitting import Fit
from rm_optimizer.training.folder.model_card import write_card
from rm_optimizer.training.folder.record import RUN_KEY, DataSummary, RunResult
from rm_optimizer.training.preparation import Run, list_skipped

log = logging.getLogger("rm_optimizer")


def finish(run: Run, fit: Fit) -> RunResult:
    """Evaluate the best weights on every rank; the first rank writes them and the result.

    Args:
        run: the parts of the run.
        fit: its optimizer steps.

    Raises:
        Interrupted: if the user stops the evaluation.
        TrainingDiverged: if a reward is not finite.
    """
    config, model, val = run.config, run.module.model, run.datamodule.data.val
    best = RunFolder(run.run_dir).best_checkpoint
    run.evaluation.best.step = _load_best(run, fit.is_first_rank)
    warn_of_unmeasured(config.training.monitor, run.evaluation.best)
    model.to(fit.device)  # Lightning left it on the CPU
    try:
        rewards = run.evaluation.rewards(model)
    except ScoringStopped:
        where = " in the evaluation of the best weights"
        told = stopped_after(fit.steps, run.module.num_steps, where, run.run_dir, run.module.last_checkpoint)
        raise Interrupted(told) from None
    model.cpu()
    require_finite(rewards, val, run.run_dir, run.evaluation.best.step)
    metrics = run.evaluation.metrics(rewards, num_bootstrap=config.training.num_bootstrap, seed=config.seed)
    result = replace(_result(run, fit, metrics), own_metrics=run.evaluation.own_metrics(rewards))
    if fit.is_first_rank:
        if config.data.streaming != Streaming.off:  # its rows have been read only now
            list_skipped(run.datamodule.skipped, run.run_dir)
        report, step = run.datamodule.val_tokens.report, run.evaluation.best.step
        write_evaluation(run.run_dir / "evaluations" / "best", rewards, metrics, report, step)
        write_pair_rewards(run.run_dir / PAIR_REWARDS_FILE, rewards, val)
        exported = _whole_model(model, best, trust_remote_code=config.model.trust_remote_code)
        seen = [run.run_dir / TRAINED_PAIRS_FILE]
        both = np.concatenate([rewards.chosen, rewards.rejected])
        spread = {"mean": float(both.mean()), "std": float(both.std()), "num": len(both), "beta": config.loss.beta}
        exported.save_pretrained(result.export, statistics=spread, beside=seen)
        write_card(run.run_dir, result)
        result.save()
    return result


def _whole_model(model: BradleyTerryRM, best: Path, *, trust_remote_code: bool) -> BradleyTerryRM:
    """The model to export; if it is sharded over ranks, it is loaded from the best checkpoint on the CPU."""
    if not is_sharded(model):
        return model
    return BradleyTerryRM.from_pretrained(best, trust_remote_code=trust_remote_code)


def _load_best(run: Run, is_first_rank: bool) -> int:
    """Load the best weights, and return their step."""
    model, path = run.module.model, RunFolder(run.run_dir).best_checkpoint
    payload, weights = read_checkpoint(path)
    if is_sharded(model):
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


def _result(run: Run, fit: Fit, metrics: PairwiseMetrics) -> RunResult:
    config, pairs = run.config, run.module.pairs_seen
    return RunResult(
        status=fit.status,
        run_dir=str(run.run_dir),
        model=config.model.name,
        optimizer=config.optimizer.name,
        seed=config.seed,
        steps=fit.steps,
        best_step=run.evaluation.best.step,
        monitor=config.training.monitor,
        export=str(run.run_dir / BEST_FOLDER),
        metrics=metrics,
        data=_data_summary(run),
        parameters=sum(p.numel() for p in run.module.parameters() if p.requires_grad),
        wall_seconds=time.perf_counter() - run.started,
        pairs_per_second=pairs / max(fit.seconds - run.evaluation.seconds, 1e-9) if pairs else None,
        versions=versions(),
        machine=machine(),
        commit=commit(),
        config=run.record.options,
        run_id=run.record.run_id,
        extensions=run.record.extensions,
        evaluations=asdict(run.evaluation.plan) | {"seconds": run.evaluation.seconds},
    )


def _data_summary(run: Run) -> DataSummary:
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
