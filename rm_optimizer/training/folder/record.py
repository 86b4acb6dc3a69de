"""Result and record of a run: options, pairs, versions and outcome, in its folder. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.core.rows.readers import is_hub_name
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.files import write_text
from rm_optimizer.records.run_folder import RESULT_FILE

SHUFFLED = "shuffled"
"""Identity of the order in which the seed shuffles the pairs of each epoch."""


class RunStatus(StrEnum):
    """End of a run."""

    finished = "finished"
    early_stopped = "early_stopped"


TOY_WARNING = (
    "model=%s starts from random weights and reads nothing but these pairs, so it is a toy; for rewards that judge "
    "language, take a pretrained model (model=qwen, model.path=MODEL)"
)
"""Sentence about a model from scratch on a user's own pairs, with a place for the preset's name."""


def is_toy(model_path: str | None, train: Any) -> bool:
    """True if a run of these `model.path` and `data.train` builds its model from scratch for real pairs."""
    return model_path is None and train is not None


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """Summary of the pairs of a run.

    Args:
        train_pairs: training pairs after dropping bad rows and pairs identical after truncation.
        val_pairs: validation pairs after dropping bad rows; those identical after truncation count as ties.
        val_origin: origin of the validation pairs, in words.
        train_fingerprint: digest of the training pairs.
        val_fingerprint: digest of the validation pairs.
        skipped_rows: rows dropped as bad, over both splits.
        truncation: token and truncation counts of each split.
        length_baseline: accuracy on validation of calling the longer response better.
        ceiling: accuracy of the synthetic world's gold reward on validation; None for other data.
        notes: sentences on labels, unused margins and conversations that occur in both splits.
        order: identity of the order of the training pairs.
    """

    train_pairs: int
    val_pairs: int
    val_origin: str
    train_fingerprint: str
    val_fingerprint: str
    skipped_rows: int
    truncation: dict[str, Any]
    length_baseline: float
    ceiling: float | None
    notes: tuple[str, ...] = ()
    order: str = SHUFFLED


@dataclass(frozen=True, kw_only=True)
class RunResult(JsonRecord, indent=2):
    """The result of a run, saved as `run.json` in its folder.

    Args:
        status: end of the run.
        run_dir: the run folder.
        model: the model preset's name.
        optimizer: the optimizer's name.
        seed: the run's seed.
        steps: optimizer steps done.
        best_step: step of the exported weights.
        monitor: metric that selected them.
        export: folder that `transformers` loads.
        metrics: validation metrics of the exported weights, with intervals.
        data: the pairs of the run.
        parameters: trainable parameters.
        wall_seconds: duration of fitting and evaluation.
        pairs_per_second: training pairs a second since the last resume, evaluation left out; None without a step.
        versions: versions of the packages that affect the numbers.
        machine: processor, cores, system.
        commit: the checkout's commit.
        config: the composed configuration.
        run_id: the run's id, which its checkpoints carry; None in results of earlier versions.
        extensions: later changes of the length, each `{"after_step", "from_steps", "to_steps"}`.
        evaluations: plan of the evaluations (`EvaluationPlan`), and the seconds of those during training.
        own_metrics: numbers of `train_reward_model(metrics=…)` on validation, by name.

    Wherever a path is taken, a result is the folder of its exported model.
    """

    status: RunStatus
    run_dir: str
    model: str
    optimizer: str
    seed: int
    steps: int
    best_step: int
    monitor: str
    export: str
    metrics: PairwiseMetrics
    data: DataSummary
    parameters: int
    wall_seconds: float
    pairs_per_second: float | None
    versions: dict[str, str]
    machine: dict[str, str]
    commit: str | None
    config: dict[str, Any]
    run_id: str | None = None
    extensions: tuple[dict[str, int], ...] = ()
    evaluations: dict[str, float] | None = None
    own_metrics: dict[str, float] = field(default_factory=dict)

    def __fspath__(self) -> str:
        return self.export

    def __str__(self) -> str:
        return self.export

    def summary(self) -> dict[str, str]:
        """The run, its metrics on validation and its model."""
        return {
            "run": f"{self.model}, {self.optimizer}, seed {self.seed}, {self.ending} after step {self.steps}",
            "pairs": f"{self.data.train_pairs} to train, {self.metrics.num_pairs} to validate",
            "accuracy": str(self.metrics.accuracy),
            "NLL": str(self.metrics.nll),
            **{name: f"{value:.4g}" for name, value in self.own_metrics.items()},
            "best step": str(self.best_step),
            "model": self.export,
        }

    @property
    def objective(self) -> float:
        """Negative log-likelihood on validation, the objective that a sweep minimizes."""
        return self.metrics.nll.value

    @property
    def ending(self) -> str:
        """Status in words; it says so if the exported weights are those from before training."""
        untrained = f"; no step improved {self.monitor}, so the export holds the weights from before training"
        return self.status.value + (untrained if self.best_step == 0 < self.steps else "")

    def entries(self) -> dict[str, Any]:
        """The fields; metrics include their derived numbers."""
        return super().entries() | {"metrics": self.metrics.entries()}

    @classmethod
    def read(cls, run_dir: Path) -> RunResult | None:
        """The result of the run in a folder; None if it is absent, damaged or of another version."""
        try:
            return cls.from_json((run_dir / RESULT_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError):
            return None

    def save(self) -> Path:
        """Write `run.json` into the run folder, atomically."""
        return write_text(Path(self.run_dir) / RESULT_FILE, self.to_json() + "\n")


RUN_KEY = "run"
"""Entry of a checkpoint's payload that identifies its run."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Identity and plan of the run that a checkpoint belongs to.

    Args:
        run_id: the run's id.
        train_fingerprint: digest of the training pairs.
        val_fingerprint: digest of the validation pairs.
        num_steps: optimizer steps planned when the checkpoint was saved.
        options: the options of the run.
        extensions: changes of the length, each `{"after_step", "from_steps", "to_steps"}`.
        order: identity of the order of the training pairs.
    """

    run_id: str
    train_fingerprint: str
    val_fingerprint: str
    num_steps: int
    options: dict[str, Any]
    extensions: tuple[dict[str, int], ...] = ()
    order: str = SHUFFLED

    def payload(self, step: int) -> dict[str, Any]:
        """The record as values that load without code, with the steps done."""
        return {**vars(self), "extensions": list(self.extensions), "step": step}


def absolute_source(source: Any) -> Any:
    """Sources of `data.train` or `data.val` with absolute paths; hub names stay.

    Example:
        >>> absolute_source([{"path": "/data/a.jsonl", "weight": 2.0}, "org/name"])
        [{'path': '/data/a.jsonl', 'weight': 2.0}, 'org/name']
    """
    if isinstance(source, str):
        return source if is_hub_name(source) else os.path.abspath(os.path.expanduser(source))
    if isinstance(source, Mapping):
        return {name: absolute_source(value) if name == "path" else value for name, value in source.items()}
    return [absolute_source(item) for item in source] if isinstance(source, list | tuple) else source
