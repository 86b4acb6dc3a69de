"""Fixed sample of pairs, and a measurement of the curvature on it.

The sample is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.batching import AnyPairBatch, PairCollator
from rm_optimizer.core.tokens.cache import PairTokens, tokenize_pairs
from rm_optimizer.errors import DataError
from rm_optimizer.records.orders import random_positions
from rm_optimizer.schema import LossConfig

Prompts: TypeAlias = Mapping[int, int]
"""Number of each pair's prompt by `pair_index`, since pairs of one prompt are not independent."""
FEWEST = 2
"""Least number of pairs; a measurement of one preference has no sampling error."""


@dataclass(frozen=True)
class PairSample:
    """Sample of pairs in micro-batches, the same for every evaluation.

    Args:
        batches: the pairs, each in one micro-batch; `pair_index` is the pair's position among all given pairs.
        prompts: numbers of the pairs' prompts.
        positions: the pairs' positions among those that differ after truncation, ascending.
        seed: seed of the draw.
    """

    batches: tuple[AnyPairBatch, ...]
    prompts: Prompts
    positions: NDArray[np.int64]
    seed: int

    @property
    def num_pairs(self) -> int:
        """Number of pairs in all micro-batches."""
        return len(self.positions)

    @property
    def num_prompts(self) -> int:
        """Number of different prompts of these pairs."""
        return len(set(self.prompts.values()))


def draw_pairs(
    model: BradleyTerryRM,
    pairs: Sequence[PreferencePair],
    num_pairs: int | None,
    seed: int,
    *,
    token_budget: int,
    fewest: int = FEWEST,
    tokenized: PairTokens | None = None,
) -> PairSample:
    """Draw pairs that differ after truncation, as padded micro-batches.

    Args:
        model: model whose tokenizer is used.
        pairs: the pairs to draw from.
        num_pairs: number of pairs to draw; None, or more than there are, means all.
        seed: seed of the draw, not negative.
        token_budget: most tokens of a micro-batch, padding included; it bounds memory and changes no result.
        fewest: least number of pairs left after truncation; 0 for a process whose share may be empty.
        tokenized: tokens of the pairs, if they are already computed.

    Raises:
        DataError: if fewer than `fewest` pairs are left.
    """
    if tokenized is None and pairs:
        tokenized = tokenize_pairs(pairs, model.renderer, None)
    left = 0 if tokenized is None else len(tokenized)
    positions = random_positions(left, left if num_pairs is None else num_pairs, seed)
    read = f" ({len(pairs)} were read, {left} are left after truncation to {model.max_length} tokens)"
    require_enough(len(positions), fewest, read)
    if tokenized is None:
        return PairSample((), {}, positions, seed)
    collator = PairCollator(tokenized, pairs, model.renderer.pad_token_id)
    batches = tuple(map(collator, collator.micro_batches(positions, token_budget)))
    numbers: dict[str, int] = {}
    drawn = tokenized.pair_index[positions].tolist()
    prompts = {index: numbers.setdefault(pairs[index].prompt_id, len(numbers)) for index in drawn}
    return PairSample(batches, prompts, positions, seed)


def require_enough(num_pairs: int, fewest: int, read: str = "") -> None:
    """Refuse fewer pairs than a measurement needs.

    `read` is a remark for the message on the pairs that were read.

    Raises:
        DataError: if there are fewer than `fewest`.
    """
    if num_pairs < fewest:
        raise DataError(
            f"a measurement over pairs needs at least {fewest} pairs, got {num_pairs}{read}; 64 or more are useful"
        )


@dataclass(frozen=True)
class CurvatureMeasurement:
    """Top eigenvalue and trace of the Hessian on fixed pairs.

    Args:
        top_eigenvalue: Rayleigh quotient. Up to the error of the products, the largest algebraic eigenvalue is at least
            this large. It is unknown how much larger it is.
        residual: ``||H v - (v^T H v) v||`` of a unit vector with ``v^T H v <= top_eigenvalue``. Some eigenvalue is
            within this distance of ``v^T H v``. It need not be the largest, so this is no error of the top eigenvalue.
        trace: Hutchinson's estimate from random probes.
        num_products: number of Hessian-vector products, without the values ``v^T H v`` computed from the loss alone.
        num_pairs: number of pairs in the mean loss.
        num_tokens: tokens of their micro-batches, with padding.
        num_gradients: cost in gradients over these pairs; a value `v^T H v` costs a third of a gradient.
        num_gradients_next: cost of the next measurement, if the eigenvectors change little until then.
        preconditioned_sharpness: largest eigenvalue of `S H S`, a Rayleigh quotient like `top_eigenvalue`; None if no
            scale `S` was given.
    """

    top_eigenvalue: float
    residual: float
    trace: Estimate
    num_products: int
    num_pairs: int
    num_tokens: int
    num_gradients: float
    num_gradients_next: float
    preconditioned_sharpness: float | None = None


MeasureCurvature = Callable[[Mapping[str, Tensor] | None], CurvatureMeasurement]
"""Measurement of the Hessian at the present weights; with scales of the parameters by name, of the scaled one too."""
MeasurementFactory = Callable[[BradleyTerryRM, Sequence[AnyPairBatch], LossConfig], MeasureCurvature]
"""Function that returns a measurement of a model's curvature on fixed micro-batches. Each call of the measurement uses
the weights of that time, and does not change weights, gradients, modes and random generators."""
