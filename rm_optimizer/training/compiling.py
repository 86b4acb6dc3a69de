"""Compiling a model's backbone where it stands, so that nothing else of a run notices."""

from __future__ import annotations

import logging
import os
import shutil

import torch

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import ConfigError

log = logging.getLogger("rm_optimizer")

COMPILERS = ("c++", "g++", "clang++", "cl")
"""C++ compilers that inductor looks for, for its CPU kernels and the launchers of its CUDA kernels."""


def compile_backbone(model: BradleyTerryRM, *, backend: str = "inductor") -> None:
    """Compile the backbone in place, for sizes of every kind; names of parameters and exports stay as they were.

    The layers between embedding and head become fused kernels at the first pass, once for each kind of pass (training
    or evaluation, shared prompts or padding, one row or several) and not for each size, since rows and tokens are
    symbols in them. Rewards and gradients change by rounding, which fused kernels do in another order; the head and the
    pooling are not compiled. `torch.compile` is PyTorch 2's (Ansel et al., 2024, https://doi.org/10.1145/3620665.3640366).

    Args:
        model: the model, its adapter in place.
        backend: `torch.compile`'s backend.

    Raises:
        ConfigError: if inductor has no C++ compiler to build its kernels with.
    """
    if backend == "inductor" and not any(map(shutil.which, (os.environ.get("CXX", COMPILERS[0]), *COMPILERS))):
        raise ConfigError(
            f"hardware.compile=true needs a C++ compiler, found none of {', '.join(COMPILERS)} on the PATH; "
            "install one, or set hardware.compile=false"
        )
    # DDP's splitting of graphs at its buckets refuses higher-order operators: checkpointed layers, FlexAttention.
    torch._dynamo.config.optimize_ddp = False
    model.model.base_model.compile(backend=backend, dynamic=True)
    log.info("the backbone is compiled at its first passes, which take longer")
