"""Gradient and CPU time of one macro-batch: pair-atomic micro-batches against one padded pass over the same pairs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from rm_optimizer.core.model.losses import bradley_terry_pair_losses
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import AnyPairBatch


@dataclass(frozen=True)
class Gradients:
    """Gradients of the summed loss of each micro-batch, the pairs in them, and the CPU seconds they took."""

    sums: list[Float[np.ndarray, " parameters"]]
    pairs: list[int]
    seconds: float

    @property
    def exact(self) -> Float[np.ndarray, " parameters"]:
        """Gradient of the mean over pairs."""
        return np.asarray(sum(self.sums) / sum(self.pairs))

    @property
    def mean_of_means(self) -> Float[np.ndarray, " parameters"]:
        """Gradient of the mean over micro-batches of their means."""
        return np.asarray(sum(g / n for g, n in zip(self.sums, self.pairs, strict=True)) / len(self.sums))


def gradients(model: BradleyTerryRM, batches: Sequence[AnyPairBatch]) -> Gradients:
    """The gradient of each micro-batch; only passes are timed."""
    sums, pairs, seconds = [], [], 0.0
    for batch in batches:
        model.zero_grad()
        started = time.process_time()
        torch.autograd.backward(bradley_terry_pair_losses(*batch.split(model.rewards_of(batch))).sum())
        seconds += time.process_time() - started
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).numpy())
        pairs.append(batch.num_pairs)
    return Gradients(sums, pairs, seconds)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread for torch, so that CPU seconds hold no waiting of threads for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def batching_row(pair_aware: Gradients, padded: Gradients) -> dict[str, float]:
    """One macro-batch's comparison: log ratio of times, and distances of gradients from the one padded pass."""
    reference = padded.exact
    return {
        "log_time_ratio": math.log(padded.seconds / pair_aware.seconds),
        "gradient_difference": float(np.abs(pair_aware.exact - reference).max() / np.abs(reference).max()),
        "mean_of_means_difference": float(
            np.linalg.norm(pair_aware.mean_of_means - reference) / np.linalg.norm(reference)
        ),
    }
