"""Support of a loss: the weights that it depends on. Embeddings of tokens that occur in no pair have no curvature.

Leaving them out saves memory, since Lanczos keeps tens of vectors of all parameters. Such embeddings are half of
MiniLM's parameters, and a quarter of a model of 0.5B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.landscape.operators.base import LossOperator, SymmetricOperator
from rm_optimizer.landscape.operators.objective import PairObjective
from rm_optimizer.landscape.operators.parameters import ParameterSubset

SPARE = 4096
"""Unused entries of each table that are kept, so that as many eigenvalues of 0 can be found."""


_DESCRIPTIONS = (
    *("__len__", "dim", "ndimension", "numel", "size", "stride"),
    *("__get__", "get_device", "is_complex", "is_contiguous", "is_floating_point"),
)


class Support:
    """Rows of parameters that remain in the long vector.

    Args:
        subset: the parameters.
        rows: remaining rows of a parameter, by its position; parameters without an entry are whole.
    """

    def __init__(self, subset: ParameterSubset, rows: Mapping[int, Int[Tensor, " rows"]]) -> None:
        self._subset = subset
        self._rows = dict(rows)
        sizes = [(len(rows[i]), *shape[1:]) if i in rows else tuple(shape) for i, shape in enumerate(subset.shapes)]
        self._narrow = ParameterSubset(subset.names, tuple(map(torch.Size, sizes)))
        self.dimension = self._narrow.num_parameters

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Shape of the remaining part of each parameter."""
        return self._narrow.shapes

    def columns(self, names: Collection[str]) -> list[tuple[int, int]]:
        """Positions of the remaining parts of some parameters, as ranges of the vector; adjacent ranges are merged."""
        ranges: list[tuple[int, int]] = []
        start = 0
        for name, shape in zip(self._narrow.names, self.shapes, strict=True):
            stop = start + shape.numel()
            if name in names:
                joined = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
                ranges.append((joined, stop))
            start = stop
        return ranges

    def part(self, index: int, tensor: Tensor) -> Tensor:
        """Remaining rows of a tensor in the shape of the parameter at that position."""
        return tensor[self._rows[index]] if index in self._rows else tensor

    @property
    def identity(self) -> str:
        """Digest of the remaining rows."""
        return digest([[index, rows.tolist()] for index, rows in sorted(self._rows.items())])

    def narrow(self, vectors: Float[Tensor, "vectors parameters"]) -> Float[Tensor, "vectors dimension"]:
        """The remaining entries; the vectors themselves if all remain."""
        if not self._rows:
            return vectors
        found = vectors.new_empty(len(vectors), self.dimension)
        for index, (left, whole) in enumerate(self._parts(found, vectors)):
            left.copy_(whole[:, self._rows[index]] if index in self._rows else whole)
        return found

    def widen(self, vectors: Float[Tensor, "vectors dimension"]) -> Float[Tensor, "vectors parameters"]:
        """Vectors over all parameters, with zeros for removed entries; the vectors themselves if none was removed."""
        if not self._rows:
            return vectors
        found = vectors.new_zeros(len(vectors), self._subset.num_parameters)
        for index, (left, whole) in enumerate(self._parts(vectors, found)):
            if index in self._rows:
                whole[:, self._rows[index]] = left
            else:
                whole.copy_(left)
        return found

    def _parts(self, narrow: Tensor, wide: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._narrow.unflatten(narrow), self._subset.unflatten(wide), strict=True))


def support_of(objective: PairObjective, num_spare: int = SPARE) -> Support:
    """Rows of embeddings that the pairs or padding look up, some spare ones, and all other parameters.

    All other rows and columns are zero in the Hessian, the Gauss-Newton matrix and the Fisher, and each gives an
    eigenvalue of 0. If at least as many of them remain as eigenvalues are wanted, the result does not change.

    Args:
        objective: the loss, computed once if there are embeddings.
        num_spare: unused entries of each table that remain, in whole rows.
    """
    modules = [module for module in objective.model.modules() if isinstance(module, nn.Embedding)]
    positions = {id(parameter): index for index, parameter in enumerate(objective.parameters)}
    tables = {positions[id(module.weight)]: module for module in modules if id(module.weight) in positions}
    if not tables:
        return Support(objective.subset, {})
    with _Lookups([module.weight for module in tables.values()]) as lookups:
        objective.value()
    rows = {}
    for index, module in tables.items():
        seen = lookups.used(module.weight) if objective.batches else torch.zeros(len(module.weight), dtype=torch.bool)
        used = objective.summed(seen.to(objective.device, objective.dtype)) > 0
        if module.padding_idx is not None:
            # also if these micro-batches have no padding, so that every division into them has the same support
            used[module.padding_idx] = True
        used[(~used).nonzero()[: math.ceil(num_spare / module.weight[0].numel()), 0]] = True
        if not bool(used.all()):
            rows[index] = used.nonzero()[:, 0]
    return Support(objective.subset, rows)


class _Lookups(TorchFunctionMode):
    """Mode that records which rows of tables are looked up; a table with any other use counts as used whole."""

    def __init__(self, tables: Sequence[Tensor]) -> None:
        super().__init__()
        self._tables = tables
        self._used: dict[int, Bool[Tensor, " rows"]] = {}

    def used(self, table: Tensor) -> Bool[Tensor, " rows"]:
        """Rows used of a table; all rows of a table without a recorded lookup."""
        return self._used.get(id(table), torch.ones(len(table), dtype=torch.bool))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the signature is PyTorch's
        result = func(*args, **(kwargs or {}))
        given = {id(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for table in self._tables:
            # a property such as type, device or shape reads no values
            is_description = func.__name__ in _DESCRIPTIONS and not isinstance(result, Tensor)
            if id(table) in given and not is_description:
                rows = self._used.setdefault(id(table), torch.zeros(len(table), dtype=torch.bool, device=table.device))
                rows[args[0] if func is embedding and args[1] is table else slice(None)] = True
        return result


class SupportedOperator(SymmetricOperator):
    """A matrix of a loss without rows and columns of zeros.

    Args:
        operator: the matrix.
        support: remaining rows; None takes the result of `support_of`.
    """

    def __init__(self, operator: LossOperator, support: Support | None = None) -> None:
        self._operator = operator
        self.support = support or support_of(operator.objective)
        super().__init__(self.support.dimension, operator.dtype, operator.device)

    def apply(self, vectors: Float[Tensor, "vectors dimension"]) -> Float[Tensor, "vectors dimension"]:
        """The matrix times each row."""
        return self.support.narrow(self._operator.apply(self.support.widen(vectors)))
