"""The study of five hypotheses: its options, its trials and its report.

Training uses a random subset of the pairs. Validation is limited to `pairs_per_prompt` pairs of each prompt, so that no
prompt decides alone. Its prompts are divided: early stopping evaluates one part, and figures are of the other part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rm_optimizer.core.metrics.effects import paired_effect
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.audit import length_baseline
from rm_optimizer.core.pairs.dataset import PreferenceDataset
from rm_optimizer.core.tokens.batching import MacroBatches, PairCollator
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.errors import ConfigError, TrainingDiverged
from rm_optimizer.experiments.batching_cost import batching_row, gradients, one_thread
from rm_optimizer.experiments.held_out import Splits, draw_splits
from rm_optimizer.experiments.hypotheses import (
    ARMS,
    GAP_ARMS,
    STOPPING_ARM,
    Finding,
    batching_finding,
    training_findings,
)
from rm_optimizer.experiments.study.driver import OnTrial, Study
from rm_optimizer.experiments.study.executors import Executor, InlineExecutor
from rm_optimizer.experiments.study.plan import HYPOTHESES_FILE, PlannedTrial, publish
from rm_optimizer.experiments.study.shared_options import require_shared
from rm_optimizer.experiments.study.trial import Trial
from rm_optimizer.experiments.training_trial import TASK, margins_of, scored_trial
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.files import write_text
from rm_optimizer.records.provenance import commit, machine, versions
from rm_optimizer.records.quoting import in_quotes
from rm_optimizer.schema import ModelConfig, TrainConfig, compose, typed
from rm_optimizer.schema.config import Attention
from rm_optimizer.training.base_model import build_model

ONE_PASS = 10**9
"""A token budget that no macro-batch exceeds."""


OWNED = MappingProxyType(
    {
        "experiment": "each arm is a preset",
        "optimizer": "all arms take AdamW without weight decay; model.adamw_lr sets its learning rate",
        "schedule": "the arms differ in it",
        "adapter": "the arms differ in it",
        "loss": "the arms differ in it",
        "seed": "--seeds says how many there are",
        "output_dir": "--output names the folder",
        "hydra.run.dir": "--output names the folder",
        "resume": "the study goes on where it stopped by itself",
        "publish": "weights of the study are not kept",
        "data": "--data and --val name the pairs, and all of them are drawn by the study",
        "model.lora_lr": "LoRA takes ten times model.adamw_lr",
        "training.max_steps": "training.epochs says how long all arms train",
        "training.early_stopping": "the arms differ in it",
        "training.monitor": "the arms differ in it",
        "training.checkpoint_every": "the last weights are a checkpoint of their own",
        "training.evals_per_epoch": "only early stopping reads evaluations",
    }
)
"""Options that the study sets itself, each with the reason."""

_WRITTEN_ANEW = ("model.adamw_lr", "training.epochs")
"""Overrides that are written again for each arm, since LoRA has another rate and presets have their own epochs."""
_OF_ALL_ARMS = {
    "optimizer.weight_decay": 0.0,
    "training.eval_at_start": "false",
    "training.num_bootstrap": 100,
    "training.progress": "false",
    "logger.tensorboard": "false",
    "output_dir": "OUTPUT",
}


@dataclass(frozen=True, kw_only=True)
class HypothesisOptions(JsonRecord, indent=1):
    """The options of the study; all arms share them.

    Args:
        train: Parquet file of training pairs, with a prompt column.
        val: Parquet file of validation pairs, with a prompt column.
        overrides: further options of every run, as name=value.
        seeds: number of seeds of each arm, which start at 0.
        num_train: most training pairs, drawn at random.
        num_test: most validation pairs for the reported figures.
        num_select: most validation pairs that early stopping evaluates.
        pairs_per_prompt: most validation pairs of one prompt.
        subset_seed: seed of these subsets.
        batching_length: most tokens of a conversation in H1's comparison.
        batching_pairs: number of pairs of a macro-batch in H1's comparison.
        batching_steps: number of macro-batches of H1's comparison for each seed.
    """

    train: str
    val: str
    overrides: tuple[str, ...] = ()
    seeds: int = 5
    num_train: int = 1200
    num_test: int = 800
    num_select: int = 200
    pairs_per_prompt: int = 50
    subset_seed: int = 0
    batching_length: int = 256
    batching_pairs: int = 16
    batching_steps: int = 4

    def __post_init__(self) -> None:
        for name in ("seeds", "num_train", "num_test", "num_select", "pairs_per_prompt"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} of the hypotheses must be at least 1, got {value}")
        require_shared(self.overrides, OWNED, "the study of hypotheses")


@dataclass(frozen=True, kw_only=True)
class ArmScores:
    """An arm's scores over seeds, and its mean steps and seconds.

    Args:
        accuracy: accuracy on the test pairs.
        nll: negative log-likelihood on the test pairs, in nats.
        ece: expected calibration error on the test pairs.
        scored_step: mean step of the scored weights.
        cpu_seconds: mean CPU seconds of training and scoring.
        parameters: number of trained parameters.
    """

    accuracy: Estimate
    nll: Estimate
    ece: Estimate
    scored_step: float
    cpu_seconds: float
    parameters: int


@dataclass(frozen=True, kw_only=True)
class HypothesisReport(JsonRecord, indent=1):
    """The outcome of the study.

    Args:
        settings: options of the study.
        versions: versions of the packages that affect results.
        machine: processor, cores and system.
        commit: commit of the checkout.
        length_baseline: accuracy on the test pairs of the rule that the longer response is better.
        arms: scores of each arm.
        findings: the five hypotheses.
    """

    settings: HypothesisOptions
    versions: dict[str, str]
    machine: dict[str, str]
    commit: str | None
    length_baseline: float
    arms: dict[str, ArmScores]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class HypothesisStudy:
    """The trials of the study in its folder; finished trials are only read.

    Args:
        options: options of the study.
        folder: folder of trials and report.
    """

    options: HypothesisOptions
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> HypothesisStudy:
        """The study in a folder.

        Raises:
            ConfigError: if its options are missing or damaged.
        """
        path = folder / HYPOTHESES_FILE
        try:
            return cls(HypothesisOptions.from_json(path.read_text(encoding="utf-8")), folder)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path} is missing or damaged; start the study in another folder") from error

    def plan(self) -> list[PlannedTrial]:
        """Draw the pairs, and write the list of trials; arms of equal options share a trial.

        Raises:
            ConfigError: if an option is unknown, or the folder was begun with other options.
        """
        self._keep_to_settings()
        distinct: dict[str, PlannedTrial] = {}
        for trial in self._planned.values():
            distinct.setdefault(trial.name, trial)  # of the first arm, which scores the most files
        publish(self.folder, TASK, [*distinct.values()], extends=True)
        return [*distinct.values()]

    def run(
        self, executor: Executor | None = None, *, retries: int = 0, on_trial: OnTrial | None = None
    ) -> HypothesisReport:
        """Run or read every trial, and write `hypotheses.json` into the folder.

        Args:
            executor: executor of the trials; None means this process.
            retries: number of further attempts at a trial that failed.
            on_trial: function called with each trial that ends and its result.

        Raises:
            ConfigError: if the folder was begun with other options, or a trial failed.
        """
        self.plan()
        study = Study(self.folder)
        study.forget_failures()
        errors = study.run(executor or InlineExecutor(), retries=retries, on_trial=on_trial).errors
        if errors:
            raise ConfigError(f"a trial failed: {next(iter(errors.values()))}; the same command goes on")
        batching = [row for seed in range(self.options.seeds) for row in self._batching_rows(seed)]
        trials = {arm: [study.trial(self._planned[arm, seed]) for seed in range(self.options.seeds)] for arm in ARMS}
        report = self._report(batching, trials)
        write_text(self.folder / "hypotheses.json", report.to_json() + "\n")
        return report

    @cached_property
    def splits(self) -> Splits:
        """Files of the drawn pairs."""
        o = self.options
        return draw_splits(
            self.folder / "data",
            o.train,
            o.val,
            num_train=o.num_train,
            num_select=o.num_select,
            num_test=o.num_test,
            pairs_per_prompt=o.pairs_per_prompt,
            seed=o.subset_seed,
        )

    def arm_config(self, arm: str, seed: int) -> TrainConfig:
        """An arm's preset with the options that all arms share; the last weights are saved as a checkpoint.

        Raises:
            ConfigError: if an option is unknown or out of its range.
        """
        rate, batch_size = self._composed.model.adamw_lr, self._composed.batching.batch_size
        steps = self._epochs * math.ceil(pq.read_metadata(self.splits.train).num_rows / batch_size)
        shared = [item for item in self.options.overrides if item.partition("=")[0] not in _WRITTEN_ANEW]
        values: dict[str, Any] = {
            "experiment": arm,
            **({"model.lora_lr": 10 * rate} if arm.startswith("lora") else {"model.adamw_lr": rate}),
            "data.train": in_quotes(str(self.splits.train.resolve())),
            "data.val": in_quotes(str(self.splits.select.resolve())),
            "training.epochs": self._epochs,
            "training.max_steps": steps,
            "training.checkpoint_every": steps,
            "training.evals_per_epoch": 4 if arm == STOPPING_ARM else 1,  # only early stopping reads evaluations
            "seed": seed,
            **_OF_ALL_ARMS,
        }
        own = [f"{name}={value}" for name, value in values.items()]
        return typed(compose([*shared, *own]), TrainConfig)

    @cached_property
    def _composed(self) -> TrainConfig:
        """Options that all arms share, in the first arm's preset."""
        own = [f"experiment={ARMS[0]}", "output_dir=OUTPUT"]
        return typed(compose([*own, *self.options.overrides]), TrainConfig)

    @property
    def _epochs(self) -> int:
        """Passes over the training pairs, the same for every arm.

        Raises:
            ConfigError: if their number is not whole.
        """
        epochs = self._composed.training.epochs
        if epochs != int(epochs):
            raise ConfigError(f"training.epochs of the study of hypotheses must be a whole number, got {epochs}")
        return int(epochs)

    @cached_property
    def _planned(self) -> dict[tuple[str, int], PlannedTrial]:
        """The trial of each arm and seed, seed by seed."""
        pairs = [(arm, seed) for seed in range(self.options.seeds) for arm in ARMS]
        return {(arm, seed): self._trial(arm, seed) for arm, seed in pairs}

    def _trial(self, arm: str, seed: int) -> PlannedTrial:
        scored = {"test": self.splits.test, **({"train": self.splits.train} if arm in GAP_ARMS else {})}
        return scored_trial(f"{arm}, seed {seed}", self.arm_config(arm, seed), scored)

    def _batching_rows(self, seed: int) -> list[dict[str, float]]:
        """H1's measurements on one seed's macro-batches, in float32 on one CPU thread, with both kinds of batches."""
        path = self.folder / "batching" / f"seed-{seed}.json"
        if path.is_file():
            return list(json.loads(path.read_text()))
        config, data = self.arm_config(ARMS[0], seed), PreferenceDataset.load(str(self.splits.train))
        model = build_model(self._longer(config.model), data, seed).train()
        collator = PairCollator(
            tokenize_pairs(data.pairs, model.renderer, None), data.pairs, model.renderer.pad_token_id
        )
        size = self.options.batching_pairs
        budgets = {"pair_aware": config.batching.micro_token_budget, "padded": ONE_PASS}
        orders = {
            name: MacroBatches(collator, batch_size=size, micro_token_budget=budget, seed=seed)
            for name, budget in budgets.items()
        }
        with one_thread():
            gradients(model, orders["pair_aware"][0].micro[-1:])  # warms up
            rows = [_compared(model, orders, step) for step in range(self.options.batching_steps)]
        write_text(path, json.dumps(rows, indent=1) + "\n")
        return rows

    def _longer(self, config: ModelConfig) -> ModelConfig:
        """The model of H1, whose conversations may be longer than those of training."""
        if not config.path:
            return config
        return replace(config, max_length=self.options.batching_length, attn_implementation=Attention.auto)

    def _report(self, batching: Sequence[Mapping[str, float]], trials: Mapping[str, list[Trial]]) -> HypothesisReport:
        prompts = pq.read_table(self.splits.test)["prompt"].to_pylist()
        test = {arm: margins_of(found, "test") for arm, found in trials.items()}
        train = {arm: margins_of(trials[arm], "train") for arm in GAP_ARMS}
        records = {arm: [_values(trial) for trial in found] for arm, found in trials.items()}
        saved = np.array([1 - record["steps"] / record["all_steps"] for record in records[STOPPING_ARM]])
        return HypothesisReport(
            settings=self.options,
            versions=versions(),
            machine=machine(),
            commit=commit(),
            length_baseline=length_baseline(PreferenceDataset.load(str(self.splits.test)).pairs).value,
            arms={arm: _arm_scores(test[arm], records[arm], prompts) for arm in ARMS},
            findings=(batching_finding(batching), *training_findings(test, train, saved, prompts)),
        )

    def _keep_to_settings(self) -> None:
        """Refuse to continue a study with other options; only the number of seeds may change."""
        path = self.folder / HYPOTHESES_FILE
        if path.is_file():
            begun, now = HypothesisStudy.read(self.folder).options, self.options
            changed = [name for name in vars(now) if name != "seeds" and getattr(begun, name) != getattr(now, name)]
            if changed:
                raise ConfigError(f"{self.folder} was begun with other {', '.join(changed)}; give another --output")
        write_text(path, self.options.to_json() + "\n")


def _compared(model: BradleyTerryRM, orders: Mapping[str, MacroBatches], step: int) -> dict[str, float]:
    """Comparison on one macro-batch; the order of the two kinds of batches alternates with the step."""
    found = {name: gradients(model, orders[name][step].micro) for name in sorted(orders, reverse=step % 2 == 0)}
    return batching_row(found["pair_aware"], found["padded"])


def _values(trial: Trial) -> Mapping[str, Any]:
    """Numbers of a trial that the hypotheses need.

    Raises:
        TrainingDiverged: if the trial diverged.
    """
    result = trial.result
    assert result is not None, "the study has run"
    if result.error is not None:
        raise TrainingDiverged(f"no hypothesis can be judged: {result.error}")
    return result.values


def _arm_scores(margins: np.ndarray, records: Sequence[Mapping[str, Any]], prompts: Sequence[str]) -> ArmScores:
    return ArmScores(
        accuracy=paired_effect(margins, None, prompts, "accuracy"),
        nll=paired_effect(margins, None, prompts, "nll"),
        ece=paired_effect(margins, None, prompts, "ece"),
        scored_step=float(np.mean([record["scored_step"] for record in records])),
        cpu_seconds=float(np.mean([record["cpu_seconds"] for record in records])),
        parameters=records[0]["parameters"],
    )
