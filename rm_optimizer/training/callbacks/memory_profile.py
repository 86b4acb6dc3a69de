"""Cost of each optimizer step: memory, seconds and tokens, and the utilization of the device."""

from __future__ import annotations

import json
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from rm_optimizer.core.tokens.batching import MacroBatch
from rm_optimizer.records.files import write_text, writing
from rm_optimizer.training.callbacks.cost import (
    ModelFlops,
    computed_tokens,
    peak_bf16_flops,
    restart_rss_peak,
    rss_bytes,
    rss_source,
)
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
        if pl_module.device.type == "cuda":
            half = "bf16" in str(trainer.precision)
            self._peak_flops = peak_bf16_flops(torch.cuda.get_device_name(pl_module.device)) if half else None
            self._flops = ModelFlops.of_model(pl_module.model)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Reset the peak and start the clock."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        else:
            restart_rss_peak()
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: MacroBatch, batch_idx: int
    ) -> None:
        """Stop the clock and log the step."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        seconds = time.perf_counter() - self._started
        values = {"step_seconds": seconds} | self._memory(pl_module.device) | step_rates(batch, seconds)
        if self._flops is not None and self._peak_flops is not None:
            values["mfu"] = sum(map(self._flops.of_batch, batch.micro)) / seconds / self._peak_flops
        self.steps.append(values)
        for logger in trainer.loggers:
            logger.log_metrics({f"perf/{name}": value for name, value in values.items()}, step=trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the medians, and log them in one line."""
        if trainer.is_global_zero and self.steps:
            path = self.run_dir / PROFILE_FILE
            with writing(path):
                write_text(path, json.dumps(self._summary(pl_module.device), indent=2) + "\n")
            log.info("%s", _sentence(medians(self.steps), len(self.steps), path))

    def _memory(self, device: torch.device) -> dict[str, float]:
        if device.type != "cuda":
            return dict(zip(CPU_MEMORY, rss_bytes(), strict=True))
        peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return dict(zip(GPU_MEMORY, peaks, strict=True))

    def _summary(self, device: torch.device) -> dict[str, Any]:
        on_gpu = device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
            "memory": "peak of the CUDA allocator over each step" if on_gpu else rss_source(),
            "peak_bf16_flops": self._peak_flops,
            "num_steps": len(self.steps),
            "median": medians(self.steps),
        }


def step_rates(batch: MacroBatch, seconds: float) -> dict[str, float]:
    """Tokens and pairs a second of one step on this process's share of its pairs, and the share of padding.

    `tokens` counts computed tokens with padding. `real_tokens` counts both sequences of every pair. `unique_tokens`
    counts the common start of a pair's two sequences once. With shared prompts, `tokens` is less than `real_tokens`.

    Args:
        batch: the step's micro-batches.
        seconds: duration of the step.
    """
    moved = sum(micro.num_padded_tokens for micro in batch.micro)
    counts = {
        "tokens_per_second": moved,
        "real_tokens_per_second": sum(micro.num_tokens for micro in batch.micro),
        "unique_tokens_per_second": sum(micro.num_unique_tokens for micro in batch.micro),
        "pairs_per_second": sum(micro.num_pairs for micro in batch.micro),
    }
    padding = 1 - sum(map(computed_tokens, batch.micro)) / moved if moved else 0.0
    return {name: count / seconds for name, count in counts.items()} | {"padding_share": padding}


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Median of each measured number over the steps."""
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def _sentence(median: dict[str, float], num_steps: int, path: Path) -> str:
    memory = next(name for name in (GPU_MEMORY[0], CPU_MEMORY[1]) if name in median)
    mfu = f", MFU {median['mfu']:.1%}" if "mfu" in median else ""
    return (
        f"profile: {median['tokens_per_second']:,.0f} tokens/s moved, "
        f"{median['unique_tokens_per_second']:,.0f} unique; "
        f"padding {median['padding_share']:.1%}; {memory} {median[memory] / 2**20:,.0f} MiB{mfu} "
        f"(medians of {num_steps} steps, in {path})"
    )
