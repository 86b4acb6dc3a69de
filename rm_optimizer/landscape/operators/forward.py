"""Forward derivatives of a reward model: what PyTorch needs loaded for them, and the model as a function for them."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module

from torch import Tensor, nn

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import AnyPairBatch


@cache
def load_forward_rules() -> None:
    """Load PyTorch's rules of forward derivatives, whose first use warns of `torch.jit.script` (2.11 to 2.13)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import_module("torch._decomp.decompositions_for_jvp")


class RewardsModule(nn.Module):
    """Rewards of a micro-batch as a module's forward pass, which is what `functional_call` takes.

    Args:
        reward_model: the model; its parameters are named `reward_model.…` here.
    """

    def __init__(self, reward_model: BradleyTerryRM) -> None:
        super().__init__()
        self.reward_model = reward_model

    def forward(self, batch: AnyPairBatch) -> Tensor:
        """The rewards, interleaved."""
        rewards: Tensor = self.reward_model.rewards_of(batch)
        return rewards
