"""Rewards of every pair of a data set, and their metrics.

Training, `evaluate` and tests use the same code.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, distributed

from rm_optimizer.core.classifier.attention import HALF
from rm_optimizer.core.classifier.quantization import computing_dtype
from rm_optimizer.core.classifier.scoring import SequenceScorer, in_mode
from rm_optimizer.core.metrics.pairwise import PairwiseMetrics, evaluate_pairs
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.model.sharding import in_step, is_sharded, most_over_ranks, spare_batch
from rm_optimizer.core.pairs.formats import VOTES
from rm_optimizer.core.tokens.batching import AnyPairBatch, evaluation_batches, pair_collator
from rm_optimizer.core.tokens.cache import PairTokens, TokenizedPairs, TruncationReport
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.core.tokens.padding import pad_sequences
from rm_optimizer.core.tokens.plan import length_batches
from rm_optimizer.errors import ConfigError
from rm_optimizer.records.accelerator import rank_in_group
from rm_optimizer.records.codec import json_values
from rm_optimizer.records.files import write_text
from rm_optimizer.schema.config import PrefixSharing

_log = logging.getLogger("rm_optimizer")

METRICS_FILE = "metrics.json"
"""The metrics of an evaluation, in its folder."""
DISTRIBUTIONS_FILE = "reward_distributions.json"
"""The distributions of its rewards, in the same folder."""

OTHER = "(other)"
"""Name of the group that contains all small groups."""

PARITY_PAIRS = 8
"""Number of pairs on which `auto` compares the rewards with and without sharing."""
PARITY_TOLERANCE = 1e-4
"""Largest reward difference, in float32, that counts as rounding."""
PARITY_SPREADS = 0.25
"""The same for half types, in standard deviations of the rewards; a wrong mask changes them by about one."""

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class PairRewards:
    """Rewards of both sides of the pairs of a data set.

    Args:
        chosen: rewards of the chosen responses, float64.
        rejected: rewards of the rejected responses, float64.
        pair_index: position of each pair in the data set, ascending.
    """

    chosen: Float[np.ndarray, " pairs"]
    rejected: Float[np.ndarray, " pairs"]
    pair_index: Int[np.ndarray, " pairs"]

    @property
    def margin(self) -> Float[np.ndarray, " pairs"]:
        """Chosen minus rejected reward."""
        return np.asarray(self.chosen - self.rejected)


class ScoringStopped(Exception):
    """Scoring ended before its last pair because `should_stop` was true."""


def score_pairs(
    model: BradleyTerryRM,
    tokenized: TokenizedPairs,
    dataset: PreferenceDataset,
    *,
    token_budget: int,
    prefix_sharing: bool,
    after_batch: Callable[[int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    positions: NDArray[np.int64] | None = None,
) -> PairRewards:
    """Rewards of all pairs, equal on each rank.

    They are computed once over all ranks. A sequence of several pairs, as of a list of responses, is computed in one of
    them. Pairs that are equal after truncation are not in `tokenized`. They are ties: both sides get the same reward.

    Args:
        model: the reward model, on its device; its training mode is restored.
        tokenized: the pairs' tokens.
        dataset: the pairs of these tokens.
        token_budget: most tokens of one pass, padding included.
        prefix_sharing: True to compute each prompt once for both responses.
        after_batch: function called with the number of pairs done on this rank.
        should_stop: function called before each pass; if it returns True on any rank, scoring stops on all of them.
        positions: positions of the tokenized pairs to score; the same share of the ties is scored too. None means all.

    Raises:
        ScoringStopped: if `should_stop` was true.
    """
    rank, world_size = rank_in_group()
    parts: list[tuple[Tensor, Tensor]] = []
    done, stopped = 0, False
    wanted = np.arange(len(tokenized)) if positions is None else positions
    computed, sequences = _cover(tokenized, wanted)
    collator = pair_collator(tokenized, dataset, model.renderer.pad_token_id, prefix_sharing=prefix_sharing)
    batches = evaluation_batches(collator, wanted[computed], token_budget, rank=rank, world_size=world_size)
    # FSDP2 reuses the tensors that it gathers into. Made in inference mode, they could not be used in training.
    with in_mode(model, training=False), torch.no_grad() if is_sharded(model) else torch.inference_mode():
        passes: Iterator[tuple[AnyPairBatch, bool]] = ((batch, True) for batch in batches)
        if is_sharded(model):  # spare passes follow, with False, so that all ranks make as many
            own = list(batches)
            passes = in_step(own, spare_batch(model, model.device), most_over_ranks(len(own), model.device))
        for batch, is_ours in passes:
            stopped = should_stop is not None and should_stop()
            if should_stop is not None and is_sharded(model):  # its ranks make passes together
                stopped = bool(most_over_ranks(int(stopped), model.device))
            if stopped:
                break
            rewards = model.rewards_of(batch.to(model.device))
            if not is_ours:
                continue
            parts.append((batch.pair_index.cpu(), rewards.view(-1, 2).double().cpu()))
            done += len(batch.pair_index)
            if after_batch is not None:
                after_batch(done * len(wanted) // len(computed))
        found = _gathered(parts, world_size, stopped=stopped)
        share = 1.0 if positions is None else len(positions) / max(1, len(tokenized))
        tied, ties = _tied_rewards(model, tokenized, dataset, token_budget, share)
    known = tokenized.pair_index[wanted]
    passed = sequences[computed[np.argsort(known[computed])]]  # in the order of `found`
    of_sequence = np.zeros(sequences.max(initial=-1) + 1)
    of_sequence[passed] = np.stack([found.chosen, found.rejected], axis=1)
    index = np.concatenate([known, tied])
    order = np.argsort(index)
    chosen, rejected = (np.concatenate([of_sequence[side], ties])[order] for side in sequences.T)
    return PairRewards(chosen, rejected, index[order])


def _cover(
    tokenized: TokenizedPairs, positions: NDArray[np.int64]
) -> tuple[NDArray[np.int64], Int[np.ndarray, "pairs 2"]]:
    """Places of pairs that together hold every different sequence of the pairs at these positions.

    With the number of the chosen and of the rejected sequence of each pair; equal token ids have one number.
    """
    numbers: dict[bytes, int] = {}
    sides = (tokenized.chosen, tokenized.rejected)
    ids = ((sha256(side(i).tobytes()).digest() for side in sides) for i in positions.tolist())
    found = [[numbers.setdefault(each, len(numbers)) for each in pair] for pair in ids]
    sequences = np.array(found, dtype=np.int64).reshape(-1, 2)
    places, seen = list[int](), set[int]()
    for most_seen in (0, 1):  # pairs of two new sequences first
        for place, pair in enumerate(found):
            if len(seen.intersection(pair)) <= most_seen and not seen.issuperset(pair):
                places.append(place)
                seen.update(pair)
    return np.array(sorted(places), dtype=np.int64), sequences


def _tied_rewards(
    model: BradleyTerryRM, tokenized: TokenizedPairs, dataset: PreferenceDataset, token_budget: int, share: float
) -> tuple[NDArray[np.int64], np.ndarray]:
    """Pairs of a share that are equal after truncation, with one reward.

    Returns their indices, and the reward of both sides of each.
    """
    assert len(tokenized) + tokenized.report.num_identical_dropped == len(dataset), "the tokens are of all pairs"
    index = np.setdiff1d(np.arange(len(dataset)), tokenized.pair_index)
    index = index[np.linspace(0, len(index), round(share * len(index)), endpoint=False, dtype=np.int64)]
    pairs = [dataset[int(i)] for i in index]
    encodings = model.encode([pair.prompt for pair in pairs], [pair.chosen for pair in pairs])
    rewards = np.zeros(len(index))
    for batch in length_batches([len(encoding.ids) for encoding in encodings], token_budget):
        input_ids, mask = pad_sequences([encodings[i].ids for i in batch], model.renderer.pad_token_id)
        rewards[batch] = model(input_ids.to(model.device), mask.to(model.device)).double().cpu().numpy()
    return index, rewards


def _gathered(parts: Sequence[tuple[Tensor, Tensor]], world_size: int, *, stopped: bool) -> PairRewards:
    parts = [(torch.empty(0, dtype=torch.int64), torch.empty(0, 2, dtype=torch.float64)), *parts]
    index, rewards = (torch.cat(side) for side in zip(*parts, strict=True))
    if world_size > 1:
        shares: list[Any] = [None] * world_size
        distributed.all_gather_object(shares, (index, rewards, stopped))
        stopped = any(share[2] for share in shares)
        index, rewards = (torch.cat([share[side] for share in shares]) for side in (0, 1))
    if stopped:
        raise ScoringStopped
    order = torch.argsort(index)
    table = rewards[order].numpy()
    return PairRewards(table[:, 0].copy(), table[:, 1].copy(), index[order].numpy())


def metrics_of(
    rewards: PairRewards,
    dataset: PreferenceDataset,
    *,
    beta: float,
    num_bootstrap: int,
    seed: int,
    by: Sequence[str] = (),
    most_groups: int | None = None,
    kept_group: str | None = None,
    thresholds: Iterable[float] = (),
) -> PairwiseMetrics:
    """Pairwise metrics of rewards, with intervals over resampled prompts.

    Args:
        rewards: rewards of the pairs.
        dataset: the pairs.
        beta: inverse temperature of the preference probability.
        num_bootstrap: number of resamples for the intervals; 0 gives standard errors only.
        seed: seed of the resamples.
        by: columns of the metadata to group by, in addition to source and subset.
        most_groups: number of groups of one column; all smaller ones together become `(other)`. None sets no limit.
        kept_group: group that never becomes `(other)`.
        thresholds: rewards at which to report the rates of true and false positives.
    """
    pairs = [dataset[int(index)] for index in rewards.pair_index]
    groups = _groups([pair.metadata for pair in pairs], by)
    for column, values in groups.items() if most_groups is not None else ():
        kept = {name for name, _ in Counter(values).most_common(most_groups)} | {kept_group}
        groups[column] = [value if value in kept else OTHER for value in values]
    return evaluate_pairs(
        rewards.chosen,
        rewards.rejected,
        beta=beta,
        label=np.array([pair.label for pair in pairs]),
        weight=np.array([pair.weight for pair in pairs]),
        length_gap=np.array([float(len(pair.chosen) - len(pair.rejected)) for pair in pairs]),
        prompt_ids=[pair.prompt_id for pair in pairs],
        groups=groups,
        thresholds=thresholds,
        num_bootstrap=num_bootstrap,
        seed=seed,
    )


def _groups(metadata: Sequence[Mapping[str, Any]], by: Sequence[str]) -> dict[str, list[str]]:
    """Groups by source, subset and the requested columns.

    With several sources, other groups are within one source.
    """
    sources = [str(row.get("source", "")) for row in metadata]
    groups = {"source": sources} if len(set(sources)) > 1 else {}
    for column in dict.fromkeys(("subset", *by)):
        values = [str(row.get(column, "(none)")) for row in metadata]
        if column == "source" or (column not in by and len(set(values)) < 2):
            continue
        within = [f"{source} / {value}" for source, value in zip(sources, values, strict=True)]
        groups[column] = within if len(set(sources)) > 1 else values
    return groups


def reward_distribution(rewards: PairRewards, step: int | None = None) -> dict[str, Any]:
    """Mean, deviation, quantiles and histogram of chosen rewards, rejected rewards and margins."""
    found: dict[str, Any] = {"step": step, "num_pairs": len(rewards.pair_index)}
    for name in ("chosen", "rejected", "margin"):
        values = getattr(rewards, name)
        counts, edges = np.histogram(values, bins=40)
        found[name] = {
            "mean": float(values.mean()),
            "std": float(values.std()),
            "quantiles": {str(q): float(v) for q, v in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)},
            "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
        }
    return found


def distributions_text(rewards: PairRewards, step: int | None = None) -> str:
    """Content of `reward_distributions.json`."""
    return json.dumps(reward_distribution(rewards, step), indent=1) + "\n"


def write_evaluation(
    folder: Path, rewards: PairRewards, metrics: PairwiseMetrics, truncation: TruncationReport, step: int | None = None
) -> None:
    """Write `metrics.json`, with the report of truncation, and `reward_distributions.json` into a folder."""
    values = metrics.entries() | {"truncation": json_values(truncation)}
    write_text(folder / METRICS_FILE, json.dumps(values) + "\n")
    write_text(folder / DISTRIBUTIONS_FILE, distributions_text(rewards, step))


def write_pair_rewards(path: Path, rewards: PairRewards, dataset: PreferenceDataset, by: Sequence[str] = ()) -> None:
    """Write one JSON line for each pair.

    A line has ids (the row's own as `id`), groups, label, weight and both rewards. Pairs of a list of responses have
    its name as `group`, and the positions of both responses in it. Votes and the annotator stay with their pairs.
    """
    kept = ("group", "chosen_index", "rejected_index", "annotator", *VOTES)
    found = {name for pair in dataset.pairs for name in kept if name in pair.metadata}
    names = dict.fromkeys(("id", "source", "subset", *(name for name in kept if name in found), *by))
    lines = []
    for index, chosen, rejected in zip(rewards.pair_index, rewards.chosen, rewards.rejected, strict=True):
        pair = dataset[int(index)]
        row = {
            "pair_id": pair.pair_id,
            "prompt_id": pair.prompt_id,
            **{name: pair.metadata.get(name) for name in names},
            "label": pair.label,
            "weight": pair.weight,
            "chosen": float(chosen),
            "rejected": float(rejected),
        }
        lines.append(json.dumps(row))
    write_text(path, "\n".join(lines) + "\n")


def shares_prefixes(model: BradleyTerryRM, tokenized: PairTokens, mode: PrefixSharing) -> bool:
    """Decide on prefix sharing for a model and pairs.

    `auto` shares prompts if the model is a causal decoder whose attention accepts a mask, and its rewards on the first
    pairs are the same with and without sharing. Otherwise it logs in one sentence why pairs are padded instead.

    Raises:
        ConfigError: if the mode is `on` and the model does not support sharing.
    """
    if mode == PrefixSharing.off:
        return False
    obstacle = model.supports_prefix_sharing()
    if obstacle is None and mode == PrefixSharing.on:
        return True
    if mode == PrefixSharing.on:
        raise ConfigError(f"batching.prefix_sharing=on is not possible: {obstacle}; set it to auto or off")
    if obstacle is None:
        pairs = [(tokenized.chosen(i), tokenized.rejected(i)) for i in range(min(PARITY_PAIRS, len(tokenized)))]
        allowed = PARITY_TOLERANCE
        if computing_dtype(model.model) in HALF:
            with model.inference():
                alone = SequenceScorer(model, 1).padded([ids for pair in pairs for ids in pair])
            allowed = PARITY_SPREADS * float(alone.std(correction=0))
        if not (difference := model.prefix_parity(pairs)) <= allowed:
            obstacle = f"rewards of the first pairs would differ by {difference:.2g}"
    if obstacle is not None:
        _log.info("pairs are padded in batches of like length, without prefix sharing: %s", obstacle)
    return obstacle is None
