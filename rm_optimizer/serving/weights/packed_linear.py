"""Linear layers with weights in oneDNN's own layout, on some CPUs twice as fast in float32 as PyTorch's default.

PyTorch computes float32 layers with MKL, which does not use AVX-512 on AMD; oneDNN does. The layout is used only if it
is measured to be faster and its numbers agree. The operators are private to PyTorch (`torch.ops.mkldnn`), hence the
guard.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

TOLERANCE = 1e-4
"""Largest difference from `F.linear` relative to the largest output, from another order of float32 summation."""
PROBE_ROWS = 256


class PackedLinear(nn.Linear):
    """Float32 linear layer that computes with a packed copy of its weight; its state is that of `nn.Linear`."""

    packed: Tensor

    @classmethod
    def of(cls, plain: nn.Linear) -> PackedLinear:
        """Packed layer with the same parameters."""
        layer = cls(plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
        layer.weight, layer.bias = plain.weight, plain.bias
        layer.packed = pack(plain.weight)
        return layer.train(plain.training)

    def forward(self, input: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """`input @ weight.T + bias`, forward only."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return output


def pack(weight: Float[Tensor, "outputs inputs"]) -> Tensor:
    """Copy of the weight in oneDNN's layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def packing_gain(layer: nn.Linear) -> float:
    """Speed-up of the packed layer; 0 if it cannot be packed, or its numbers differ."""
    if layer.weight.dtype != torch.float32 or layer.weight.device.type != "cpu":
        return 0.0
    rows = torch.randn(1, PROBE_ROWS, layer.in_features, generator=torch.Generator().manual_seed(0))
    try:
        packed = PackedLinear.of(layer)
        with torch.inference_mode():
            expected = layer(rows)
            if not (packed(rows) - expected).abs().max() <= TOLERANCE * expected.abs().max():
                return 0.0
            return _seconds(lambda: layer(rows)) / _seconds(lambda: packed(rows))
    except (RuntimeError, AttributeError, NotImplementedError):  # this build of PyTorch has no such operator
        return 0.0


def _seconds(compute: Callable[[], Tensor], repeats: int = 15) -> float:
    """Least processor time of a call."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        compute()
        times.append(time.process_time() - started)
    return min(times[1:])


def packable_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Plain linear layers in float32 on the CPU with more than one output, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.out_features > 1
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
    }


def install_packed_linears(model: nn.Module, *, least_gain: float) -> bool:
    """Replace the linear layers by packed ones if the largest of them gains; True if they were replaced.

    Args:
        model: model, changed in place.
        least_gain: least speed-up of the largest layer.
    """
    layers = packable_layers(model)
    largest = max(layers.values(), key=lambda layer: layer.weight.numel(), default=None)
    if largest is None or packing_gain(largest) < least_gain:
        return False
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PackedLinear.of(layer))
    return True
