"""Directions have the lengths, the order and the planes that they claim."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rm_optimizer.errors import CheckpointError, ConfigError
from rm_optimizer.landscape.operators.base import MatrixOperator
from rm_optimizer.landscape.operators.parameters import ParameterSubset
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs, lanczos
from rm_optimizer.landscape.surface.directions import (
    Directions,
    along_eigenvectors,
    displacements_of,
    filter_normalized,
    trajectory_plane,
)


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight[1] = 0.0  # a dead filter
    return model


def everything(model: nn.Module) -> ParameterSubset:
    named = dict(model.named_parameters())
    return ParameterSubset(tuple(named), tuple(parameter.shape for parameter in named.values()))


def along(found: Eigenpairs, count: int) -> Directions:
    return along_eigenvectors(found.values.tolist(), found.vectors, found.converged, count)


def test_every_row_is_as_long_as_the_row_of_the_weights_and_vectors_stay():
    model = two_layers()
    subset = everything(model)
    found = filter_normalized(model, subset, 2, seed=3)
    for vector in found.vectors:
        for part, weight in zip(subset.unflatten(vector), subset.of(model), strict=True):
            if weight.ndim == 2:
                torch.testing.assert_close(part.norm(dim=1), weight.norm(dim=1))
            else:
                assert not part.any()


def test_random_directions_are_the_seeds_and_differ():
    model = two_layers()
    subset = everything(model)
    first, again = (filter_normalized(model, subset, 2, seed=3).vectors for _ in range(2))
    other = filter_normalized(model, subset, 2, seed=4).vectors
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, other)


def test_only_vectors_give_no_random_direction():
    model = nn.LayerNorm(4)
    with pytest.raises(ConfigError, match="params selects none"):
        filter_normalized(model, everything(model), 1, seed=0)


def test_eigenvectors_come_by_magnitude_with_their_values():
    matrix = torch.diag(torch.tensor([1.0, -5.0, 3.0], dtype=torch.float64))
    found = along(lanczos(MatrixOperator(matrix), 3), 2)
    assert found.values == pytest.approx((-5.0, 3.0))
    torch.testing.assert_close(found.vectors.abs(), torch.eye(3, dtype=torch.float64)[[1, 2]])


def test_an_eigenvector_that_did_not_converge_says_so_in_its_name():
    matrix = torch.diag(torch.linspace(1, 2, 40, dtype=torch.float64))
    names = along(lanczos(MatrixOperator(matrix), 2, max_products=4), 2).names
    assert all(name.endswith(" (not converged)") for name in names)
    assert along(lanczos(MatrixOperator(matrix), 1), 1).names == ("λ = 2",)


def test_a_file_of_something_else_is_said_with_the_remedy(tmp_path):
    (tmp_path / "directions.pt").write_text("not ours")
    with pytest.raises(CheckpointError, match="cannot be read; remove it"):
        Directions.load(tmp_path / "directions.pt", "mine")


def planted(off: float = 0.0) -> torch.Tensor:
    """A spiral into the origin in a random plane of 30 dimensions, and a bump out of it."""
    basis = torch.linalg.qr(torch.randn(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0].T
    angle = torch.linspace(0, 4, 9, dtype=torch.float64)
    radius = torch.linspace(3, 0, 9, dtype=torch.float64)
    bump = off * torch.eye(9, dtype=torch.float64)[4]
    return torch.stack([radius * angle.cos(), 0.5 * radius * angle.sin(), bump], dim=1) @ basis


def test_a_trajectory_in_a_plane_is_found_whole():
    points = planted()
    plane = trajectory_plane(points)
    assert sum(plane.directions.values) == pytest.approx(1.0)
    assert plane.off_plane.max() < 1e-6
    torch.testing.assert_close(plane.directions.vectors @ plane.directions.vectors.T, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(plane.coordinates @ plane.directions.vectors, points, atol=1e-9, rtol=0)


def test_what_leaves_the_plane_is_counted_as_off_it():
    points = planted(off=0.1)
    plane = trajectory_plane(points)
    rest = points - plane.coordinates @ plane.directions.vectors
    torch.testing.assert_close(plane.off_plane, rest.norm(dim=1), atol=1e-9, rtol=1e-6)
    explained = 1 - float(rest.square().sum() / points.square().sum())
    assert sum(plane.directions.values) == pytest.approx(explained)


@pytest.mark.parametrize("points", [torch.randn(2, 5), torch.arange(4.0)[:, None] * torch.ones(5)])
def test_a_line_has_no_plane(points):
    with pytest.raises(ConfigError, match="at least 3 checkpoints"):
        trajectory_plane(points)


def test_displacements_are_from_the_last_in_the_subsets_order():
    subset = ParameterSubset(("b", "a"), (torch.Size([2]), torch.Size([1])))
    weights = [{"a": torch.tensor([float(i)]), "b": torch.tensor([10.0 * i, 0.0])} for i in range(3)]
    assert displacements_of(weights, subset).tolist() == [[-20, 0, -2], [-10, 0, -1], [0, 0, 0]]


def test_saved_directions_belong_to_one_identity(tmp_path):
    found = Directions(("a",), torch.randn(1, 3), "any", (2.0,))
    path = tmp_path / "directions.pt"
    found.save(path, "mine")
    assert Directions.load(path, "other") is None
    assert Directions.load(tmp_path / "none.pt", "mine") is None
    loaded = Directions.load(path, "mine")
    assert torch.equal(loaded.vectors, found.vectors)
    assert (loaded.names, loaded.method, loaded.values) == (found.names, found.method, found.values)
