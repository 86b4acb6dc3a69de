"""Directions through weight space for slices, surfaces and trajectories of the loss."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rm_optimizer.errors import CheckpointError, ConfigError
from rm_optimizer.landscape.operators.parameters import ParameterSubset
from rm_optimizer.records.files import replacing

_COLUMNS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Directions:
    """Named vectors over a subset of parameters, with their origin.

    Args:
        names: names of the vectors for legends and axes.
        vectors: one row each.
        method: origin of the directions, in words.
        values: eigenvalue of each vector, or its share of the trajectory's variance; None for random ones.
    """

    names: tuple[str, ...]
    vectors: Float[Tensor, "directions parameters"]
    method: str
    values: tuple[float, ...] | None = None

    def save(self, path: Path, identity: str) -> None:
        """Write the directions atomically, with the identity of the measurement that they belong to."""
        with replacing(path) as temporary:
            torch.save({**vars(self), "vectors": self.vectors.cpu(), "identity": identity}, temporary)

    @classmethod
    def load(cls, path: Path, identity: str) -> Directions | None:
        """Read the directions that `save` wrote for this identity; None if there is no such file.

        Raises:
            CheckpointError: if the file is damaged.
        """
        if not path.exists():
            return None
        try:
            content: dict[str, Any] = torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be read; remove it to start again") from error
        return cls(**content) if content.pop("identity", None) == identity else None


def filter_normalized(model: nn.Module, subset: ParameterSubset, count: int, *, seed: int) -> Directions:
    """Random directions in which each row of a weight matrix is as long as the same row of the weights.

    ``d_ij <- d_ij / ||d_ij|| ||w_ij||`` for row ``j`` of matrix ``i``, with Gaussian ``d_ij`` before (Li et al., 2018,
    https://arxiv.org/abs/1712.09913, section 4). The row of a linear layer, an embedding or a LoRA factor corresponds
    to the filter of a convolution. Vectors (biases, normalization) are not moved. One unit along a direction moves the
    weights by their own length at any scale, so figures of two models can be compared.

    Args:
        model: model with the weights.
        subset: the parameters to move.
        count: number of directions.
        seed: seed of the draws, which are the same on every device.

    Raises:
        ConfigError: if the subset holds no matrix.
    """
    weights = subset.of(model)
    if all(weight.ndim < 2 for weight in weights):
        raise ConfigError(
            "random directions need weight matrices, and params selects none; select some, or use eigenvectors"
        )
    generator = torch.Generator().manual_seed(seed)
    rows = [subset.flatten([_as_rows(weight, generator) for weight in weights]) for _ in range(count)]
    return Directions(tuple(f"random {i + 1}" for i in range(count)), torch.stack(rows), "filter-normalized random")


def _as_rows(weight: Tensor, generator: torch.Generator) -> Tensor:
    if weight.ndim < 2:
        return torch.zeros_like(weight, requires_grad=False)
    drawn = torch.randn(weight.shape, generator=generator).to(weight.device, weight.dtype).flatten(1)
    lengths = weight.detach().flatten(1).norm(dim=1, keepdim=True)
    scaled: Tensor = drawn / drawn.norm(dim=1, keepdim=True) * lengths
    return scaled.reshape(weight.shape)


def along_eigenvectors(
    values: Sequence[float], vectors: Float[Tensor, "values parameters"], converged: Sequence[bool], count: int
) -> Directions:
    """Unit vectors along the eigenvectors of largest magnitude; a unit is one of parameter distance.

    The name of an eigenvector that did not converge is marked.

    Args:
        values: eigenvalues.
        vectors: their eigenvectors, one row each.
        converged: True for each value that converged.
        count: number of directions.
    """
    order = sorted(range(len(values)), key=lambda index: -abs(values[index]))[:count]
    remarks = {index: "" if converged[index] else " (not converged)" for index in order}
    names = tuple(f"λ = {values[index]:.3g}{remark}" for index, remark in remarks.items())
    return Directions(names, vectors[order], "Hessian eigenvectors", tuple(values[index] for index in order))


@dataclass(frozen=True)
class TrajectoryPlane:
    """Plane through the last point of a trajectory that is closest to the other points.

    Args:
        directions: orthonormal directions, with the share of each in the squared distances to the last point.
        coordinates: coordinates of each point in the plane; the last is zero.
        off_plane: distance of each point from the plane, in parameter distance.
    """

    directions: Directions
    coordinates: Float[Tensor, "checkpoints 2"]
    off_plane: Float[Tensor, " checkpoints"]


def trajectory_plane(displacements: Float[Tensor, "checkpoints parameters"]) -> TrajectoryPlane:
    """Principal directions of the path to the last point: PCA of ``[w_0 - w_n; ...; w_{n-1} - w_n]``, not centered.

    As in Li et al. (2018, section 7.2), from the checkpoints' Gram matrix in float64.

    Args:
        displacements: weights of each checkpoint minus the last one's; the last row is zero.

    Raises:
        ConfigError: if there are fewer than three different points.

    Example:
        >>> plane = trajectory_plane(torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
        >>> [round(share, 3) for share in plane.directions.values]
        [0.9, 0.1]
    """
    gram = torch.zeros(len(displacements), len(displacements), dtype=torch.float64)
    for part in torch.split(displacements, _COLUMNS_AT_ONCE, dim=1):
        gram += (part.double() @ part.double().T).cpu()
    values, vectors = torch.linalg.eigh(gram)
    top, weights = values.flip(0)[:2].clamp(min=0), vectors.flip(1)[:, :2]
    if len(gram) < 3 or top[1] <= 1e-7 * top[0]:
        raise ConfigError("the plane of a trajectory needs at least 3 checkpoints that are not on one line")
    coordinates = weights * top.sqrt()
    scaled = (weights / top.sqrt()).T.to(displacements)
    shares = tuple((top / gram.trace()).tolist())
    names = tuple(f"PC {i + 1}, {share:.0%}" for i, share in enumerate(shares))
    off_plane = (gram.diagonal() - coordinates.square().sum(dim=1)).clamp(min=0).sqrt()
    directions = Directions(names, scaled @ displacements, "PCA of the trajectory", shares)
    return TrajectoryPlane(directions, coordinates, off_plane)


def displacements_of(
    weights: Iterable[Mapping[str, Tensor]], subset: ParameterSubset
) -> Float[Tensor, "checkpoints parameters"]:
    """Weights of each checkpoint less the last one's, over a subset, in float32.

    Args:
        weights: weights by `BradleyTerryRM.named_parameters`' names, oldest first; one is held at a time.
        subset: the parameters.
    """
    rows = torch.stack([subset.flatten([held[name].float() for name in subset.names]) for held in weights])
    return rows.sub_(rows[-1].clone())
