"""The weights that a loss depends on: embeddings of tokens that occur in no pair have no curvature, and need no memory.

They are half of MiniLM's parameters and a quarter of a model of 0.5B, and Lanczos keeps tens of vectors of them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from rm_optimizer.landscape.objective import PairObjective
from rm_optimizer.landscape.operators import SymmetricOperator
from rm_optimizer.landscape.parameters import ParameterSubset


class Support:
    """Rows of parameters that are left of the long vector.

    Args:
        subset: the parameters.
        rows: rows that are left of a parameter, by its position; all others are whole.
    """

    def __init__(self, subset: ParameterSubset, rows: Mapping[int, Int[Tensor, " rows"]]) -> None:
        self._subset = subset
        self._rows = dict(rows)
        sizes = [(len(rows[i]), *shape[1:]) if i in rows else tuple(shape) for i, shape in enumerate(subset.shapes)]
        self._narrow = ParameterSubset(subset.names, tuple(map(torch.Size, sizes)))
        self.dimension = self._narrow.num_parameters

    def narrow(self, vectors: Float[Tensor, "vectors parameters"]) -> Float[Tensor, "vectors dimension"]:
        """The entries that are left."""
        found = vectors.new_empty(len(vectors), self.dimension)
        for index, (left, whole) in enumerate(self._parts(found, vectors)):
            left.copy_(whole[:, self._rows[index]] if index in self._rows else whole)
        return found

    def widen(self, vectors: Float[Tensor, "vectors dimension"]) -> Float[Tensor, "vectors parameters"]:
        """Vectors over all parameters, with zeros where nothing is left."""
        found = vectors.new_zeros(len(vectors), self._subset.num_parameters)
        for index, (left, whole) in enumerate(self._parts(vectors, found)):
            if index in self._rows:
                whole[:, self._rows[index]] = left
            else:
                whole.copy_(left)
        return found

    def _parts(self, narrow: Tensor, wide: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._narrow.unflatten(narrow), self._subset.unflatten(wide), strict=True))


def support_of(objective: PairObjective, num_more: int) -> Support:
    """The rows of embeddings that the pairs look up, some more, and all other parameters.

    Rows and columns of the others are zero in the Hessian, Gauss-Newton matrix and Fisher. Each gives an eigenvalue 0:
    with as many of them left as eigenvalues are wanted, those are the same.

    Args:
        objective: the loss, computed once.
        num_more: rows of each embedding that no pair looks up and that are left all the same.
    """
    tables = {id(module.weight) for module in objective.model.modules() if isinstance(module, nn.Embedding)}
    positions = [index for index, parameter in enumerate(objective.parameters) if id(parameter) in tables]
    if not positions:
        return Support(objective.subset, {})
    with _Lookups([objective.parameters[index] for index in positions]) as lookups:
        objective.value()
    rows = {}
    for index, used in zip(positions, lookups.used(), strict=True):
        used = objective.summed(used.to(objective.device, objective.dtype)) > 0
        used[(~used).nonzero()[:num_more, 0]] = True
        if not bool(used.all()):
            rows[index] = used.nonzero()[:, 0]
    return Support(objective.subset, rows)


class SupportedOperator:
    """A matrix without rows and columns of zeros.

    Args:
        operator: the matrix.
        support: what is left of it.
    """

    def __init__(self, operator: SymmetricOperator, support: Support) -> None:
        self._operator = operator
        self._support = support
        self.dimension = support.dimension
        self.dtype = operator.dtype
        self.device = operator.device

    def apply(self, vectors: Float[Tensor, "vectors dimension"]) -> Float[Tensor, "vectors dimension"]:
        """The matrix times each row."""
        return self._support.narrow(self._operator.apply(self._support.widen(vectors)))


class _Lookups(TorchFunctionMode):
    """Watches which rows of tables are looked up; a table that is put to any other use is used whole."""

    def __init__(self, tables: Sequence[Tensor]) -> None:
        super().__init__()
        self._tables = tables
        self._used: dict[int, Bool[Tensor, " rows"]] = {}

    def used(self) -> list[Bool[Tensor, " rows"]]:
        """Which rows of each table; all of one that was never seen."""
        return [self._used.get(id(table), torch.ones(len(table), dtype=torch.bool)) for table in self._tables]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the signature is PyTorch's
        result = func(*args, **(kwargs or {}))
        given = {id(value): value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for table in self._tables:
            if id(table) not in given:
                continue
            rows = self._used.setdefault(id(table), torch.zeros(len(table), dtype=torch.bool, device=table.device))
            if func is embedding and len(args) > 1 and args[1] is table:
                rows[args[0]] = True
            elif any(isinstance(value, Tensor) for value in tree_leaves(result)):
                rows[:] = True
        return result
