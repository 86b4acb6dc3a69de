"""Hidden states that the reward head reads: one vector for each token sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from rm_optimizer.core.classifier.quantization import dtype_name
from rm_optimizer.core.classifier.scoring import SequenceScorer
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.records.files import replacing


def features(
    model: BradleyTerryRM,
    sequences: Sequence[Sequence[int] | NDArray[np.int32]],
    *,
    token_budget: int = 16384,
    file: Path | None = None,
) -> Float[Tensor, "sequences hidden"]:
    """Vectors that enter the final linear layer, on the CPU, in the order of the sequences.

    ``reward = reward_head(vector)``. They are float32, or float64 where the head's weights are. Sequences are computed
    as in `BradleyTerryRM.score`: equal ones once, a common start once, others padded to like length.

    Args:
        model: the reward model, on its device; its training mode is restored.
        sequences: token ids, as `BradleyTerryRM.encode` gives them.
        token_budget: tokens, padding included, of one forward pass.
        file: `.npy` file to hold the vectors, replaced once all are known; the result then maps it into memory.
    """
    shape = (len(sequences), model.reward_head.in_features)
    dtype = np.dtype(dtype_name(model.reward_head.weight.dtype))
    if file is None:
        vectors = np.zeros(shape, dtype)
        scored_features(model, sequences, vectors, token_budget=token_budget)
        return torch.from_numpy(vectors)
    with replacing(file) as temporary:
        mapped = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        scored_features(model, sequences, mapped, token_budget=token_budget)
        mapped.flush()
    return torch.from_numpy(np.load(file, mmap_mode="c"))


def scored_features(
    model: BradleyTerryRM,
    sequences: Sequence[Sequence[int] | NDArray[np.int32]],
    vectors: Float[np.ndarray, "sequences hidden"],
    *,
    token_budget: int,
) -> Float[np.ndarray, " sequences"]:
    """Write the features of the sequences into `vectors`, row by row, and return the rewards of the same passes.

    Args:
        model: the reward model, on its device.
        sequences: token ids.
        vectors: array of shape (sequences, hidden).
        token_budget: tokens, padding included, of one forward pass.
    """
    read: list[Tensor] = []
    rewards = np.zeros(len(sequences))
    hook = model.reward_head.register_forward_pre_hook(lambda head, inputs: read.append(inputs[0]))
    try:
        with model.inference():
            for places, found in SequenceScorer(model, token_budget).passes(sequences):
                rows = read[-1].to("cpu", torch.float64).numpy()
                read.clear()
                for place, reward, row in zip(places, found.tolist(), rows, strict=True):
                    rewards[place], vectors[place] = reward, row
    finally:
        hook.remove()
    return rewards
