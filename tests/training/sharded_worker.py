"""Two gloo processes that compare FSDP2's shards with one device; the first writes what it measured."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer

from rm_optimizer.core import BradleyTerryRM, PreferencePair
from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.model.sharding import in_step, shard_model, spare_batch, unreduced_gradients, whole
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.evaluation.pair_rewards import score_pairs
from rm_optimizer.optim import OPTIMIZERS, build_optimizer, set_train_mode
from rm_optimizer.optim.muon import ShardedMuon
from rm_optimizer.schema import TrainConfig, compose, typed
from tests.builders import tiny_reward_model

TEXTS = [
    ("one two", "three four"),
    ("What is the capital of France?", "Paris."),
    ("quick", "fox"),
    ("a", "egg boiling"),
]
SIGN = torch.tensor([1.0, -1.0, 1.0, -1.0])
SHARDABLE = tuple(
    name for name, info in OPTIMIZERS.items() if "fsdp2" not in info.refuses and name != "muon" and info.extra is None
)
"""Muon's bfloat16 magnifies rounding; `muon` below compares it on equal gradients."""


def measure(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    measured = {"muon": muon_difference(mesh), "evaluation": evaluation_difference(mesh)}
    measured |= {f"gradient of {name}": gradient_difference(mesh, rank, **case) for name, case in CASES.items()}
    measured |= {f"weights of {name}": weight_difference(mesh, rank, name) for name in SHARDABLE}
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps(measured))
    distributed.destroy_process_group()


CASES: dict[str, dict[str, Any]] = {
    "decoder": {"family": "llama"},
    "encoder": {"family": "bert"},
    "lora": {"family": "llama", "change": "adapter=lora_r8"},
    "checkpointing": {"family": "llama", "checkpointing": True},
    "bfloat16": {"family": "llama", "dtype": torch.float32, "autocast": True},
}


def reward_model(family: str, dtype: torch.dtype = torch.float64) -> BradleyTerryRM:
    return tiny_reward_model(family, max_length=64).to(dtype).eval()


def options(*overrides: str) -> TrainConfig:
    return typed(compose(["output_dir=unused", "schedule=constant", *overrides]), TrainConfig)


def relative(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Largest difference over the largest value, over all tensors."""
    assert left.keys() == right.keys()
    scale = max(float(value.abs().max()) for value in right.values())
    return max(float((left[name] - right[name]).abs().max()) for name in left) / scale


def gradient_difference(
    mesh: DeviceMesh,
    rank: int,
    *,
    family: str,
    dtype: torch.dtype = torch.float64,
    change: str | None = None,
    checkpointing: bool = False,
    autocast: bool = False,
) -> float:
    """The first rank has three of the pairs in two passes, the second one pair and a spare pass."""
    found = []
    for sharded in (False, True):
        model = reward_model(family, dtype)
        if change:
            add_adapter(model.model, options(change).adapter, seed=0)
        if checkpointing:
            model.train().model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if sharded:
            shard_model(model, mesh)
        share: list[list[int]] = ([[0, 1], [2]] if rank == 0 else [[3]]) if sharded else [[0, 1], [2], [3]]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            backward(model, share, sharded)
        found.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
    return relative(found[1], found[0])


def backward(model: BradleyTerryRM, share: list[list[int]], sharded: bool) -> None:
    ids, mask = model.tokenize(*zip(*TEXTS, strict=True)).values()
    passes: list[tuple[Any, bool]] = [(rows, True) for rows in share]
    if sharded:
        passes = list(in_step(share, spare_batch(model, torch.device("cpu")), 2))
    for number, (rows, is_ours) in enumerate(passes):
        rewards = model(ids[rows], mask[rows]) if is_ours else model.rewards_of(rows)
        assert rewards.dtype in (torch.float32, torch.float64)
        loss = nn.functional.softplus(-rewards * SIGN[rows]).sum() / 4 if is_ours else (rewards * 0).sum()
        if sharded and number == 0:
            with unreduced_gradients(model):
                (loss * 2).backward()
        else:
            (loss * (2 if sharded else 1)).backward()


def weight_difference(mesh: DeviceMesh, rank: int, name: str) -> float:
    """After three steps of an optimizer; float64, so that only the order of sums differs."""
    found = []
    config = options(f"optimizer={name}", "optimizer.lr=0.01").optimizer
    for sharded in (False, True):
        model = reward_model("llama")
        if sharded:
            shard_model(model, mesh)
        optimizer = build_optimizer(model, config, head_names=model.head_parameter_names(), num_steps=3)
        share = [[2 * rank], [2 * rank + 1]] if sharded else [[0, 1, 2, 3]]
        set_train_mode(optimizer, True)
        for _ in range(3):
            optimizer.step(closure_of(model, optimizer, share, sharded))
        set_train_mode(optimizer, False)
        found.append({n: whole(p.detach()) for n, p in model.named_parameters()})
    return relative(found[1], found[0])


def closure_of(
    model: BradleyTerryRM, optimizer: Optimizer, share: list[list[int]], sharded: bool
) -> Callable[[], float]:
    def closure() -> float:
        optimizer.zero_grad()
        backward(model, share, sharded)
        whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        return 0.0

    return closure


def muon_difference(mesh: DeviceMesh) -> float:
    """Three steps with the same gradients, of which some are of low rank; tall, wide and uneven matrices."""
    worst = 0.0
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((64, 32), (32, 64), (5, 48)):
        start = torch.randn(rows, columns, generator=generator)
        plain, shard = nn.Parameter(start.clone()), nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
        rules = (torch.optim.Muon([plain], lr=0.01), ShardedMuon([shard], lr=0.01))
        for rank in (3, 3, 5):
            gradient = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
            plain.grad, shard.grad = gradient.clone(), distribute_tensor(gradient, mesh, [Shard(0)])
            for rule in rules:
                rule.step()
        assert rules[1].state[shard]["momentum_buffer"].placements == (Shard(0),)
        worst = max(worst, float((whole(shard.detach()) - plain.detach()).abs().max()))
    return worst


def evaluation_difference(mesh: DeviceMesh) -> float:
    """Three pairs in three batches, then one pair that the second rank does not have, and training goes on after."""
    pairs = [PreferencePair(prompt=p, chosen=c, rejected=r) for p, c, r in [("a", "b", "egg"), ("one", "two", "x y")]]
    pairs.append(PreferencePair(prompt="What is it?", chosen="the quick fox", rejected="dog"))
    plain, shard = reward_model("llama"), copy.deepcopy(reward_model("llama"))
    shard_model(shard, mesh)
    worst = 0.0
    for some in (pairs, pairs[:1]):
        tokens = tokenize_pairs(some, plain.renderer, None)
        for sharing in (False, True):
            expected = on_one_device(plain, tokens, some, sharing)
            scored = score_pairs(shard, tokens, some, token_budget=1, prefix_sharing=sharing)  # type: ignore[arg-type]
            worst = max(worst, float(abs(torch.tensor(scored.margin) - expected).max()))
    backward(shard, [[0]], sharded=True)
    return worst


def on_one_device(model: BradleyTerryRM, tokens: Any, pairs: Any, sharing: bool) -> Tensor:
    from rm_optimizer.core.tokens.batching import evaluation_batches, pair_collator

    margins = torch.zeros(len(pairs), dtype=torch.float64)
    pad = model.renderer.pad_token_id
    collator = pair_collator(tokens, pairs, pad, prefix_sharing=sharing)
    for batch in evaluation_batches(collator, np.arange(len(tokens)), 1):
        with torch.inference_mode():
            rewards = model.eval().rewards_of(batch).view(-1, 2)
        margins[batch.pair_index] = (rewards[:, 0] - rewards[:, 1]).double()
    return margins


if __name__ == "__main__":
    measure(int(sys.argv[2]), sys.argv[1])
