"""Solvers to compare with: dense matrix, power iteration, and PyHessian.

PyHessian (Yao et al., 2020, arXiv:1912.07145) is an extra, and computes eigenvalues on the same loss and pairs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.errors import ConfigError, MissingExtra
from rm_optimizer.landscape.operators.base import DeflatedOperator, HessianOperator, SymmetricOperator
from rm_optimizer.landscape.operators.objective import PairObjective
from rm_optimizer.landscape.operators.vectors import RandomVectors, inner, length, pairwise_inner, unit
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs, num_wanted, rounding
from rm_optimizer.records.randomness import keeping_random_state

LARGEST = 20_000
"""Most rows of a dense matrix: 3.2 GB in float64."""
_ROWS_AT_ONCE = 32


def dense_matrix(operator: SymmetricOperator) -> Float[Tensor, "parameters parameters"]:
    """The matrix in float64, from one product for each row and symmetrized.

    Raises:
        ConfigError: if it has more than `LARGEST` rows.
    """
    size = operator.dimension
    if size > LARGEST:
        raise ConfigError(
            f"method=full writes out a matrix of {size} rows, more than {LARGEST}; "
            "use method=lanczos or name fewer params"
        )
    matrix = torch.empty(size, size, dtype=torch.float64, device=operator.device)
    for start in range(0, size, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, size)
        unit = torch.zeros(stop - start, size, dtype=operator.dtype, device=operator.device)
        unit[torch.arange(stop - start), torch.arange(start, stop)] = 1
        matrix[start:stop] = operator.apply(unit).double()
    return (matrix + matrix.T) / 2


def full_spectrum(operator: SymmetricOperator) -> Eigenpairs:
    """Compute all eigenpairs of the dense matrix; their only error is the rounding of products.

    Residuals are computed from the vectors, in the operator's type, with the dense matrix.
    """
    matrix = dense_matrix(operator)
    values, columns = torch.linalg.eigh(matrix)
    values, vectors = values.flip(0), columns.T.flip(0).to(operator.dtype)
    parts = zip(vectors.split(_ROWS_AT_ONCE), values.split(_ROWS_AT_ONCE), strict=True)
    residuals = torch.cat([(rows.double() @ matrix - some[:, None] * rows).norm(dim=1) for rows, some in parts]).cpu()
    values = values.cpu()
    bounds = torch.full_like(values, rounding(operator.dtype, values.numpy()))
    return Eigenpairs(values, vectors, residuals, bounds, (True,) * len(values), operator.dimension, 0.0)


def power_iteration(
    operator: SymmetricOperator, top_k: int, *, tolerance: float = 1e-3, max_products: int = 2000, seed: int = 0
) -> Eigenpairs:
    """Eigenpairs of largest magnitude, one after the other, by `v <- A v / ||A v||` with the found ones deflated.

    The iteration stops when `||A v - lambda v|| <= tolerance |lambda|`, without the component along found vectors. It
    does not stop because the value changed little: with two eigenvalues of similar magnitude and opposite sign, the
    value changes little long before it is right. At the end, the vectors are replaced by the Rayleigh-Ritz pairs of
    their space, without more products, since errors of found vectors remain in later ones. Residuals are computed
    from the whole product.

    Args:
        operator: the matrix.
        top_k: number of eigenpairs.
        tolerance: relative residual that ends each.
        max_products: most products in total, divided evenly among the values.
        seed: seed of the starting vectors.

    Raises:
        ConfigError: if more values are wanted than the matrix has.
    """
    num_wanted(operator.dimension, top_k, "magnitude")
    random = RandomVectors(operator, seed)
    vectors = torch.empty(0, operator.dimension, dtype=operator.dtype, device=operator.device)
    images, spent = vectors, 0
    for _ in range(top_k):
        rest = DeflatedOperator(operator, vectors)
        vector = unit(rest.project(random.normals(1))[0])[None]
        for _ in range(max(1, max_products // top_k)):
            image = operator.apply(vector)
            left = rest.project(image)
            spent += 1
            value, latest = inner(vector[0], left[0]), vector
            if _residual(vector[0], left[0], value) <= tolerance * abs(value) or not left.any():
                break
            vector = unit(left[0])[None]
        vectors, images = torch.cat([vectors, latest]), torch.cat([images, image])
    small = pairwise_inner(vectors, images).cpu()
    ascending, turn = torch.linalg.eigh((small + small.T) / 2)
    values, turn = ascending.flip(0), turn.T.flip(0).to(vectors)
    vectors, images = turn @ vectors, turn @ images
    each = zip(vectors, images, values.tolist(), strict=True)
    residuals = torch.tensor([_residual(*pair) for pair in each], dtype=torch.float64)
    return Eigenpairs.of_residuals(values, vectors, residuals, tolerance, spent)


def _residual(vector: Tensor, image: Tensor, value: float) -> float:
    return length(image - value * vector)


MAX_ITERATIONS = 100
"""Most products for each eigenvalue, PyHessian's own default."""


class PyHessianProblem:
    """Adapter to PyHessian's model, data and criterion: one batch whose gradient's graph is kept, or a data loader.

    PyHessian averages batches by their size. Each micro-batch has size 1 here, and its loss is its share of the loss
    times the number of micro-batches, so that the mean is the loss over pairs.

    Args:
        objective: the loss.
        keep_graph: True to pass all pairs as one batch, whose graph stays in memory.
    """

    def __init__(self, objective: PairObjective, *, keep_graph: bool = True) -> None:
        self.objective = objective
        whole, apart = [_Part(objective.batches)], [_Part([batch]) for batch in objective.batches]
        self.parts = whole if keep_graph else apart
        self._num_clearings = 0

    @property
    def num_products(self) -> int:
        """Number of products of `eigenvalues`, by counting the calls that clear gradients."""
        clearings = 1 if len(self.parts) == 1 else 1 + 2 * len(self.parts)
        return self._num_clearings // clearings

    def open(self) -> Any:
        """PyHessian's `hessian` object.

        Raises:
            MissingExtra: if PyHessian is not installed.
        """
        given = [(part, part) for part in self.parts]
        data: dict[str, Any] = {"data": given[0]} if len(given) == 1 else {"dataloader": given}
        try:
            library = import_module("pyhessian")
        except ModuleNotFoundError as error:
            if error.name != "pyhessian":
                raise
            raise MissingExtra("pyhessian", "pyhessian") from error
        on_gpu = self.objective.device.type == "cuda"
        return library.hessian(self, lambda loss, _: loss, cuda=on_gpu, **data)

    def eval(self) -> PyHessianProblem:
        """Do nothing, since the model's modes are already fixed."""
        return self

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters to derive by."""
        return iter(self.objective.parameters)

    def zero_grad(self) -> None:
        """Drop gradients, and with them the graphs that they hold."""
        self._num_clearings += 1
        self._forget()

    def _forget(self) -> None:
        for parameter in self.objective.parameters:
            parameter.grad = None

    def __call__(self, part: _Part) -> Tensor:
        """The loss on a part, as large as if it were the whole."""
        objective = self.objective
        shares = [objective.share(objective.model.rewards_of(batch), batch) for batch in part]
        return torch.stack(shares).sum() * len(self.parts)

    @contextmanager
    def undone(self, seed: int) -> Iterator[None]:
        """Undo the side effects of PyHessian at the end of the block: gradients, generators and default type.

        PyHessian leaves gradients, and draws from the global generator in the default type.
        """
        parameters = self.objective.parameters
        gradients, default = [parameter.grad for parameter in parameters], torch.get_default_dtype()
        self._forget()
        try:
            with keeping_random_state(seed=seed), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
                torch.set_default_dtype(self.objective.dtype)
                yield
        finally:
            torch.set_default_dtype(default)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


class _Part(list[AnyPairBatch]):
    """Micro-batches with the interface of PyHessian's tensor of inputs."""

    def to(self, device: str) -> _Part:
        return self

    def cuda(self) -> _Part:
        return self

    def size(self, dim: int) -> int:
        return 1


def pyhessian_eigenpairs(
    operator: HessianOperator, top_k: int, *, tolerance: float = 1e-3, seed: int = 0
) -> Eigenpairs:
    """Eigenvalues from PyHessian's power iteration, by descending value.

    PyHessian stops when an iteration changes the value by less than `tolerance`, which does not bound its error. The
    residuals, computed here with one more product each, do. Values and vectors come from PyHessian. A value is the
    Rayleigh quotient of the vector before its last product. Vectors are not orthogonal to each other, so trace and
    density are not deflated by them. PyHessian keeps the graph of all pairs if the operator does.

    Args:
        operator: the Hessian.
        top_k: number of eigenvalues, by magnitude.
        tolerance: relative change that ends an iteration, PyHessian's `tol`.
        seed: seed of its starting vectors.

    Raises:
        ConfigError: if more values are wanted than the matrix has, or the pairs lie in several processes.
        MissingExtra: if PyHessian is not installed.
    """
    num_wanted(operator.dimension, top_k, "magnitude")
    objective = operator.objective
    if objective.group is not None:
        raise ConfigError("method=pyhessian needs all pairs in one process; give it all of them and no group")
    problem = PyHessianProblem(objective, keep_graph=operator.product == "kept_graph")
    with problem.undone(seed):
        values, vectors = problem.open().eigenvalues(maxIter=MAX_ITERATIONS, tol=tolerance, top_n=top_k)
    operator.num_products += problem.num_products
    found = torch.tensor(values, dtype=torch.float64)
    order = found.argsort(descending=True)
    rows = torch.stack([objective.subset.flatten(vector) for vector in vectors]).detach()
    found, rows = found[order], rows[order.to(rows.device)]
    scaled = found.to(rows)[:, None] * rows
    residuals = ((operator.apply(rows) - scaled).double().norm(dim=1) / rows.double().norm(dim=1)).cpu()
    pairs = Eigenpairs.of_residuals(found, rows, residuals, tolerance, problem.num_products + len(found))
    return replace(pairs, is_orthonormal=False)
