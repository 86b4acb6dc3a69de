"""Evaluation of a saved model on pairs: metrics, and the facts that are needed to interpret them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.core.model.reward_model import BradleyTerryRM, require_bradley_terry
from rm_optimizer.core.pairs.dataset import PreferenceDataset
from rm_optimizer.core.pairs.overlap import TrainedOn, TrainedPairs
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.cache import TruncationReport
from rm_optimizer.evaluation.best_of_n import BestOfN, best_of_n
from rm_optimizer.evaluation.distinct_responses import score_responses
from rm_optimizer.evaluation.pair_rewards import (
    DISTRIBUTIONS_FILE,
    METRICS_FILE,
    distributions_text,
    metrics_of,
    write_pair_rewards,
)
from rm_optimizer.records.codec import json_values
from rm_optimizer.records.files import as_path, held, write_text
from rm_optimizer.records.run_folder import PAIR_REWARDS_FILE, require_no_run


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation, saved as `metrics.json`.

    Args:
        metrics: metrics of all pairs and of their groups.
        truncation: effect of the length limit on the pairs; pairs equal after truncation are ties.
        has_default_length: True if neither the caller nor the model's training chose that limit.
        trained_on: overlap of the pairs with the model's training data; None without a record of that data.
        best_of_n: best-of-n selection; None if no pairs come from lists of at least three responses.
        num_skipped: number of rows of the sources that gave no pair.
        checkpoint: name of the model, as the caller gave it.
    """

    metrics: PairwiseMetrics
    truncation: TruncationReport
    has_default_length: bool
    trained_on: TrainedOn | None
    best_of_n: BestOfN | None
    num_skipped: int
    checkpoint: str

    def to_json(self) -> str:
        """The entries of the metrics, and one more entry for each other field."""
        others = {name: value for name, value in json_values(self).items() if name != "metrics"}
        return json.dumps(self.metrics.entries() | others)


def evaluate_checkpoint(
    source: str | Path,
    data: Iterable[PreferencePair | Mapping[str, Any]],
    *,
    output_dir: Path | str,
    max_length: int | None = None,
    **options: Any,
) -> Evaluation:
    """`evaluate_model` of a saved model, on this machine's accelerator.

    Args:
        source: any model that `BradleyTerryRM.from_pretrained` loads.
        data: the pairs, as `PreferenceDataset.from_pairs` takes them.
        output_dir: folder for the files.
        max_length: most tokens of a sequence; None means the stored number, or else the model's.
        options: further arguments of `evaluate_model`.

    Raises:
        CheckpointError: if the model cannot be loaded, differs from its own record, or gives rewards that are not
            finite.
        ConfigError: if the model cannot read `max_length` tokens.
    """
    model = BradleyTerryRM.from_pretrained(source, max_length=max_length)
    if torch.cuda.is_available():
        model.to("cuda")
    return evaluate_model(model, data, checkpoint=source, output_dir=output_dir, **options)


def evaluate_model(
    model: BradleyTerryRM,
    data: Iterable[PreferencePair | Mapping[str, Any]],
    *,
    checkpoint: str | Path,
    output_dir: Path | str,
    token_budget: int,
    num_bootstrap: int,
    seed: int,
    by: Sequence[str] = (),
    partial_dir: Path | str | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Evaluate a model on pairs, and write metrics, distributions and per-pair rewards.

    Args:
        model: the model, on its device.
        data: the pairs, as `PreferenceDataset.from_pairs` takes them.
        checkpoint: source of the model, from which the record of its training pairs is read.
        output_dir: folder for `metrics.json`, `reward_distributions.json` and `pair_rewards.jsonl`.
        token_budget: most tokens of one pass, padding included.
        num_bootstrap: number of resamples of prompts for the intervals.
        seed: seed of the resamples.
        by: columns of the pairs' metadata whose values are reported separately, in addition to source and subset.
        partial_dir: folder of the rewards so far, from which a repeated call continues; None means `output_dir`.
        on_progress: function called with the number of responses done and the number of all.

    Raises:
        CheckpointError: if a reward is not finite, or the record of the model's training pairs is damaged.
        ConfigError: if the folder is one of a run or a model, or another process writes into it.
        DataError: if a conversation cannot be rendered and bad rows are not dropped, or too many rows are bad.
    """
    require_bradley_terry(model)
    output_dir = as_path("output_dir", output_dir)
    partial_dir = output_dir if partial_dir is None else as_path("partial_dir", partial_dir)
    checkpoint = str(checkpoint)
    require_no_run(output_dir, "output_dir")
    trained = TrainedPairs.recorded(checkpoint)
    data = PreferenceDataset.from_pairs(data).accepted_by(model.renderer)
    with held(output_dir, "evaluation"):
        rewards, truncation = score_responses(
            model, data, token_budget=token_budget, partial_dir=partial_dir, on_progress=on_progress
        )
        chosen, rejected = rewards.chosen, rewards.rejected
        evaluation = Evaluation(
            metrics_of(rewards, data, beta=model.beta, num_bootstrap=num_bootstrap, seed=seed, by=by),
            truncation,
            has_default_length=model.has_default_length,
            trained_on=None if trained is None else trained.count(data.pairs),
            best_of_n=best_of_n(data.pairs, chosen, rejected, num_bootstrap=num_bootstrap, seed=seed),
            num_skipped=len(data.skipped),
            checkpoint=checkpoint,
        )
        write_text(output_dir / METRICS_FILE, evaluation.to_json() + "\n")
        write_text(output_dir / DISTRIBUTIONS_FILE, distributions_text(rewards))
        write_pair_rewards(output_dir / PAIR_REWARDS_FILE, rewards, data, by=by)
    return evaluation
