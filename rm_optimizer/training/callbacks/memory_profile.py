"""Cost of each optimizer step: memory, seconds and tokens, and the utilization of the device."""

from __future__ import annotations

import json
import logging
import resource
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rm_optimizer.core.classifier.attention import drops_padding
from rm_optimizer.core.classifier.pooling import pools_last_token
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import AnyPairBatch, MacroBatch, PackedPairBatch
from rm_optimizer.records.accelerator import memory_module, synchronize
from rm_optimizer.records.files import write_text, writing
from rm_optimizer.training.lightning_module import RunModule

log = logging.getLogger("rm_optimizer")

PROFILE_FILE = "profile.json"
"""File in the run folder with the medians over the steps."""
PROFILE_ROWS = "profile.csv"
"""File in the run folder with one row a step, apart from `metrics.csv`, which holds no times."""

GPU_MEMORY = ("memory_allocated_peak_bytes", "memory_reserved_peak_bytes")
CPU_MEMORY = ("rss_bytes", "rss_peak_bytes")
RATES = ("tokens_per_second", "real_tokens_per_second", "unique_tokens_per_second", "pairs_per_second")
PROFILE_COLUMNS = {
    f"perf/{name}": name for name in ("step_seconds", *GPU_MEMORY, *CPU_MEMORY, *RATES, "padding_share", "mfu")
}
"""Columns of `profile.csv` by metric name."""


class MemoryProfile(pl.Callback):
    """Callback that logs memory, token rates, padding and MFU of every optimizer step of this process.

    The time of a step begins when its tokens are on the device and ends after the optimizer's update. Data loading,
    evaluation and checkpoints are not included. On a GPU, memory is the allocator's peak over the step. Elsewhere it is
    the process's resident memory at the end of the step, and the kernel's peak within it. MFU needs a chip with a
    known bfloat16 peak and a run in bfloat16. It counts one forward and backward pass a step.

    It comes before `Evaluation` among the callbacks, so that a step's memory does not include an evaluation's.

    Args:
        run_dir: the run folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.steps: list[dict[str, float]] = []
        self._flops: ModelFlops | None = None
        self._peak_flops: float | None = None
        self._started = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look up the chip's peak."""
        assert isinstance(pl_module, RunModule)
        module = memory_module(pl_module.device)
        if module is not None:
            half = "bf16" in str(trainer.precision)
            self._peak_flops = peak_bf16_flops(module.get_device_name(pl_module.device)) if half else None
            self._flops = ModelFlops.of_model(pl_module.model)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Reset the peak and start the clock."""
        synchronize(pl_module.device)
        module = memory_module(pl_module.device)
        restart_rss_peak() if module is None else module.reset_peak_memory_stats(pl_module.device)
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: MacroBatch, batch_idx: int
    ) -> None:
        """Stop the clock and log the step."""
        assert isinstance(pl_module, RunModule)
        device = pl_module.device
        synchronize(device)
        seconds = time.perf_counter() - self._started
        module = memory_module(device)
        if module is not None:
            names, peaks = GPU_MEMORY, (module.max_memory_allocated(device), module.max_memory_reserved(device))
        else:
            names, peaks = CPU_MEMORY, rss_bytes()
        values = {"step_seconds": seconds} | dict(zip(names, peaks, strict=True))
        values |= step_rates(batch, seconds, pl_module.model.model)
        if self._flops is not None and self._peak_flops is not None:
            values["mfu"] = sum(map(self._flops.of_batch, batch.micro)) / seconds / self._peak_flops
        self.steps.append(values)
        for logger in trainer.loggers:
            logger.log_metrics({f"perf/{name}": value for name, value in values.items()}, step=trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the medians, and log them in one line."""
        if not (trainer.is_global_zero and self.steps):
            return
        device, path = pl_module.device, self.run_dir / PROFILE_FILE
        module = memory_module(device)
        median = {name: statistics.median(step[name] for step in self.steps) for name in self.steps[0]}
        summary = {
            "device": device.type if module is None else module.get_device_name(device),
            "memory": rss_source() if module is None else "peak of the device's allocator over each step",
            "peak_bf16_flops": self._peak_flops,
            "num_steps": len(self.steps),
            "median": median,
        }
        with writing(path):
            write_text(path, json.dumps(summary, indent=2) + "\n")
        memory = CPU_MEMORY[1] if module is None else GPU_MEMORY[0]
        log.info(
            "profile: %s tokens/s moved, %s unique; padding %s; %s %s MiB%s (medians of %d steps, in %s)",
            f"{median['tokens_per_second']:,.0f}",
            f"{median['unique_tokens_per_second']:,.0f}",
            f"{median['padding_share']:.1%}",
            memory,
            f"{median[memory] / 2**20:,.0f}",
            f", MFU {median['mfu']:.1%}" if "mfu" in median else "",
            len(self.steps),
            path,
        )


def step_rates(batch: MacroBatch, seconds: float, model: PreTrainedModel) -> dict[str, float]:
    """Tokens and pairs a second of one step on this process's share of its pairs, and the share of padding.

    `tokens` counts computed tokens with padding. `real_tokens` counts both sequences of every pair. `unique_tokens`
    counts the common start of a pair's two sequences once. With shared prompts, `tokens` is less than `real_tokens`.

    Args:
        batch: the step's micro-batches.
        seconds: duration of the step.
        model: the classifier that is trained.
    """
    needed = sum(map(computed_tokens, batch.micro))
    moved = sum(moved_tokens(micro, model) for micro in batch.micro)
    counts = {
        "tokens_per_second": moved,
        "real_tokens_per_second": sum(micro.num_tokens for micro in batch.micro),
        "unique_tokens_per_second": sum(micro.num_unique_tokens for micro in batch.micro),
        "pairs_per_second": sum(micro.num_pairs for micro in batch.micro),
    }
    padding = 1 - needed / moved if moved else 0.0
    return {name: count / seconds for name, count in counts.items()} | {"padding_share": padding}


PEAK_BF16_FLOPS: Mapping[str, float] = MappingProxyType(
    {
        "B200": 2.25e15,  # NVIDIA DGX B200 datasheet (36 PFLOP/s of bf16 with sparsity over 8 GPUs)
        "H200 NVL": 835.5e12,  # NVIDIA H200 datasheet
        "H200": 989.5e12,  # NVIDIA H200 datasheet, SXM
        "H100 NVL": 835.5e12,  # NVIDIA H100 datasheet
        "H100 PCIe": 756e12,  # NVIDIA H100 datasheet of 2022
        "H100": 989.5e12,  # NVIDIA H100 datasheet, SXM
        "A100": 312e12,  # NVIDIA A100 datasheet, PCIe and SXM alike
        "A10": 125e12,  # NVIDIA A10 datasheet
        "L40S": 362e12,  # NVIDIA L40S datasheet
        "L4": 121e12,  # NVIDIA L4 datasheet
        "RTX 4090": 165.2e12,  # NVIDIA Ada architecture whitepaper, float32 accumulation
        "RTX 3090": 71e12,  # NVIDIA GA102 architecture whitepaper, float32 accumulation
    }
)
"""Dense bfloat16 peak in FLOP/s by words of the device's name; some datasheets print twice that, for sparsity."""
OTHER_CHIPS = {"MIG", "Laptop", "Ti", "D"}
"""Words of the name of a device that is only a part or a variant of a chip in the table."""


def peak_bf16_flops(device_name: str) -> float | None:
    """Dense bfloat16 peak of a chip in FLOP/s, or None if it is not in the table.

    Example:
        >>> peak_bf16_flops("NVIDIA H100 80GB HBM3"), peak_bf16_flops("NVIDIA A100-SXM4-40GB"), peak_bf16_flops("TPU")
        (989500000000000.0, 312000000000000.0, None)
    """
    words = set(device_name.replace("-", " ").split())
    known = sorted(PEAK_BF16_FLOPS, key=len, reverse=True)
    names = [name for name in known if words.issuperset(name.split())]
    return PEAK_BF16_FLOPS[names[0]] if names and words.isdisjoint(OTHER_CHIPS) else None


@dataclass(frozen=True)
class ModelFlops:
    """Operations of one training step on a batch, without recomputation and padding.

    ``tokens (2 N + 2 N_back + 2 N_trained) + keys 4 L d (1 + 2 N_back / N)``. For each token, each weight of a matrix
    is multiplied and added once in the forward pass, once for the gradient of its input and once for its own gradient.
    Each key that a query attends to takes 4 d operations in each of L layers, and twice that backwards. If everything
    is trained, this is the 6 N and the attention term of Chowdhery et al., 2022 (PaLM, arXiv 2204.02311, appendix B).
    There are two deviations: embeddings are looked up, not multiplied, and a causal query counts only the keys it
    attends to.

    Args:
        forward: N, weights in matrices, embeddings left out.
        backward: N_back, weights among them after the first trainable parameter; before it no gradient is computed.
        trained: N_trained, trainable weights among them.
        attention: L d, layers times the width of the queries.
        is_causal: True if a token attends only to those before it.
    """

    forward: int
    backward: int
    trained: int
    attention: int
    is_causal: bool

    @classmethod
    def of_model(cls, model: BradleyTerryRM) -> ModelFlops | None:
        """The counts of a model, or None if the formula does not hold: experts, sliding windows, recurrence."""
        config = model.model.config.get_text_config()
        if not _is_plain_transformer(config, model.renderer.max_length):
            return None
        forward = backward = trained = 0
        for count, trains in _matrices(model.model):
            forward += count
            trained += count if trains else 0
            backward += count if trained else 0
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention = config.num_hidden_layers * config.num_attention_heads * width
        is_causal = any(getattr(module, "is_causal", False) is True for module in model.model.modules())
        return cls(forward, backward, trained, attention, is_causal)

    def of_batch(self, batch: AnyPairBatch) -> float:
        """Operations of one forward and backward pass over a micro-batch, padding left out."""
        return self.of_tokens(computed_tokens(batch), _attended_keys(batch, self.is_causal))

    def of_tokens(self, tokens: int, keys: int) -> float:
        """Operations of one forward and backward pass over tokens, whose queries attend to so many keys in all."""
        per_token = 2 * (self.forward + self.backward + self.trained)
        per_key = 4 * self.attention * (1 + self.backward / max(self.forward, 1) * 2)
        return per_token * tokens + per_key * keys


def computed_tokens(batch: AnyPairBatch) -> int:
    """Tokens that a pass over the batch computes, without padding: a shared prompt once if the batch shares it."""
    return batch.num_unique_tokens if isinstance(batch, PackedPairBatch) else batch.num_tokens


def moved_tokens(batch: AnyPairBatch, model: PreTrainedModel) -> int:
    """Tokens that a training pass over the batch computes, with padding where the model computes it.

    Without padding, an encoder computes any batch, and a decoder trees of shared prompts.
    """
    is_unpadded = drops_padding(model) and (isinstance(batch, PackedPairBatch) or not pools_last_token(model))
    return computed_tokens(batch) if is_unpadded else batch.num_padded_tokens


def _is_plain_transformer(config: Any, max_length: int) -> bool:
    """True if every token uses every weight and attends to every token (before it)."""
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    if any(getattr(config, name, None) for name in experts) or not getattr(config, "num_attention_heads", None):
        return False
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return False
    window = getattr(config, "sliding_window", None) or getattr(config, "local_attention", None)
    return not window or window >= max_length or (bool(kinds) and "sliding_attention" not in kinds)


def _matrices(model: nn.Module) -> list[tuple[int, bool]]:
    """Weights of each matrix and whether it trains, in the order of the forward pass; those in four bits whole."""
    found = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            if isinstance(module, nn.Linear) and parameter is module.weight:
                found.append((module.in_features * module.out_features, parameter.requires_grad))
            elif parameter.dim() >= 2:
                found.append((parameter.numel(), parameter.requires_grad))
    return found


def _attended_keys(batch: AnyPairBatch, is_causal: bool) -> int:
    """Pairs of a query and a key that it attends to, over the computed tokens of the batch."""
    if not isinstance(batch, PackedPairBatch):
        lengths = batch.attention_mask.sum(dim=1)
        return int(_triangle(lengths).sum()) if is_causal else int((lengths * lengths).sum())
    last = batch.trees.last
    lengths = batch.trees.position_ids.flatten()[last] + 1
    shared = lengths[1::2] - (last[1::2] - last[0::2])
    return int(_triangle(lengths).sum() - _triangle(shared).sum())


def _triangle(lengths: Tensor) -> Tensor:
    return torch.div(lengths * (lengths + 1), 2, rounding_mode="floor")


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def restart_rss_peak() -> bool:
    """Let the kernel's peak of resident memory begin at the present value; False on a system that cannot."""
    try:
        _CLEAR.write_text("5", encoding="ascii")  # 5 resets the peak and nothing else (proc(5))
    except OSError:
        return False
    return True


def rss_source() -> str:
    """Source of the numbers on this system, in words."""
    if restart_rss_peak():
        return "highest resident set of the training process over each step, as the kernel counts it"
    return "highest resident set of the training process since its start (getrusage)"


def rss_bytes() -> tuple[int, int]:
    """Resident memory of this process and its peak; on a system without `/proc`, twice the peak since its start."""
    if _STATUS.exists():
        lines = dict(line.split(":") for line in _STATUS.read_text(encoding="ascii").splitlines())
        present, peak = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return present, peak
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (highest if sys.platform == "darwin" else highest * 1024,) * 2  # kilobytes but on macOS (getrusage(2))
