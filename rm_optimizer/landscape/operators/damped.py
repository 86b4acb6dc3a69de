"""Solutions with the damped Gauss-Newton matrix of a loss from the gradients of single pairs, and its damping.

`H = sum_i J_i^T C_i J_i`, where `J_i` is the gradient of a pair's margin (for a loss that reads more than margins, of
its two rewards; `reward_gradients`), and `C_i` the second derivative of its loss by it, times the pair's weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import brentq
from torch import Tensor

from rm_optimizer.landscape.operators.base import output_blocks
from rm_optimizer.landscape.operators.objective import PairObjective
from rm_optimizer.landscape.operators.vectors import gram_matrix, pairwise_inner

_SHARES = (1e-6, 1e2)
"""Smallest and largest damping that the rule chooses, as shares of the largest eigenvalue."""


@dataclass(frozen=True)
class LossDerivatives:
    """Loss of each pair and its derivatives by the margin or by both rewards.

    Args:
        slope: first derivative, times the pair's weight.
        curvature: second derivative `C_i`, times the pair's weight.
        margin: the margin.
        loss: the loss.
        weight: the pair's weight.
        losses_at: function of shifts of all pairs' margins or rewards that gives their losses.
    """

    slope: Float[np.ndarray, "pairs size"]
    curvature: Float[np.ndarray, "pairs size size"]
    margin: Float[np.ndarray, " pairs"]
    loss: Float[np.ndarray, " pairs"]
    weight: Float[np.ndarray, " pairs"]
    losses_at: Callable[[np.ndarray], np.ndarray]

    @property
    def size(self) -> int:
        """1 for the margin, 2 for both rewards."""
        return int(self.slope.shape[1])

    @property
    def margin_slope(self) -> Float[np.ndarray, " pairs"]:
        """Derivative by the margin."""
        return self.slope[:, 0] if self.size == 1 else (self.slope[:, 0] - self.slope[:, 1]) / 2

    def steps_without(self, own: Float[np.ndarray, "pairs size size"]) -> Float[np.ndarray, "pairs size"]:
        """`(I - C_i h_i)^-1 g_i` of each pair for `h_i = J_i (H + damping I)^-1 J_i^T`.

        `(H + damping I)^-1 J_i^T` times it is the Newton step of the loss without the pair.
        """
        left = np.eye(self.size) - self.curvature @ own
        return np.asarray(np.linalg.solve(left, self.slope[:, :, None])[:, :, 0])

    @classmethod
    def of(cls, objective: PairObjective) -> LossDerivatives:
        """The derivatives of all pairs, in the order of the batches."""
        basis = torch.tensor([[0.5, -0.5]]) if objective.loss.is_of_margins else torch.eye(2)
        basis = basis.to(objective.device, torch.float64)
        parts: list[list[Any]] = []
        rewards: list[Tensor] = []
        for batch in objective.batches:
            with torch.no_grad():
                at = objective.model.rewards_of(batch)
            rewards.append(at)
            leaf = at.clone().requires_grad_()
            losses = objective.pair_losses(leaf, batch)
            (slope,) = torch.autograd.grad(losses.sum(), leaf)
            weight = batch.weight.double()
            blocks = output_blocks(objective, batch, at, "gauss_newton").double() * objective.total_weight
            parts.append([
                (slope.view(-1, 2).double() @ basis.T) * weight[:, None],
                torch.einsum("ka,pab,lb->pkl", basis, blocks, basis),
                (at[0::2] - at[1::2]).double(),
                losses.detach().double(),
                weight,
            ])  # fmt: skip
        columns = [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]

        def losses_at(shifts: np.ndarray) -> np.ndarray:
            shifts_of_rewards = torch.from_numpy(shifts).to(basis) @ basis
            moved = torch.split(shifts_of_rewards, [batch.num_pairs for batch in objective.batches])
            with torch.no_grad():
                found = [
                    objective.pair_losses(at + shift.reshape(-1).to(at), batch)
                    for at, shift, batch in zip(rewards, moved, objective.batches, strict=True)
                ]
            return np.asarray(torch.cat(found).double().cpu())

        slopes, curvatures, margins, values, weights = columns
        return cls(slopes, curvatures, margins, values, weights, losses_at)

    def of_rows(self, chosen: np.ndarray) -> LossDerivatives:
        """The derivatives of some pairs."""

        def losses_at(shifts: np.ndarray) -> np.ndarray:
            whole = np.zeros_like(self.slope)
            whole[chosen] = shifts
            return np.asarray(self.losses_at(whole)[chosen])

        return LossDerivatives(
            self.slope[chosen],
            self.curvature[chosen],
            self.margin[chosen],
            self.loss[chosen],
            self.weight[chosen],
            losses_at,
        )


class DampedSystem:
    """Solutions of `(H + damping I) x = phi` for any damping, from one eigendecomposition of the smaller side.

    With `A` the gradients and `S` the square roots of the pairs' curvatures, `H = (S A)^T (S A)`. If there are fewer
    gradients than columns, the decomposition is of `S A A^T S` (Woodbury), else of `H`.

    Args:
        rows: the gradients `A`, as many a pair as its curvature has rows.
        curvature: curvature of each pair's loss.
    """

    def __init__(self, rows: Float[Tensor, "rows columns"], curvature: Float[np.ndarray, "pairs size size"]) -> None:
        values, vectors = np.linalg.eigh(curvature)
        self._root = torch.from_numpy(np.einsum("pak,pk,pbk->pab", vectors, np.sqrt(np.maximum(values, 0)), vectors))
        self._rows, self._by_pair = rows, curvature.shape[:2]
        self._is_small = len(rows) <= rows.shape[1]
        self._gram = gram_matrix([rows]) if self._is_small else None
        if self._gram is not None:
            found, basis = torch.linalg.eigh(self._scaled(self._scaled(self._gram).T))
            self._left = self._gram @ self._scaled(basis)
        else:
            inner = self._scaled(rows.double())
            found, basis = torch.linalg.eigh(inner.T @ inner)
            self._left = rows.double() @ basis
        self._values, self._basis = found.clamp(min=0), basis
        self.largest = float(self._values[-1])

    def _scaled(self, matrix: Tensor) -> Tensor:
        """`S` times a matrix."""
        num, size = self._by_pair
        found: Tensor = torch.einsum("pab,pbc->pac", self._root, matrix.reshape(num, size, -1))
        return found.view(matrix.shape)

    @property
    def first_vector(self) -> Float[Tensor, "1 columns"]:
        """Unit eigenvector of `H` for its largest eigenvalue."""
        last = self._basis[:, -1:]
        if self._is_small:
            last = self._rows.double().T @ self._scaled(last) / max(self.largest, 1e-300) ** 0.5
        row: Tensor = last.T
        return row.to(self._rows.dtype)

    def _shares(self, damping: float) -> Tensor:
        inverse: Tensor = 1 / (self._values + damping)
        return -inverse / damping if self._is_small else inverse

    def own(self, damping: float) -> Float[np.ndarray, "pairs size size"]:
        """`h_i = J_i (H + damping I)^-1 J_i^T` of each pair."""
        num, size = self._by_pair
        left = self._left.view(num, size, -1)
        found = torch.einsum("par,r,pbr->pab", left, self._shares(damping), left)
        if self._gram is not None:
            blocks = [self._gram[at : at + size, at : at + size] for at in range(0, num * size, size)]
            found = found + torch.stack(blocks) / damping
        return np.asarray(found)

    def influence(
        self, aims: Float[Tensor, "targets columns"], own: LossDerivatives, damping: float
    ) -> Float[np.ndarray, "pairs targets"]:
        """`tau_i` of each pair for each gradient `phi`."""
        if self._gram is not None:
            cross = pairwise_inner(self._rows, aims)
            found = cross / damping + (self._left * self._shares(damping)) @ (self._basis.T @ self._scaled(cross))
        else:
            found = (self._left * self._shares(damping)) @ (self._basis.T @ aims.double().T)
        steps = own.steps_without(self.own(damping))
        return np.asarray(-np.einsum("ik,ikt->it", steps, np.asarray(found.view(*self._by_pair, -1))))


def damping_by_gap(system: DampedSystem, own: LossDerivatives, wanted: float) -> tuple[float, str]:
    """Damping at which the mean loss of pairs that are left out is `wanted`, as a share of the largest eigenvalue.

    Leaving a pair out moves its own margin or rewards by `h_i (I - C_i h_i)^-1 g_i` (approximate leave-one-out; Rad &
    Maleki, 2020, arXiv:1801.10243).
    """
    share = own.weight / own.weight.sum()

    def loss(exponent: float) -> float:
        reach = system.own(math.exp(exponent) * system.largest)
        moves = np.einsum("ikl,il->ik", reach, own.steps_without(reach))
        return float(share @ own.losses_at(moves))

    low, high = map(math.log, _SHARES)
    have = float(share @ own.loss)
    if wanted <= loss(high):
        said = f"the largest, since the held-out loss of {wanted:.4f} is not above the training loss of {have:.4f}"
        return _SHARES[1], said
    grid = np.linspace(low, high, 17)
    for upper, lower in zip(grid[::-1], grid[-2::-1], strict=False):
        if loss(lower) >= wanted:
            found = float(brentq(lambda at: loss(at) - wanted, lower, upper, xtol=1e-3))
            break
    else:
        told = f"the smallest, since no damping moves the training pairs' loss {have:.4f} to the held-out {wanted:.4f}"
        return _SHARES[0], told
    told = f"the training pairs' loss {have:.4f} becomes the held-out pairs' {wanted:.4f} when each is left out"
    return math.exp(found), told
