"""Rewards of the pairs of a data set; each different response is scored once, and finished chunks are saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from rm_optimizer.core.model.identity import scorer_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.dataset import PreferenceDataset
from rm_optimizer.core.pairs.pair import Prompt, digest, require_finite
from rm_optimizer.core.tokens.cache import TruncationReport, truncation_report
from rm_optimizer.evaluation.pair_rewards import PairRewards
from rm_optimizer.records.ledger import Ledger, open_ledger

CHUNK_RESPONSES = 256
"""Number of responses scored and saved together."""


def score_responses(
    model: BradleyTerryRM,
    data: PreferenceDataset,
    *,
    token_budget: int,
    partial_dir: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[PairRewards, TruncationReport]:
    """Rewards of all pairs, and a report of the truncation to the model's length.

    A response that is in many pairs of a prompt is scored once. Responses that are equal after truncation get one
    reward, so that their pair is a tie. Rewards are appended to a file in `partial_dir` whose name depends on the model
    and the pairs. A repeated call after a kill continues from this file, and a completed call removes it.

    Args:
        model: the reward model, on its device.
        data: the pairs.
        token_budget: tokens, padding included, of one pass.
        partial_dir: folder of the file.
        on_progress: function called with the number of responses done and the number of all; at the start, the
            responses of an earlier call count as done.

    Raises:
        CheckpointError: if a reward is not finite.
        DataError: if a conversation cannot be rendered, or another process is scoring the same pairs.
    """
    items, sides = _distinct(data)
    identity = digest([scorer_digest(model), data.fingerprint, CHUNK_RESPONSES])
    path = partial_dir / f".rewards-{identity}.partial"
    with open_ledger(path, identity, other="the rewards of another model or data") as log:
        done = sum(len(chunk) for chunk in log.values())
        on_progress(done, len(items))
        while done < len(items):
            chunk = items[done : done + CHUNK_RESPONSES]
            log.append(_scored(model, chunk, token_budget))
            done += len(chunk)
            on_progress(done, len(items))
        found = _pair_rewards(log, sides), _truncation(log, sides, model.max_length)
        path.unlink()
    return found


def _distinct(data: PreferenceDataset) -> tuple[list[tuple[Prompt, str]], np.ndarray]:
    """The different responses, by prompt in order of appearance, and the positions of each pair's two responses."""
    of_prompt: dict[str, dict[str, Prompt]] = {}
    for identity, pair in zip(data.prompt_ids, data.pairs, strict=True):
        of_prompt.setdefault(identity, {}).update({pair.chosen: pair.prompt, pair.rejected: pair.prompt})
    items = [(prompt, text) for responses in of_prompt.values() for text, prompt in responses.items()]
    keys = ((identity, text) for identity, responses in of_prompt.items() for text in responses)
    place = {key: number for number, key in enumerate(keys)}
    sides = [
        (place[identity, pair.chosen], place[identity, pair.rejected])
        for identity, pair in zip(data.prompt_ids, data.pairs, strict=True)
    ]
    return items, np.array(sides, dtype=np.int64).reshape(-1, 2)


def _scored(model: BradleyTerryRM, chunk: Sequence[tuple[Prompt, str]], token_budget: int) -> list[list[float | str]]:
    """Reward, number of tokens, tokens cut from prompt and response, and digest of the token ids of each response."""
    prompts, responses = [prompt for prompt, _ in chunk], [text for _, text in chunk]
    encodings = model.encode(prompts, responses)
    rewards = model.score_encoded(encodings, token_budget=token_budget).tolist()
    require_finite(rewards, lambda index: f"the response {responses[index][:60]!r}")
    return [
        [reward, len(encoding.ids), encoding.prompt_cut, encoding.response_cut, digest(encoding.ids)]
        for reward, encoding in zip(rewards, encodings, strict=True)
    ]


def _rows(log: Ledger) -> Iterator[list[float | str]]:
    return (row for chunk in log.values() for row in chunk)


def _pair_rewards(log: Ledger, sides: np.ndarray) -> PairRewards:
    reward_of: dict[str | float, float | str] = {}
    rewards = np.array([float(reward_of.setdefault(row[4], row[0])) for row in _rows(log)])
    return PairRewards(rewards[sides[:, 0]], rewards[sides[:, 1]], np.arange(len(sides)))


def _truncation(log: Ledger, sides: np.ndarray, max_length: int) -> TruncationReport:
    rows = list(_rows(log))
    lengths = np.array([row[1] for row in rows], dtype=np.int64)[sides]
    cuts = np.array([row[2:4] for row in rows], dtype=np.int32)[sides]
    ids = np.unique([str(row[4]) for row in rows], return_inverse=True)[1][sides]
    return truncation_report(max_length, lengths, cuts, int((ids[:, 0] != ids[:, 1]).sum()))
