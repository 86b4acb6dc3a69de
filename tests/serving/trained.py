"""Models that differ from the one that is served, as a step of training leaves them."""

from __future__ import annotations

import torch

from rm_optimizer.core.model.reward_model import BradleyTerryRM


def moved(model: BradleyTerryRM, seed: int, *, head_only: bool = False) -> BradleyTerryRM:
    """The model after a step of training, as it were."""
    generator = torch.Generator().manual_seed(seed)
    trained = model.reward_head.parameters() if head_only else (p for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model
