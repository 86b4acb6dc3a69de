"""Fastest number of tokens in one forward pass on this machine, by measurement.

On a CPU one sequence of 200 tokens fills a matrix product, and larger passes only miss the cache. On a GPU larger
passes are faster.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

from rm_optimizer.core.model.passes import SequenceScorer
from rm_optimizer.core.model.reward_model import BradleyTerryRM

BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
DEFAULT_BUDGET = 512
"""Tokens of a pass without a measurement."""
LENGTHS = (64, 384)
"""Range of the synthetic lengths, in tokens, typical of chat answers."""
WORSE = 1.25
"""Slowdown relative to the best budget so far that ends the search."""


def calibrated_budget(model: BradleyTerryRM, seconds: float = 2.0) -> int:
    """Budget with the least time per token, among those tried within `seconds`."""
    deadline = time.perf_counter() + seconds
    longest = max(8, model.max_length)
    SequenceScorer(model, longest).rewards([_sequence(model, min(64, longest), 0)])  # the first pass is slow
    best, least = DEFAULT_BUDGET, float("inf")
    for budget in BUDGETS:
        cost = _seconds_a_token(model, budget, deadline)
        if cost < least:
            best, least = budget, cost
        if cost > WORSE * least or time.perf_counter() > deadline:
            break
    return best


def _seconds_a_token(model: BradleyTerryRM, budget: int, deadline: float) -> float:
    """Least wall time per token over up to three passes of about `budget` tokens."""
    batch = _batch(model, budget)
    scorer, tokens = SequenceScorer(model, budget), sum(map(len, batch))
    times: list[float] = []
    while len(times) < 3 and not (times and time.perf_counter() > deadline):
        started = time.perf_counter()
        scorer.rewards(batch)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        times.append((time.perf_counter() - started) / tokens)
    return min(times)


def _batch(model: BradleyTerryRM, budget: int) -> list[NDArray[np.int32]]:
    generator = np.random.default_rng(0)
    low, high = (min(length, model.max_length) for length in LENGTHS)
    tokens, batch = max(budget, 1024), list[NDArray[np.int32]]()
    while sum(map(len, batch)) < tokens:
        batch.append(_sequence(model, int(generator.integers(low, high + 1)), len(batch)))
    return batch


def _sequence(model: BradleyTerryRM, length: int, seed: int) -> NDArray[np.int32]:
    size = model.model.get_input_embeddings().weight.shape[0]
    return np.random.default_rng(seed).integers(0, size, length).astype(np.int32)
