"""Fixed conversations for a reward model: their tokens, their rewards with any padding, and changes of rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.classifier.quantization import computing_dtype
from rm_optimizer.core.classifier.scoring import in_mode
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.certificate import DEFAULT_PROBE
from rm_optimizer.core.tokens.padding import pad_sequences
from rm_optimizer.records.randomness import keeping_random_state

CHANGE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Largest change of a reward that counts as rounding, in standard deviations of the probe's rewards.

The unit is the spread of the rewards, since a fresh head gives small ones. In float64 some model families still
compute rotary angles and norms in float32. Half types round hidden states to 11 and 8 bits, and some kernels to fewer.
"""
UNIT = "standard deviations of reward"
"""Unit of `change_of`."""


def change_tolerance(model: BradleyTerryRM) -> float:
    """The entry of `CHANGE_TOLERANCE` for the type in which the model computes."""
    return CHANGE_TOLERANCE[computing_dtype(model.model)]


@contextmanager
def running(model: BradleyTerryRM, *, training: bool) -> Iterator[None]:
    """Context in training or evaluation mode without gradients; its end restores the mode and the random state."""
    with in_mode(model, training=training), keeping_random_state(), torch.no_grad():
        yield


def padded_rewards(
    model: BradleyTerryRM, rows: Sequence[Sequence[int]], *, extra: int = 0
) -> Float[Tensor, " sequences"]:
    """Rewards of the rows in one batch, with `extra` columns of padding on the right, or on the left if negative."""
    ids, mask = pad_sequences(rows, model.pad_choice.token_id)
    if extra < 0:
        order = torch.argsort(mask, dim=1, stable=True)
        ids, mask = ids.gather(1, order), mask.gather(1, order)
    sides = (max(0, -extra), max(0, extra))
    ids = torch.nn.functional.pad(ids, sides, value=model.pad_choice.token_id)
    rewards: Tensor = model(ids.to(model.device), torch.nn.functional.pad(mask, sides).to(model.device))
    return rewards.double().cpu()


def alone_rewards(model: BradleyTerryRM, rows: Sequence[Sequence[int]]) -> Float[Tensor, " sequences"]:
    """Rewards of the rows, each alone in its batch."""
    return torch.cat([padded_rewards(model, [row]) for row in rows])


def change_of(reference: Float[Tensor, " sequences"], other: Float[Tensor, " sequences"]) -> float:
    """Largest difference of two sets of rewards, in the unit of `in_spreads` of the first set."""
    return in_spreads(float((reference - other).abs().max()), reference)


def in_spreads(difference: float, reference: Float[Tensor, " sequences"]) -> float:
    """A difference in units of the rewards' spread, or of a thousandth of their largest size if that is larger."""
    scale = max(float(reference.std(correction=0)), 1e-3 * float(reference.abs().max()))
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 else torch.inf


def probe_ids(model: BradleyTerryRM) -> list[tuple[int, ...]]:
    """Token ids of the fixed probe conversations, as the model reads them."""
    return model.renderer.ids_of(DEFAULT_PROBE)
