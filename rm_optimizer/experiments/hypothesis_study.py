"""The study of five hypotheses: its options, its trials, and the report that they come to.

Training takes a random subset of the pairs. Validation is cut to `pairs_per_prompt` pairs a prompt, so that no prompt
decides alone, and divided by prompt: early stopping watches one part, and every figure is computed on the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
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
from rm_optimizer.experiments.batching_cost import batching_row, gradients
from rm_optimizer.experiments.held_out import Splits, draw_splits
from rm_optimizer.experiments.hypotheses import (
    ARMS,
    GAP_ARMS,
    STOPPING_ARM,
    Finding,
    batching_finding,
    training_findings,
)
from rm_optimizer.experiments.study.driver import Study
from rm_optimizer.experiments.study.executors import InlineExecutor
from rm_optimizer.experiments.study.plan import PlannedTrial, publish
from rm_optimizer.experiments.study.trial import Trial
from rm_optimizer.experiments.training_trial import TASK, margins_of, scored_trial
from rm_optimizer.records.codec import JsonRecord, json_values
from rm_optimizer.records.files import write_text
from rm_optimizer.records.provenance import commit, machine, versions
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.config import Attention
from rm_optimizer.training.base_model import build_model

ONE_PASS = 10**9
"""A token budget that no macro-batch exceeds."""


@dataclass(frozen=True, kw_only=True)
class HypothesisOptions:
    """The options of the study; all arms share them.

    Args:
        train: Parquet file of training pairs, with a prompt column.
        val: Parquet file of validation pairs, likewise.
        output: folder of trials and report.
        model_path: folder of the weights; None builds the preset's architecture.
        model: preset of the model group.
        seeds: seeds of each arm.
        num_train: training pairs, drawn at random.
        num_test: most validation pairs that figures are computed on.
        num_select: most validation pairs that early stopping watches.
        pairs_per_prompt: most validation pairs of one prompt.
        subset_seed: seed of these subsets.
        epochs: passes over the training pairs.
        batch_size: pairs of one optimizer step.
        adamw_lr: AdamW's learning rate; LoRA takes ten times it.
        max_length: tokens of prompt and response together.
        precision: precision of training and of scoring.
        attention: attention kernel.
        hardware: preset of the hardware group.
        threads: CPU threads.
        micro_token_budget: tokens of one pass.
        batching_length: tokens of a conversation in H1's comparison.
        batching_pairs: pairs of a macro-batch in H1's comparison.
        batching_steps: macro-batches of H1's comparison for each seed.
    """

    train: str
    val: str
    output: Path
    model_path: str | None = None
    model: str = "minilm"
    seeds: tuple[int, ...] = (0, 1, 2)
    num_train: int = 1200
    num_test: int = 800
    num_select: int = 200
    pairs_per_prompt: int = 50
    subset_seed: int = 0
    epochs: int = 3
    batch_size: int = 16
    adamw_lr: float = 5e-5
    max_length: int = 128
    precision: str = "32-true"
    attention: str = "auto"
    hardware: str = "cpu"
    threads: int = 1
    micro_token_budget: int = 2048
    batching_length: int = 256
    batching_pairs: int = 16
    batching_steps: int = 4


@dataclass(frozen=True, kw_only=True)
class ArmScores:
    """An arm's scores over seeds and its means of steps and seconds.

    Args:
        accuracy: on the test pairs.
        nll: likewise, in nats.
        ece: likewise.
        scored_step: mean step of the scored weights.
        cpu_seconds: mean CPU seconds of training and scoring.
        parameters: trained parameters.
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
        settings: its options.
        versions: packages that decide the numbers.
        machine: processor, cores, system.
        commit: the checkout's commit.
        length_baseline: accuracy on the test pairs of calling the longer response better.
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
    """The trials of the study in its folder; those that are finished are read.

    Args:
        options: options of the study.
    """

    options: HypothesisOptions

    def run(self) -> HypothesisReport:
        """Run or read every trial, seed by seed, and write `hypotheses.json` into the folder.

        Raises:
            ConfigError: if the folder was begun with other options.
        """
        self._keep_to_settings()
        batching = [row for seed in self.options.seeds for row in self._batching_rows(seed)]
        planned = {(arm, seed): self._planned(arm, seed) for seed in self.options.seeds for arm in ARMS}
        distinct: dict[str, PlannedTrial] = {}
        for trial in planned.values():
            distinct.setdefault(trial.name, trial)  # arms of equal options share the first one's, which scores most
        publish(self.options.output, TASK, [*distinct.values()], extends=True)
        study = Study(self.options.output)
        study.forget_failures()
        errors = study.run(InlineExecutor(), retries=0).errors
        if errors:
            raise ConfigError(f"a trial failed: {next(iter(errors.values()))}; the same command goes on")
        trials = {arm: [study.trial(planned[arm, seed]) for seed in self.options.seeds] for arm in ARMS}
        report = self._report(batching, trials)
        write_text(self.options.output / "hypotheses.json", report.to_json() + "\n")
        return report

    @cached_property
    def splits(self) -> Splits:
        """Files of the drawn pairs."""
        o = self.options
        return draw_splits(
            o.output / "data",
            o.train,
            o.val,
            num_train=o.num_train,
            num_select=o.num_select,
            num_test=o.num_test,
            pairs_per_prompt=o.pairs_per_prompt,
            seed=o.subset_seed,
        )

    def arm_config(self, arm: str, seed: int) -> TrainConfig:
        """An arm's preset with what all arms share; the last weights are a checkpoint of their own."""
        o, splits = self.options, self.splits
        steps = o.epochs * math.ceil(pq.read_metadata(splits.train).num_rows / o.batch_size)
        values: dict[str, Any] = {
            "experiment": arm,
            "model": o.model,
            "model.path": o.model_path or "null",
            "model.max_length": o.max_length,
            **({"model.lora_lr": 10 * o.adamw_lr} if arm.startswith("lora") else {"model.adamw_lr": o.adamw_lr}),
            "model.attn_implementation": o.attention,
            "data.train": splits.train,
            "data.val": splits.select,
            "batching.batch_size": o.batch_size,
            "batching.micro_token_budget": o.micro_token_budget,
            "optimizer.weight_decay": 0.0,
            "training.epochs": o.epochs,
            "training.max_steps": steps,
            "training.checkpoint_every": steps,
            "training.evals_per_epoch": 4 if arm == STOPPING_ARM else 1,  # evaluations change nothing but when to stop
            "training.eval_at_start": "false",
            "training.num_bootstrap": 100,
            "training.progress": "false",
            "hardware": o.hardware,
            "hardware.num_threads": o.threads,
            "hardware.precision": o.precision,
            "logger.tensorboard": "false",
            "seed": seed,
            "output_dir": "OUTPUT",
        }
        return typed(compose([f"{name}={value}" for name, value in values.items()]), TrainConfig)

    def _planned(self, arm: str, seed: int) -> PlannedTrial:
        """An arm's trial; arms whose options are equal share one."""
        scored = {"test": self.splits.test, **({"train": self.splits.train} if arm in GAP_ARMS else {})}
        return scored_trial(f"{arm}, seed {seed}", self.arm_config(arm, seed), scored)

    def _batching_rows(self, seed: int) -> list[dict[str, float]]:
        """H1's measurements on one seed's macro-batches, in float32: both ways in turn."""
        path = self.options.output / "batching" / f"seed-{seed}.json"
        if path.is_file():
            return list(json.loads(path.read_text()))
        model, data = self._untrained_model(seed), PreferenceDataset.load(str(self.splits.train))
        collator = PairCollator(
            tokenize_pairs(data.pairs, model.renderer, None), data.pairs, model.renderer.pad_token_id
        )
        size, budgets = self.options.batching_pairs, {"pair_aware": self.options.micro_token_budget, "padded": ONE_PASS}
        orders = {
            name: MacroBatches(collator, batch_size=size, micro_token_budget=budget, seed=seed)
            for name, budget in budgets.items()
        }
        gradients(model, orders["pair_aware"][0].micro[-1:])  # warms up
        rows = []
        for step in range(self.options.batching_steps):
            found = {name: gradients(model, orders[name][step].micro) for name in sorted(orders, reverse=step % 2 == 0)}
            rows.append(batching_row(found["pair_aware"], found["padded"]))
        write_text(path, json.dumps(rows, indent=1) + "\n")
        return rows

    def _untrained_model(self, seed: int) -> BradleyTerryRM:
        config = self.arm_config(ARMS[0], seed).model
        if config.path:
            config = replace(config, max_length=self.options.batching_length, attn_implementation=Attention.auto)
        return build_model(config, PreferenceDataset.load(str(self.splits.train)), seed).train()

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
        """Refuse to add to a folder that other settings began; further seeds are no other settings."""
        settings = {name: value for name, value in json_values(self.options).items() if name not in ("seeds", "output")}
        path = self.options.output / "settings.json"
        begun = json.loads(path.read_text()) if path.is_file() else settings
        changed = sorted(name for name in settings if begun.get(name) != settings[name])
        if changed:
            raise ConfigError(f"{self.options.output} was begun with other {', '.join(changed)}; give another --output")
        write_text(path, json.dumps(settings, indent=1) + "\n")


def _values(trial: Trial) -> Mapping[str, Any]:
    """Numbers of a trial that the hypotheses need.

    Raises:
        TrainingDiverged: if it diverged.
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
