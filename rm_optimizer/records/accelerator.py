"""Accelerators of this machine, by torch's interface for every kind of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed


def accelerators() -> list[torch.device]:
    """The accelerators of this process; empty without one.

    Apple's is left out, since it computes neither curvature nor certificates: it has no float64.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":
        return []
    return [torch.device(kind.type, place) for place in range(torch.accelerator.device_count())]


def fastest_device(number: int = 0) -> torch.device:
    """The accelerator with a number, counted around, or the processor without one.

    Args:
        number: number of a process, from 0, so that processes share the accelerators evenly.
    """
    found = accelerators() or [torch.device("cpu")]
    return found[number % len(found)]


def memory_module(device: torch.device) -> Any | None:
    """Torch's module of a device that counts its memory; None for a processor and Apple's GPU."""
    module = torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def synchronize(device: torch.device) -> None:
    """Wait until a device has computed all that was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def rank_in_group() -> tuple[int, int]:
    """Rank of this process, and number of processes of its group of `torch.distributed`; 0 and 1 without a group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
