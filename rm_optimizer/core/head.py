"""The scalar head: one linear layer, in float32 whatever the backbone's type."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from rm_optimizer.errors import CheckpointError

_HALF = (torch.float16, torch.bfloat16)


class RewardHead(nn.Linear):
    """A linear layer with one output that computes in float32 or better, outside autocast.

    In bfloat16 a reward near 16 is rounded to multiples of 1/16, so unequal responses tie. The layer keeps its weights
    in float32 when the model around it is cast to a half type, and upcasts what comes in; its state has `nn.Linear`'s
    names.
    """

    def forward(self, input: Float[Tensor, "... hidden"]) -> Float[Tensor, "... 1"]:
        """`input @ weight.T + bias`, in the weight's type."""
        with torch.autocast(device_type=input.device.type, enabled=False):
            return nn.functional.linear(input.to(self.weight.dtype), self.weight, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RewardHead:
        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device, torch.float32) if moved.dtype in _HALF else moved

        super()._apply(keep_float32, recurse)  # type: ignore[no-untyped-call]
        return self


def head_name(model: PreTrainedModel) -> str:
    """Dotted name of the final linear layer: the one with a single output outside the backbone.

    Raises:
        CheckpointError: if there is no such layer, or more than one.
    """
    backbone = f"{model.base_model_prefix}."
    found: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == 1 and not name.startswith(backbone)
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"expected {type(model).__name__} to have one linear layer with one output after its backbone, "
            f"found {len(found)}; load it with num_labels=1"
        )
    return found[0]


def install_reward_head(model: PreTrainedModel) -> RewardHead:
    """Replace the final linear layer by a `RewardHead` with the same parameters, in float32 or better.

    Raises:
        CheckpointError: if the model has no single final layer with one output.
    """
    name = head_name(model)
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    plain: nn.Linear = getattr(parent, child)
    if isinstance(plain, RewardHead):
        return plain
    head = RewardHead(plain.in_features, 1, bias=plain.bias is not None, device="meta")
    for key, parameter in plain.named_parameters():
        exact = parameter.float() if parameter.dtype in _HALF else parameter
        setattr(head, key, nn.Parameter(exact.detach(), requires_grad=parameter.requires_grad))
    setattr(parent, child, head.train(plain.training))
    return head


def initialise_head(head: RewardHead, seed: int) -> str:
    """Draw a fresh head from N(0, 1 / (hidden + 1)) with zero bias, and say so in words.

    The second argument is read as the standard deviation, as OpenRLHF reads Stiennon et al. (2020, appendix B.2,
    https://arxiv.org/abs/2009.01325), who write "N(0, 1 / (d_model + 1))". Margins then start near zero, so the first
    loss is log 2; `transformers`' own N(0, 0.02) starts a model 4096 wide above chance.

    Args:
        head: the layer to draw.
        seed: seed of the draw.
    """
    std = 1.0 / (head.in_features + 1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * std)
        if head.bias is not None:
            head.bias.zero_()
    return f"normal(mean=0, std=1/(hidden+1)={std:.6g}), seed={seed}"
