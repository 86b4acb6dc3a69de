"""The loss and accuracy at weights moved along directions, measured on the fixed pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from rm_optimizer.evaluation.draws import PairSample
from rm_optimizer.landscape.operators.objective import PairObjective
from rm_optimizer.landscape.surface.directions import Directions


@dataclass(frozen=True)
class PointLoss:
    """Loss and accuracy at one point.

    Args:
        loss: weighted mean over the pairs.
        loss_standard_error: its standard error over pairs; pairs of one prompt count as one.
        accuracy: weighted share of pairs ranked as labeled; ties count one half.
        accuracy_standard_error: standard error of the accuracy, likewise.
    """

    loss: float
    loss_standard_error: float
    accuracy: float
    accuracy_standard_error: float


MISSING = PointLoss(math.nan, math.nan, math.nan, math.nan)
"""A point that was not measured."""


class LossAt:
    """Function `f(w + sum_i t_i d_i)` of coordinates `t`; the weights themselves are not changed.

    Args:
        objective: the loss.
        sample: the pairs of the loss.
        directions: the vectors `d_i`.
    """

    def __init__(self, objective: PairObjective, sample: PairSample, directions: Directions) -> None:
        self._objective = objective
        self._sample = sample
        vectors = directions.vectors.to(objective.device, objective.dtype)
        self._parts = objective.subset.unflatten(vectors)

    @torch.no_grad()
    def __call__(self, coordinates: Sequence[float]) -> PointLoss:
        """The loss at these coordinates, one for each direction."""
        rows, weights = list[Tensor](), self._moved(coordinates)
        for batch in self._objective.batches:
            rewards = self._objective.rewards_at(weights, batch)
            losses = self._objective.pair_losses(rewards, batch)
            chosen, rejected = batch.split(rewards)
            right = 0.5 + 0.5 * torch.sign((chosen - rejected) * (2 * batch.label - 1))
            columns = (batch.pair_index, batch.weight, losses, right)
            rows.append(torch.stack([column.double().cpu() for column in columns], dim=1))
        return _summary(torch.cat(rows).numpy(), self._sample)

    def _moved(self, coordinates: Sequence[float]) -> list[Tensor]:
        steps = [(index, t) for index, t in enumerate(coordinates) if t != 0]
        each = zip(self._objective.parameters, self._parts, strict=True)
        return [sum((t * parts[index] for index, t in steps), start=origin.detach()) for origin, parts in each]


def _summary(rows: Float[np.ndarray, "pairs 4"], sample: PairSample) -> PointLoss:
    """Weighted means with errors over prompts as clusters; pairs are sorted, so that micro-batches do not matter."""
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    prompts = np.array([sample.prompts[int(index)] for index in rows[:, 0]])
    weight = rows[:, 1]
    values = [_clustered_mean(column, weight, prompts) for column in (rows[:, 2], rows[:, 3])]
    return PointLoss(*values[0], *values[1])


def _clustered_mean(values: np.ndarray, weight: np.ndarray, clusters: NDArray[np.int64]) -> tuple[float, float]:
    """`sum w x / sum w` and its standard error `sqrt(C / (C - 1) sum_c (sum_{i in c} w_i (x_i - mean) / sum w)^2)`."""
    share = weight / weight.sum()
    mean = float(share @ values)
    totals = np.bincount(clusters, share * (values - mean))
    count = len(totals)
    error = math.sqrt(count / (count - 1) * float(totals @ totals)) if count > 1 and math.isfinite(mean) else math.nan
    return mean, error
