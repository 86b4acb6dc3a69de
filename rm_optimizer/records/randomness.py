"""Saving and restoring of the state of the random generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

log = logging.getLogger("rm_optimizer")


def random_state() -> dict[str, Any]:
    """Return the state of every generator, as values that `torch.load(weights_only=True)` reads."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 (that libraries use)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "accelerator": [] if (module := _generators()) is None else module.get_rng_state_all(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set every generator to a state that `random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    module, states = _generators(), state["accelerator"] if "accelerator" in state else state["cuda"]
    count = 0 if module is None else module.device_count()
    if module is not None and len(states) == count:
        module.set_rng_state_all(states)
    elif states:
        log.warning(
            "the saved state has %d random generators of accelerators and this process %d, so they keep their own",
            len(states),
            count,
        )


def _generators() -> Any | None:
    """Torch's module of the accelerator that this process uses, with its generators; None without one."""
    kind = torch.accelerator.current_accelerator()
    module: Any = None if kind is None else torch.get_device_module(kind)
    return module if hasattr(module, "get_rng_state_all") and module.is_initialized() else None


@contextmanager
def keeping_random_state(*, seed: int | None = None) -> Iterator[None]:
    """Restore the state of every generator when the block ends.

    Args:
        seed: seed of PyTorch's generators at the start of the block; None does not set them.
    """
    state = random_state()
    try:
        if seed is not None:
            torch.manual_seed(seed)
        yield
    finally:
        set_random_state(state)
