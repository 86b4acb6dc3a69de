"""FSDP2: each rank keeps a shard of every weight, gradient and optimizer state; results and files equal one device's.

Layers are gathered when they compute, so all ranks must make the same number of passes in the same order. A rank with
fewer micro-batches than another computes one of weight zero instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from rm_optimizer.core.classifier.quantization import is_quantized
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import PairBatch
from rm_optimizer.core.tokens.padding import pad_sequences
from rm_optimizer.errors import ConfigError

BatchT = TypeVar("BatchT")


def shard_model(model: BradleyTerryRM, mesh: DeviceMesh) -> None:
    """Split a model's weights over the ranks of a mesh, in place: each transformer block alone, then the rest.

    The rest (embeddings, last norm, reward head) is gathered anew for the backward pass, like the blocks, so that no
    gathered copy outlives a forward pass and goes stale. Weights are gathered in their own float32: under bf16-mixed,
    autocast computes as it does with every other strategy, and the reward head stays float32. Autocast must not cache
    its casts (Lightning's does not), for a cached cast leads later gradients past FSDP2.

    Raises:
        ConfigError: for matrices in four bits, which FSDP2 cannot split by rows.
    """
    # FSDP2 warns of rewards being views, which nothing here writes into.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view", category=UserWarning)
    if is_quantized(model.model):
        raise ConfigError("hardware=fsdp cannot split matrices in four bits; use hardware=ddp with adapter=qlora")
    for block in transformer_blocks(model.model):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    register_fsdp_forward_method(model, "rewards_of")


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists of modules, which are the transformer blocks of every architecture."""
    found: list[nn.Module] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists.append(name)
            found += [child for child in module if any(True for _ in child.parameters())]
    return found


def is_sharded(model: nn.Module) -> bool:
    """True if `shard_model` split the model."""
    return isinstance(model, FSDPModule)


@contextmanager
def unreduced_gradients(model: nn.Module) -> Iterator[None]:
    """Backward passes that keep whole gradients on this rank, to be reduced by the first pass outside."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def whole(value: Tensor) -> Tensor:
    """A tensor gathered from its shards, for which every rank must take part; a plain tensor is returned unchanged."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a whole tensor with a parameter's shape; anything else, such as a counter, is unchanged."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or value.shape != parameter.shape:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def load_whole_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy whole tensors, the same on every rank, into a sharded model; others stay as they are.

    Raises:
        KeyError: if the model has no such weight.
    """
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights.items():
            state[name].copy_(shard_like(tensor, state[name]))


def most_over_ranks(count: int, device: torch.device) -> int:
    """The largest of the ranks' counts."""
    counts = torch.tensor(count, device=device)
    distributed.all_reduce(counts, op=distributed.ReduceOp.MAX)
    return int(counts)


def in_step(batches: Iterable[BatchT], spare: BatchT, count: int) -> Iterator[tuple[BatchT, bool]]:
    """The batches, each with True, then `spare` with False until there were `count`.

    Example:
        >>> list(in_step("ab", "z", 3))
        [('a', True), ('b', True), ('z', False)]
    """
    done = 0
    for batch in batches:
        yield batch, True
        done += 1
    for _ in range(done, count):
        yield spare, False


def spare_batch(model: BradleyTerryRM, device: torch.device) -> PairBatch:
    """One short pair of weight zero, for a rank that has nothing to compute in a pass."""
    ids = model.renderer.encode("a", "b").ids
    input_ids, attention_mask = pad_sequences([ids, ids], model.pad_choice.token_id)
    nothing = torch.zeros(1)
    batch = PairBatch(input_ids, attention_mask, nothing, nothing + 1, nothing, nothing.long(), torch.zeros(1, 2))
    return batch.to(device)
