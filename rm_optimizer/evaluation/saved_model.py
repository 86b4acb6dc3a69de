"""Evaluation of a saved model on pairs.

It gives rewards of different responses, metrics, and facts to interpret them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self, TypedDict, Unpack

import numpy as np

from rm_optimizer.core.classifier.attention import HALF
from rm_optimizer.core.classifier.quantization import dtype_name
from rm_optimizer.core.metrics.estimate import require_finite
from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.core.model.identity import scorer_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM, require_bradley_terry
from rm_optimizer.core.pairs.pair import Prompt, digest
from rm_optimizer.core.rows.natural import Texts, texts
from rm_optimizer.core.storage.certificate import TurnedOrders
from rm_optimizer.core.storage.loading import parse_dtype
from rm_optimizer.core.storage.model_files import TrainedOn, TrainedPairs
from rm_optimizer.core.streaming.workers import map_chunks
from rm_optimizer.core.tokens.cache import TruncationReport, truncation_report
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.errors import require_known
from rm_optimizer.evaluation.list_rules import BestOfN, best_of_n
from rm_optimizer.evaluation.pair_rewards import (
    DISTRIBUTIONS_FILE,
    METRICS_FILE,
    PairRewards,
    distributions_text,
    metrics_of,
    write_pair_rewards,
)
from rm_optimizer.records.accelerator import fastest_device
from rm_optimizer.records.codec import JsonRecord, from_values
from rm_optimizer.records.files import as_path, held, write_text
from rm_optimizer.records.ledger import OnProgress, no_progress, open_ledger
from rm_optimizer.records.orders import random_positions
from rm_optimizer.records.run_folder import PAIR_REWARDS_FILE, require_no_run

CHUNK_RESPONSES = 256
"""Number of responses scored and saved together."""
COMPARED_PROMPTS = 512
"""Most prompts of which a pair is scored in float32 too."""


class ScoredResponse(NamedTuple):
    """Reward of a response, and what the length limit took from it.

    Args:
        reward: the reward.
        num_tokens: tokens of the sequence, after truncation.
        prompt_cut: tokens cut from the prompt.
        response_cut: tokens cut from the response.
        tokens: digest of the token ids.
    """

    reward: float
    num_tokens: int
    prompt_cut: int
    response_cut: int
    tokens: str


def _scored(model: BradleyTerryRM, chunk: Sequence[tuple[Prompt, str]], token_budget: int) -> list[ScoredResponse]:
    prompts, responses = [prompt for prompt, _ in chunk], [text for _, text in chunk]
    encodings = model.encode(prompts, responses)
    rewards = model.score_encoded(encodings, token_budget=token_budget).tolist()
    require_finite(rewards, lambda index: f"the response {responses[index][:60]!r}")
    return [
        ScoredResponse(reward, len(encoding.ids), encoding.prompt_cut, encoding.response_cut, digest(encoding.ids))
        for reward, encoding in zip(rewards, encodings, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class ResponseScorer:
    """Scorer of different responses, in chunks.

    A repeated call after a kill does not score finished chunks again. Responses with the same token ids get one reward.

    Args:
        token_budget: tokens, padding included, of one pass.
        folder: folder of the file of rewards, whose name depends on the model and the conversations.
        num_workers: actors on Ray, with one thread or one GPU each; None scores in this process.
        on_progress: function called with the number of responses done and the number of all; at the start, the
            responses of an earlier call count as done.
    """

    token_budget: int
    folder: Path
    num_workers: int | None = None
    on_progress: OnProgress = no_progress

    def rewards(
        self, model: BradleyTerryRM, conversations: Sequence[tuple[Prompt, str]], fingerprint: str, *, keeps: bool
    ) -> list[ScoredResponse]:
        """Rewards of conversations.

        Args:
            model: the reward model, on its device.
            conversations: prompt and response of each.
            fingerprint: identity of the conversations.
            keeps: True to keep the file of a completed call.

        Raises:
            CheckpointError: if a reward is not finite.
            DataError: if a conversation cannot be rendered, or another process is scoring the same ones.
        """
        identity = digest([scorer_digest(model), fingerprint, CHUNK_RESPONSES])
        path = self.folder / f".rewards-{identity}{'.jsonl' if keeps else '.partial'}"
        with open_ledger(path, identity, other="the rewards of another model or data") as log:
            done = sum(len(chunk) for chunk in log.values())
            self.on_progress(done, len(conversations))
            firsts = range(done, len(conversations), CHUNK_RESPONSES)
            chunks = [conversations[first : first + CHUNK_RESPONSES] for first in firsts]
            for entry in map_chunks(partial(_scored, token_budget=self.token_budget), model, chunks, self.num_workers):
                log.append(entry)
                done += len(entry)
                self.on_progress(done, len(conversations))
            rows = [row for chunk in log.values() for row in chunk]
            if not keeps:
                path.unlink()
        reward_of: dict[str, float] = {}  # of the first response with these token ids
        return [ScoredResponse(reward_of.setdefault(row[-1], row[0]), *row[1:]) for row in rows]

    def pair_rewards(self, model: BradleyTerryRM, data: PreferenceDataset) -> tuple[PairRewards, TruncationReport]:
        """Rewards of all pairs, and a report of their truncation.

        A response that is in many pairs of a prompt is scored once. Responses that are equal after truncation get one
        reward, so that their pair is a tie.

        Args:
            model: the reward model, on its device.
            data: the pairs.

        Raises:
            CheckpointError: if a reward is not finite.
            DataError: if a conversation cannot be rendered, or another process is scoring the same pairs.
        """
        of_prompt: dict[str, dict[str, Prompt]] = {}  # the different responses, by prompt in order of appearance
        for prompt_id, pair in zip(data.prompt_ids, data.pairs, strict=True):
            of_prompt.setdefault(prompt_id, {}).update({pair.chosen: pair.prompt, pair.rejected: pair.prompt})
        items = {(key, text): prompt for key, responses in of_prompt.items() for text, prompt in responses.items()}
        place = {key: number for number, key in enumerate(items)}
        keys = zip(data.prompt_ids, data.pairs, strict=True)
        places = [(place[key, pair.chosen], place[key, pair.rejected]) for key, pair in keys]
        sides = np.array(places, dtype=np.int64).reshape(-1, 2)
        conversations = [(prompt, text) for (_, text), prompt in items.items()]
        rows = self.rewards(model, conversations, data.fingerprint, keeps=False)
        rewards = np.array([row.reward for row in rows], dtype=float)
        lengths = np.array([row.num_tokens for row in rows], dtype=np.int64)[sides]
        cuts = np.array([(row.prompt_cut, row.response_cut) for row in rows], dtype=np.int32).reshape(-1, 2)[sides]
        ids = np.unique([row.tokens for row in rows], return_inverse=True)[1][sides]
        truncation = truncation_report(model.max_length, lengths, cuts, int((ids[:, 0] != ids[:, 1]).sum()))
        return PairRewards(rewards[sides[:, 0]], rewards[sides[:, 1]], np.arange(len(sides))), truncation


@dataclass(frozen=True)
class Evaluation(JsonRecord):
    """Result of an evaluation, saved as `metrics.json`.

    Args:
        metrics: metrics of all pairs and of their groups.
        truncation: effect of the length limit on the pairs; pairs equal after truncation are ties.
        has_default_length: True if neither the caller nor the model's training chose that limit.
        trained_on: overlap of the pairs with the model's training data; None without a record of that data.
        best_of_n: best-of-n selection; None if no pairs come from lists of at least three responses.
        num_skipped: number of rows of the sources that gave no pair.
        checkpoint: name of the model, as the caller gave it.
        turned: pairs whose order the type of the weights turned; None for float32.
    """

    metrics: PairwiseMetrics
    truncation: TruncationReport
    has_default_length: bool
    trained_on: TrainedOn | None
    best_of_n: BestOfN | None
    num_skipped: int
    checkpoint: str
    turned: TurnedOrders | None = None

    def entries(self) -> dict[str, Any]:
        """Entries of the metrics, and one for each other field."""
        others = super().entries()
        return {**others.pop("metrics"), **others}

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The evaluation that `to_json` wrote."""
        values = json.loads(text)
        return from_values(cls, {**values, "metrics": values})


DEFAULT_TOKEN_BUDGET = 16384


class EvaluationOptions(TypedDict, total=False):
    """Options of `evaluate_model` for a saved model too, as keywords."""

    output_dir: str | os.PathLike[str] | None
    token_budget: int
    num_bootstrap: int
    seed: int
    by: Texts
    thresholds: Iterable[float]


def evaluate_checkpoint(
    source: str | os.PathLike[str],
    data: object,
    *,
    max_length: int | None = None,
    dtype: str | None = None,
    **options: Unpack[EvaluationOptions],
) -> Evaluation:
    """`evaluate_model` of a saved model, on this machine's accelerator.

    Args:
        source: any model that `BradleyTerryRM.from_pretrained` loads.
        data: the pairs, as `evaluate_model` takes them.
        max_length: most tokens of a sequence; None means the stored number, or else the model's.
        dtype: type of the weights, see `load_in`.
        options: `output_dir`, `token_budget`, `num_bootstrap`, `seed`, `by` and `thresholds`, as `evaluate_model` takes
            them.

    Raises:
        CheckpointError: if the model cannot be loaded, differs from its own record, or gives rewards that are not
            finite.
        ConfigError: if the model cannot read `max_length` tokens.
        TypeError: if an option is unknown.
    """
    for name in options:
        known = ("max_length", "dtype", *EvaluationOptions.__annotations__)
        require_known("argument of evaluate_checkpoint", name, known, TypeError)

    def load(dtype: str | None) -> BradleyTerryRM:
        model = BradleyTerryRM.from_pretrained(os.fspath(source), max_length=max_length, dtype=dtype)
        return model.to(fastest_device())

    data, budget = PreferenceDataset(data), options.get("token_budget", DEFAULT_TOKEN_BUDGET)
    model, turned = load_in(dtype, load, data, token_budget=budget, seed=options.get("seed", 0))
    return evaluate_model(model, data, turned=turned, checkpoint=source, **options)


def load_in(
    dtype: str | None,
    load: Callable[[str | None], BradleyTerryRM],
    data: PreferenceDataset,
    *,
    token_budget: int,
    seed: int,
) -> tuple[BradleyTerryRM, TurnedOrders | None]:
    """A model in a type, and pairs whose order that type turns.

    Devices with units for half types score faster. One pair of each of at most `COMPARED_PROMPTS` prompts is first
    scored in float32, by a model that is gone when the other one is loaded.

    Args:
        dtype: type of the weights; None is float32.
        load: loads the model in a type.
        data: the pairs.
        token_budget: most tokens of one pass, padding included.
        seed: seed of the choice of pairs.

    Raises:
        ConfigError: if no type has the name.
    """
    if parse_dtype(dtype) not in HALF:
        return load(dtype), None
    exact = load(None)
    accepted = data.accepted_by(exact.renderer)
    of_prompt = [*dict(zip(accepted.prompt_ids, accepted.pairs, strict=True)).values()]
    places = random_positions(len(of_prompt), min(COMPARED_PROMPTS, len(of_prompt)), seed)
    pairs = [of_prompt[place] for place in places]

    def rewards(model: BradleyTerryRM) -> np.ndarray:
        encoded = [model.encode([pair.prompt] * 2, (pair.chosen, pair.rejected)) for pair in pairs]
        return model.score_encoded([*chain(*encoded)], token_budget=token_budget).numpy().reshape(-1, 2).T

    in_float32 = rewards(exact)
    del exact
    model = load(dtype)
    return model, TurnedOrders.of(dtype_name(model.model.dtype), in_float32, rewards(model))


def evaluate_model(
    model: BradleyTerryRM,
    data: object,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    token_budget: int = DEFAULT_TOKEN_BUDGET,
    num_bootstrap: int = 1000,
    seed: int = 0,
    by: Texts = (),
    thresholds: Iterable[float] = (),
    partial_dir: str | os.PathLike[str] | None = None,
    turned: TurnedOrders | None = None,
    num_workers: int | None = None,
    on_progress: OnProgress = no_progress,
) -> Evaluation:
    """Evaluate a model on pairs, and write metrics, distributions and per-pair rewards.

    Args:
        model: the model, on its device.
        data: the pairs: a path, or what `PreferenceDataset` takes in memory, such as a data frame or a list of rows.
        checkpoint: source of the model, from which the record of its training pairs is read; None without one.
        output_dir: folder for `metrics.json`, `reward_distributions.json` and `pair_rewards.jsonl`; None writes none.
        token_budget: most tokens of one pass, padding included.
        num_bootstrap: number of resamples of prompts for the intervals.
        seed: seed of the resamples.
        by: columns of the pairs' metadata whose values are reported separately, in addition to source and subset.
        thresholds: rewards at which to report the rates of true and false positives.
        partial_dir: folder of the rewards so far, from which a repeated call continues; None means `output_dir`.
        turned: pairs whose order the type of the weights turns, for the result.
        num_workers: actors on Ray that score, with one thread or one GPU each; None scores in this process.
        on_progress: function called with the number of responses done and the number of all.

    Raises:
        CheckpointError: if a reward is not finite, or the record of the model's training pairs is damaged.
        ConfigError: if the folder is one of a run or a model, or another process writes into it.
        DataError: if a conversation cannot be rendered and bad rows are not dropped, or too many rows are bad.
    """
    require_bradley_terry(model)
    source = None if checkpoint is None else os.fspath(checkpoint)
    trained = None if source is None else TrainedPairs.recorded(source)
    by = texts("by", by)
    with ExitStack() as folders:
        kept = folders.enter_context(TemporaryDirectory()) if output_dir is None else output_dir
        folder = as_path("output_dir", kept)
        require_no_run(folder, "output_dir")
        pairs = PreferenceDataset(data).accepted_by(model.renderer)
        folders.enter_context(held(folder, "evaluation"))
        place = folder if partial_dir is None else as_path("partial_dir", partial_dir)
        scorer = ResponseScorer(
            token_budget=token_budget, folder=place, num_workers=num_workers, on_progress=on_progress
        )
        rewards, truncation = scorer.pair_rewards(model, pairs)
        chosen, rejected = rewards.chosen, rewards.rejected
        evaluation = Evaluation(
            metrics_of(
                rewards, pairs, beta=model.beta, num_bootstrap=num_bootstrap, seed=seed, by=by, thresholds=thresholds
            ),
            truncation,
            has_default_length=model.has_default_length,
            trained_on=None if trained is None else trained.count(pairs.pairs),
            best_of_n=best_of_n(pairs.pairs, chosen, rejected, num_bootstrap=num_bootstrap, seed=seed),
            num_skipped=len(pairs.skipped),
            checkpoint=source or "",
            turned=turned,
        )
        if output_dir is not None:
            write_text(folder / METRICS_FILE, evaluation.to_json() + "\n")
            write_text(folder / DISTRIBUTIONS_FILE, distributions_text(rewards))
            write_pair_rewards(folder / PAIR_REWARDS_FILE, rewards, pairs, by=by)
    return evaluation
