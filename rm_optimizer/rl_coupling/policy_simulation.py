"""Best-of-n sampling: responses of a policy, scored by a reward model, ranked, and saved to disk at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.metrics.estimate import require_finite
from rm_optimizer.core.model.identity import scorer_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import Prompt, digest, prompt_id, prompt_json
from rm_optimizer.core.rows.messages import read_response, response_json
from rm_optimizer.core.rows.natural import Prompts, flat_groups, prompts_of
from rm_optimizer.core.rows.prompts import read_prompt
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.evaluation.response_files import read_responses
from rm_optimizer.evaluation.score_file import ScoredFile, require_new, score_counted, summed_counts
from rm_optimizer.records.files import replacing
from rm_optimizer.records.ledger import OnProgress, no_progress, open_ledger
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from rm_optimizer.rl_coupling.language_policies import TransformersPolicy, VLLMPolicy
from rm_optimizer.schema.checks import require
from rm_optimizer.serving.client.client import RewardClient

SAMPLES_AT_ONCE = 256
"""Most responses that are scored and saved together, except that there is always one whole prompt."""


class Policy(Protocol):
    """Anything that answers prompts."""

    @property
    def identity(self) -> str:
        """Digest of everything but prompts and seed that determines the responses."""

    def respond(self, prompt: Prompt, num_samples: int, seed: int) -> list[str]:
        """Draw responses to a prompt; the same arguments give the same texts.

        Args:
            prompt: text or messages.
            num_samples: responses to draw, positive.
            seed: seed of the draw, not negative.
        """
        ...


@dataclass(frozen=True)
class RankedResponses:
    """Responses to one prompt, best first; equal rewards are in the order of the draw.

    Args:
        prompt: text or messages.
        responses: the responses.
        rewards: rewards of the responses, descending.
        draws: position of each response in the draw, from 0.
    """

    prompt: Prompt
    responses: tuple[str, ...]
    rewards: tuple[float, ...]
    draws: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """The responses as JSON values; messages become objects."""
        responses = list(map(response_json, self.responses))
        return {**vars(self), "prompt": prompt_json(self.prompt), "responses": responses}

    @property
    def best(self) -> str:
        """The response with the highest reward."""
        return self.responses[0]

    def __iter__(self) -> Iterator[Any]:
        """The best response and its reward, for `text, reward = ranked`."""
        return iter((self.responses[0], self.rewards[0]))

    def __repr__(self) -> str:
        """The best response and its reward in one line."""
        return f"RankedResponses(best={self.best[:60]!r}, reward={self.rewards[0]:.4f}, of {len(self.responses)})"


@dataclass(frozen=True)
class RankedPrompts:
    """Prompts that were ranked together, as a row of the ledger.

    Args:
        rows: ranked responses of each prompt.
        num_prompt_cut: number of responses whose prompt lost tokens; None if the scorer does not count them.
        num_response_cut: number of responses that lost tokens themselves; None if the scorer does not count them.
    """

    rows: list[RankedResponses]
    num_prompt_cut: int | None
    num_response_cut: int | None


class BestOfNSampler:
    """Sampler that draws responses of a policy and ranks them by a reward model.

    Args:
        model: hub id or folder of a causal language model, or an object that answers prompts.
        reward_model: scorer of the responses: a model, an ensemble or a server's client.
        n_samples: number of responses for each prompt, positive.
        use_vllm: generate by vLLM's offline engine (extra `vllm`); only for a policy given by name.
        seed: seed of the responses, not negative.
        policy_options: keywords of `TransformersPolicy` or `VLLMPolicy`.

    Raises:
        CheckpointError: if the policy cannot be loaded, or is a reward model.
        ConfigError: if an option is out of its range.
        MissingExtra: if vLLM is requested and not installed.
    """

    def __init__(
        self,
        model: Policy | str | PathLike[str],
        reward_model: Scorer,
        n_samples: int = 16,
        use_vllm: bool = False,
        *,
        seed: int = 0,
        **policy_options: Any,
    ) -> None:
        require(n_samples >= 1, "n_samples", "be positive", n_samples)
        require(seed >= 0, "seed", "not be negative", seed)
        if isinstance(model, str | PathLike):
            model = (VLLMPolicy if use_vllm else TransformersPolicy)(fspath(model), **policy_options)
        elif use_vllm or policy_options:
            given = ", ".join(["use_vllm"] * use_vllm + list(policy_options))
            raise ConfigError(f"{given} is for a policy given by name, got a {type(model).__name__}; leave it out")
        self.policy: Policy = model
        self.reward_model = reward_model
        self.n_samples = n_samples
        self.seed = seed

    def sample(self, prompts: Prompts) -> list[RankedResponses]:
        """Responses to the prompts, ranked.

        Raises:
            CheckpointError: if a reward is not finite.
        """
        return [found for chunk in self._chunks(prompts_of("prompts", prompts)) for found in self._ranked(chunk).rows]

    def sample_to_file(self, prompts: Prompts, path: Path, *, on_progress: OnProgress = no_progress) -> ScoredFile:
        """Write ranked responses as JSON lines with `prompt`, `responses`, `rewards` and `draws`.

        Results are first appended to `PATH.partial`. After a kill or a server failure, repeating the call continues
        from this file and gives the result of an uninterrupted call.

        Args:
            prompts: text or messages.
            path: the file, which must not exist yet.
            on_progress: called with the number of finished prompts and of all prompts.

        Returns:
            Counts of prompts, responses and cuts, including earlier calls; only models in this process count cuts.

        Raises:
            DataError: if the file exists, or its partial file belongs to another call.
            CheckpointError: if a reward is not finite.
        """
        each = prompts_of("prompts", prompts)
        identity = [self.policy.identity, self.n_samples, self.seed, [prompt_id(prompt) for prompt in each]]
        return _to_file(self.reward_model, identity, self._chunks(each), self._ranked, path, on_progress)

    def _chunks(self, prompts: Sequence[Prompt]) -> list[Sequence[Prompt]]:
        size = max(1, SAMPLES_AT_ONCE // self.n_samples)
        return [prompts[start : start + size] for start in range(0, len(prompts), size)]

    def _ranked(self, prompts: Sequence[Prompt]) -> RankedPrompts:
        responses = [self.policy.respond(prompt, self.n_samples, self.seed) for prompt in prompts]
        return rank(self.reward_model, prompts, responses)


def rank(reward_model: Scorer, prompts: Sequence[Prompt], responses_of_each: Sequence[Sequence[str]]) -> RankedPrompts:
    """Responses to each prompt by descending reward; if the model supports it, a prompt is computed only once.

    Raises:
        ValueError: if there are not as many groups of responses as prompts.
        CheckpointError: if a reward is not finite.
    """
    cut: tuple[int | None, int | None] = (None, None)
    flat_prompts, flat_texts, sizes = flat_groups(prompts, responses_of_each)
    if isinstance(reward_model, BradleyTerryRM):
        counted = score_counted(reward_model, flat_prompts, flat_texts)
        values, cut = iter(counted.rewards), (counted.num_prompt_cut, counted.num_response_cut)
        rewards = [list(islice(values, size)) for size in sizes]
    else:
        rewards = [own.tolist() for own in reward_model.score_groups(prompts, responses_of_each)]
    require_finite([one for own in rewards for one in own], lambda index: f"the response {flat_texts[index][:60]!r}")
    found = []
    for prompt, texts, numbers in zip(prompts, responses_of_each, rewards, strict=True):
        order = sorted(range(len(texts)), key=lambda draw: -numbers[draw])
        best_texts, best_rewards = (tuple(texts[draw] for draw in order), tuple(numbers[draw] for draw in order))
        found.append(RankedResponses(prompt, best_texts, best_rewards, tuple(order)))
    return RankedPrompts(found, *cut)


def rank_file(reward_model: Scorer, source: Path, path: Path, *, on_progress: OnProgress = no_progress) -> ScoredFile:
    """Rank saved completions, and write each prompt's responses best first like `BestOfNSampler.sample_to_file`.

    Args:
        reward_model: scorer of the responses.
        source: JSONL (also .gz), CSV or Parquet with `prompt` and a list `responses`, or `prompt` and `response` in
            several rows of a prompt.
        path: the file to write, which must not exist yet.
        on_progress: called with the number of finished prompts and of all prompts.

    Returns:
        Counts as in `BestOfNSampler.sample_to_file`.

    Raises:
        DataError: if a file or row cannot be used.
        CheckpointError: if a reward is not finite.
    """
    groups = responses_by_prompt(source)

    def ranked(chunk: Sequence[tuple[Prompt, list[str]]]) -> RankedPrompts:
        return rank(reward_model, [prompt for prompt, _ in chunk], [texts for _, texts in chunk])

    identity = [[key, texts] for key, (_, texts) in groups.items()]
    return _to_file(reward_model, identity, [[item] for item in groups.values()], ranked, path, on_progress)


def responses_by_prompt(source: Path) -> dict[str, tuple[Prompt, list[str]]]:
    """Prompts of a file with all their responses, by the digest of the prompt.

    Raises:
        DataError: if the file or a row cannot be read, or there are no rows.
    """
    groups: dict[str, tuple[Prompt, list[str]]] = {}
    for row in read_responses(source):
        groups.setdefault(prompt_id(row.prompt), (row.prompt, []))[1].extend(row.responses)
    if not groups:
        raise DataError(f"{source}: there are no rows to rank")
    return groups


def read_ranked(path: Path) -> tuple[list[RankedResponses], Float[np.ndarray, "prompts samples"]]:
    """Ranked responses of a file, and their rewards as a table.

    Raises:
        DataError: if prompts differ in their number of responses.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [
        RankedResponses(
            read_prompt(row["prompt"]),
            tuple(read_response("response", response) for response in row["responses"]),
            tuple(row["rewards"]),
            tuple(row["draws"]),
        )
        for row in rows
    ]
    require_equal_counts(path, [len(row.rewards) for row in found])
    return found, np.array([row.rewards for row in found])


def require_equal_counts(path: Path, counts: Sequence[int]) -> None:
    """Refuse prompts with different numbers of responses, which give no curve and no probe.

    Raises:
        DataError: naming the smallest and the largest number.
    """
    if min(counts) < max(counts):
        raise DataError(
            f"{path}: expected equally many responses to each prompt, got {min(counts)} to {max(counts)}; sample them "
            "again with one number, or cut all to the smallest"
        )


def scorer_identity(scorer: Scorer) -> str:
    """Digest of everything that determines a scorer's rewards; for a server, the version of its weights.

    Raises:
        ConfigError: if this kind of scorer has no identity.
    """
    if isinstance(scorer, BradleyTerryRM):
        return scorer_digest(scorer)
    if isinstance(scorer, RewardModelEnsemble):
        return scorer.digest()
    if isinstance(scorer, RewardClient):
        return digest(["server", scorer.version])
    raise ConfigError(
        f"the rewards of a {type(scorer).__name__} cannot be recognized after a stop; use sample, or give a model, an "
        "ensemble or a client"
    )


def _to_file(
    scorer: Scorer,
    identity: Sequence[Any],
    chunks: Sequence[Any],
    ranked: Callable[[Any], RankedPrompts],
    path: Path,
    on_progress: OnProgress,
) -> ScoredFile:
    """Rank chunk by chunk into a ledger, and write the lines after the last chunk."""
    if path.suffix != ".jsonl":
        raise DataError(f"{path}: expected a file name ending in .jsonl")
    require_new(path)
    whole = digest([scorer_identity(scorer), "with counts of cuts", *identity])
    partial, num_prompts = path.with_name(f"{path.name}.partial"), sum(map(len, chunks))
    with open_ledger(partial, whole, other="responses of another policy, model, seed or number of samples") as log:
        sizes = [len(piece["rows"]) for piece in log.values()]
        on_progress(sum(sizes), num_prompts)
        for chunk in chunks[len(sizes) :]:
            found = ranked(chunk)
            log.append({**vars(found), "rows": [row.to_dict() for row in found.rows]})
            sizes.append(len(found.rows))
            on_progress(sum(sizes), num_prompts)
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for piece in log.values():
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in piece["rows"])
        pieces = ((piece.pop("rows"), piece) for piece in log.values())
        counts = summed_counts(
            {"num_rows": len(rows), "num_responses": sum(len(row["responses"]) for row in rows), **cuts}
            for rows, cuts in pieces
        )
        partial.unlink()
    return counts
