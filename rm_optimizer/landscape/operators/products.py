"""Hessian-vector product methods, and the choice among them by measurements on the model."""

from __future__ import annotations

import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from typing import ClassVar, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.func import grad, jvp, vmap

from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.landscape.operators.objective import PairObjective
from rm_optimizer.records.accelerator import memory_module, synchronize

GRAPH_SHARE = 0.5
"""Largest share of the free memory that kept graphs may take."""
TRIAL_TOKENS = 1024
"""Least number of tokens of the micro-batch that the methods are tried on."""
Vectors: TypeAlias = Float[Tensor, "vectors parameters"]
_GradientGraph: TypeAlias = dict[int, GradientEdge]
"""Outputs of a gradient's graph, by position of the parameter; constant parts have no graph."""


class ProductMethod(ABC):
    """A method for Hessian-vector products of one loss."""

    name: ClassVar[str]

    def __init__(self, objective: PairObjective) -> None:
        self.objective = objective

    def __call__(self, vectors: Vectors) -> Vectors:
        """The products, in the order of the vectors."""
        return self.over(self.objective.batches, vectors)

    @abstractmethod
    def over(self, batches: Sequence[AnyPairBatch], vectors: Vectors) -> Vectors:
        """Share of some of the objective's micro-batches in the products."""

    def release(self) -> None:  # noqa: B027 - most hold nothing
        """Free memory; the next product builds its contents again."""


class ReverseOverReverse(ProductMethod):
    """Gradient of `g(θ) · v`, with the graph of the gradient `g` built in every call (Pearlmutter, 1994).

    One micro-batch's graph is in memory at a time. All vectors of a block share it.
    """

    name = "reverse"
    keeps_graphs: ClassVar[bool] = False

    def over(self, batches: Sequence[AnyPairBatch], vectors: Vectors) -> Vectors:
        """Share of some of the objective's micro-batches in the products."""
        subset, parameters = self.objective.subset, self.objective.parameters
        totals = torch.zeros_like(vectors, memory_format=torch.contiguous_format)
        rows = [
            (subset.unflatten(vector), subset.unflatten(total)) for vector, total in zip(vectors, totals, strict=True)
        ]
        for graph in filter(None, map(self.graph, batches)):
            for row, (parts, sums) in enumerate(rows):
                products = torch.autograd.grad(
                    list(graph.values()),
                    parameters,
                    [parts[index] for index in graph],
                    retain_graph=self.keeps_graphs or row + 1 < len(rows),
                    allow_unused=True,
                    materialize_grads=True,
                )
                torch._foreach_add_(sums, products)
                del products  # frees the memory that the next micro-batch needs
        return totals

    def graph(self, batch: AnyPairBatch) -> _GradientGraph:
        """Graph of the gradient of a micro-batch without its values, which products do not need."""
        gradient = self.objective.batch_gradient(batch, create_graph=True)
        return {index: get_gradient_edge(part) for index, part in enumerate(gradient) if part.requires_grad}


class KeptGraph(ReverseOverReverse):
    """Reverse-over-reverse with the graph of each micro-batch's gradient kept from its first product on."""

    name = "kept_graph"
    keeps_graphs = True

    def __init__(self, objective: PairObjective) -> None:
        super().__init__(objective)
        self._graphs: dict[int, _GradientGraph] = {}

    def graph(self, batch: AnyPairBatch) -> _GradientGraph:
        """The graph of the gradient of one of the objective's micro-batches."""
        # An id names one batch only while that batch lives: the objective holds its batches as long as it holds graphs.
        if id(batch) not in self._graphs:
            self._graphs[id(batch)] = super().graph(batch)
        return self._graphs[id(batch)]

    def release(self) -> None:
        """Free the graphs' memory; the next product builds them again."""
        self._graphs.clear()


class ForwardOverReverse(ProductMethod):
    """Directional derivative of the gradient, for several directions in one pass.

    Every operation of the backward pass needs a forward derivative, which some models lack.
    """

    name = "forward"

    def __init__(self, objective: PairObjective) -> None:
        super().__init__(objective)
        load_forward_rules()
        self._point = tuple(parameter.detach() for parameter in objective.parameters)

    def over(self, batches: Sequence[AnyPairBatch], vectors: Vectors) -> Vectors:
        """Share of some of the objective's micro-batches in the products."""
        objective, total = self.objective, torch.zeros_like(vectors)

        def product(batch: AnyPairBatch, vector: Tensor) -> Tensor:
            gradient = grad(lambda point: objective.share(objective.rewards_at(point, batch), batch))
            direction = tuple(objective.subset.unflatten(vector))
            derivative: tuple[Tensor, ...] = jvp(gradient, (self._point,), (direction,))[1]
            return objective.subset.flatten(derivative)

        for batch in batches:
            of_batch = partial(product, batch)
            total += of_batch(vectors[0])[None] if len(vectors) == 1 else vmap(of_batch)(vectors)
        return total


@cache
def load_forward_rules() -> None:
    """Load PyTorch's rules of forward derivatives; the first use warns of `torch.jit.script` (2.11 to 2.13)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import_module("torch._decomp.decompositions_for_jvp")


@dataclass(frozen=True)
class ProductChoice:
    """Chosen method and its measurements.

    Args:
        product: chosen method.
        gradients_per_product: cost of one product in gradients of the same pairs, for each method that was measured.
        graph_bytes: memory of the graphs of all micro-batches in bytes; 0 if not measured.
        reason: reason of the choice, in words.
    """

    product: ProductMethod
    gradients_per_product: dict[str, float] = field(default_factory=dict)
    graph_bytes: int = 0
    reason: str = "requested"


PRODUCT_METHODS: dict[str, type[ProductMethod]] = {
    method.name: method for method in (KeptGraph, ReverseOverReverse, ForwardOverReverse)
}


def choose_product(
    objective: PairObjective, name: str = "auto", *, graph_memory_bytes: int | None = None
) -> ProductChoice:
    """Choose a method by name; `auto` takes kept graphs if they fit, otherwise the cheaper of the other methods.

    Args:
        objective: the loss.
        name: name of a method, or `auto` to measure them on one micro-batch.
        graph_memory_bytes: most bytes for kept graphs; None takes half of the free memory.

    Raises:
        ConfigError: if the name is unknown, or the model cannot be differentiated twice by any method.
    """
    if name in PRODUCT_METHODS:
        return ProductChoice(PRODUCT_METHODS[name](objective))
    if name != "auto":
        raise ConfigError(did_you_mean("product", name, ("auto", *PRODUCT_METHODS)))
    if not objective.batches:
        return ProductChoice(ReverseOverReverse(objective), reason="this process holds no pairs")
    # the smallest micro-batch with `TRIAL_TOKENS`, so that tokens, not calls, determine the cost
    batches = sorted(objective.batches, key=lambda batch: batch.num_padded_tokens)
    trial = next((batch for batch in batches if batch.num_padded_tokens >= TRIAL_TOKENS), batches[-1])
    objective.batch_gradient(trial)
    gradient_seconds = _seconds(lambda: objective.batch_gradient(trial), objective.device)
    free = free_bytes(objective.device) * GRAPH_SHARE if graph_memory_bytes is None else graph_memory_bytes
    kept = KeptGraph(objective)
    needed = graph_bytes(kept, trial)
    fits = needed <= free
    failures: list[str] = []
    costs = _cost(kept, trial, gradient_seconds, failures) if fits else {}
    methods: list[ProductMethod] = [kept]
    if not costs:  # kept graphs need no comparison, since the other methods take half as many operations more
        kept.release()
        methods = [ReverseOverReverse(objective), ForwardOverReverse(objective)]
        for method in methods:
            costs |= _cost(method, trial, gradient_seconds, failures)
    if not costs:
        raise ConfigError(
            f"{type(objective.model.model).__name__} cannot be differentiated twice here ({failures[0]}); "
            "use method=gauss_newton_exact, which needs first derivatives alone, or fewer pairs if memory ran out"
        )
    best = min((method for method in methods if method.name in costs), key=lambda method: costs[method.name])
    note = "fit" if fits else "do not fit"
    tried = ", ".join(f"{method} {cost:.2g}" for method, cost in costs.items())
    reason = f"graphs of {needed / 1e9:.1f} GB {note} into memory; tried, in gradients a product: {tried}"
    return ProductChoice(best, costs, needed, reason)


def _cost(method: ProductMethod, trial: AnyPairBatch, gradient_seconds: float, failures: list[str]) -> dict[str, float]:
    """Cost of a product in gradients, by name of the method; on failure empty, with a line in `failures`."""
    objective = method.objective
    vector = torch.ones(1, objective.subset.num_parameters, dtype=objective.dtype, device=objective.device)
    try:
        method.over([trial], vector)
        return {method.name: _seconds(lambda: method.over([trial], vector), objective.device) / gradient_seconds}
    except RuntimeError as error:  # an operation without such a derivative, or too little memory
        failures.append(f"{method.name}: {error}".splitlines()[0])
        return {}


def _seconds(compute: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    compute()
    synchronize(device)
    return time.perf_counter() - start


def graph_bytes(kept: KeptGraph, trial: AnyPairBatch) -> int:
    """Memory of the graphs of all gradients, by the tensors that one of them saves, with a quarter to spare.

    Args:
        kept: method without a graph of the micro-batch.
        trial: the micro-batch whose graph is built here.
    """
    objective = kept.objective
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        # The tensor may be an output of the node that saves it; a reference to it would keep both in memory.
        return tensor.detach()

    with saved_tensors_hooks(note, lambda tensor: tensor):
        kept.graph(trial)
    weights = {parameter.untyped_storage().data_ptr() for parameter in objective.model.parameters()}
    saved = sum(size for address, size in sizes.items() if address not in weights)
    tokens = sum(batch.num_padded_tokens for batch in objective.batches)
    return int(1.25 * saved * tokens / trial.num_padded_tokens)


def free_bytes(device: torch.device) -> float:
    """Free memory of a device, or half of its memory if the system does not report what is free."""
    module = memory_module(device)
    if module is not None:
        return float(module.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:
            return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2
