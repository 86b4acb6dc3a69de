"""Compilation of a model's backbone in place, without an effect on other parts of a run."""

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
    """Compile the backbone in place, for all sizes; names of parameters and exports do not change.

    The layers between embedding and head become fused kernels at the first pass of each kind (training or evaluation,
    shared prompts or padding, one row or several). A new size needs no new kernel, since numbers of rows and tokens are
    symbolic. Rewards and gradients change by rounding, since fused kernels round in another order. The head and the
    pooling are not compiled. Reference: Ansel et al., 2024, https://doi.org/10.1145/3620665.3640366.

    Args:
        model: the model, after its adapter was added.
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
