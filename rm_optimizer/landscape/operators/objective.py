"""Objective of curvature: the training loss averaged over a fixed set of pairs, at fixed weights and modes."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rm_optimizer.core.classifier.attention import soft_cap
from rm_optimizer.core.model.losses import configured_pair_losses, loss_named
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.errors import ConfigError, DataError, RMOptimizerError, TrainingDiverged
from rm_optimizer.landscape.operators.parameters import TRAINABLE, ParameterSubset, largest_entry, select_parameters
from rm_optimizer.records.randomness import keeping_random_state
from rm_optimizer.schema import LossConfig

DIFFERENTIABLE_TWICE = ("sdpa", "eager")
"""Kernels with a second derivative: PyTorch's own restricted to its plain backend, and the model's own code."""

_HOOK = "make_inputs_require_grad"


@contextmanager
def frozen(model: BradleyTerryRM, subset: ParameterSubset) -> Iterator[None]:
    """Turn off dropout and checkpointing, and derive by a subset alone; the model keeps its attention.

    When the block ends, modes, `requires_grad`, hooks and the random generators of Python, NumPy and PyTorch are as
    they were. Gradients in `.grad` are not touched: measurements use `torch.autograd.grad`.

    Args:
        model: the model.
        subset: parameters to derive by.
    """
    parameters, chosen = dict(model.named_parameters()), set(subset.names)
    names = ("training", "_forward_hooks")
    parts: list[Any] = [*model.modules()]
    before = [(part, name, getattr(part, name)) for part in parts for name in names]
    before += [(parameter, "requires_grad", parameter.requires_grad) for parameter in parameters.values()]
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(keeping_random_state())
        enter(_restored(before))
        for module in model.eval().modules():  # without hooks that make the output of embeddings a leaf
            hooks = module._forward_hooks.items()  # by the name that `transformers` 5 and PEFT 0.18 give them
            left = [(key, hook) for key, hook in hooks if not getattr(hook, "__name__", "").startswith(_HOOK)]
            module._forward_hooks = OrderedDict(left)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in chosen)
        enter(torch.inference_mode(False))
        enter(torch.enable_grad())
        enter(torch.autocast(model.device.type, enabled=False))
        if model.reward_head.weight.dtype == torch.float64:
            enter(KeepFloat64())
        yield


@contextmanager
def attention_with(model: PreTrainedModel, kernel_of: Callable[[PreTrainedModel], str]) -> Iterator[None]:
    """Attention kernel of each part of a model from a rule, restored when the block ends; SDPA in its plain backend."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    configs = {id(config): config for part in parts for config in (part.config, part.config.get_text_config())}
    attribute = "_attn_implementation_internal"
    before = [(config, attribute, getattr(config, attribute, None)) for config in configs.values()]
    with _restored(before), sdpa_kernel(SDPBackend.MATH):
        for part in parts:
            kernel = kernel_of(part)
            for config in (part.config, part.config.get_text_config()):
                setattr(config, attribute, kernel)
        yield


def own_kernel(model: PreTrainedModel) -> str:
    """The model's own kernel, or its eager code where that kernel computes in half types only."""
    now = str(model.config._attn_implementation)
    return "eager" if now == "flash_attention_2" and model._can_set_attn_implementation() else now


def kernel_for_twice(model: PreTrainedModel) -> str:
    """PyTorch's attention if it computes the model; eager code of some families computes its softmax in float32.

    Raises:
        ConfigError: if the model's attention cannot be switched to a kernel of `DIFFERENTIABLE_TWICE`.
    """
    now = str(model.config._attn_implementation)
    if not model._can_set_attn_implementation():
        if now not in DIFFERENTIABLE_TWICE:
            raise ConfigError(
                f"curvature needs attention that can be differentiated twice, and {type(model).__name__} is fixed to "
                f"{now}; load it with attn_implementation=eager"
            )
        return now
    return "sdpa" if model._supports_sdpa and soft_cap(model.config) is None else "eager"


@contextmanager
def _restored(attributes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    try:
        yield
    finally:
        for owner, name, value in attributes:
            setattr(owner, name, value)


class KeepFloat64(TorchFunctionMode):
    """Mode that turns casts to float32 into casts to float64.

    Several families compute norms, rotary angles and the softmax in float32 also inside a float64 model, which would
    leave a float64 measurement with float32's rounding.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func` with float64 in the place of float32."""
        if func is Tensor.float:
            return args[0].double()
        arguments = [torch.float64 if value is torch.float32 else value for value in args]
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*arguments, **named)


_ROUNDING = 256
"""Difference of one loss by two attention kernels that counts as rounding, in epsilons of float32, which some families
compute their softmax in."""


@dataclass(eq=False, repr=False)
class PairObjective:
    """`sum_i w_i l_i / sum_i w_i` over all micro-batches, computed one micro-batch at a time. Made by `measuring`.

    Weighted by pairs, so every split into micro-batches or over processes gives the same function of the weights.

    Args:
        model: the reward model with fixed weights.
        batches: this process's micro-batches, on the model's device.
        loss: training loss.
        subset: parameters to derive by.
        group: processes that hold the other pairs; None where this one holds all.

    Attributes:
        is_open: False once the measurement has ended.
    """

    model: BradleyTerryRM
    batches: Sequence[AnyPairBatch]
    loss: LossConfig
    subset: ParameterSubset
    group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        if self.loss.name is not None:
            loss_named(self.loss.name)  # is checked by its gradient, which is not possible inside a transform
        self.parameters = self.subset.of(self.model)
        self._rewards = _RewardsModule(self.model)
        weight = sum(float(batch.weight.double().sum()) for batch in self.batches)
        sizes = torch.tensor([weight, sum(batch.num_pairs for batch in self.batches)], dtype=torch.float64)
        total_weight, num_pairs = self.summed(sizes.to(self.model.device)).tolist()
        self.total_weight, self.num_pairs = float(total_weight), int(num_pairs)
        self._state = self._state_now()
        self.is_open = True

    @property
    def dtype(self) -> torch.dtype:
        """Type that derivatives are computed in."""
        return self.parameters[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    @property
    def pair_weights(self) -> Float[np.ndarray, " pairs"]:
        """Weights of this process's pairs in float64, in the order of the batches."""
        return np.asarray(torch.cat([batch.weight for batch in self.batches]).double().cpu())

    def rewards_at(self, weights: Sequence[Tensor], batch: AnyPairBatch) -> Float[Tensor, " sequences"]:
        """Rewards of a micro-batch with these weights in place of the selected ones."""
        point = {f"reward_model.{name}": weight for name, weight in zip(self.subset.names, weights, strict=True)}
        rewards: Tensor = functional_call(self._rewards, point, (batch,))
        return rewards

    def moved(self, displacement: Float[Tensor, " parameters"]) -> tuple[Tensor, ...]:
        """Copies of the selected weights, moved by a vector."""
        weights = [parameter.detach() for parameter in self.parameters]
        return torch._foreach_add(weights, self.subset.unflatten(displacement))

    def pair_losses(self, rewards: Float[Tensor, " sequences"], batch: AnyPairBatch) -> Float[Tensor, " pairs"]:
        """Loss of each pair of a micro-batch, as a function of its rewards."""
        chosen, rejected = batch.split(rewards)
        return configured_pair_losses(
            chosen, rejected, self.loss, margin=batch.margin, label=batch.label, scores=batch.scores
        )

    def share(self, rewards: Float[Tensor, " sequences"], batch: AnyPairBatch) -> Float[Tensor, ""]:
        """Share of a micro-batch in the loss, as a function of its rewards."""
        return (self.pair_losses(rewards, batch) * batch.weight).sum() / self.total_weight

    def batch_gradient(self, batch: AnyPairBatch, *, create_graph: bool = False) -> tuple[Tensor, ...]:
        """Share of a micro-batch in the gradient, one tensor for each parameter."""
        share = self.share(self.model.rewards_of(batch), batch)
        return torch.autograd.grad(
            share, self.parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True
        )

    def gradient(self) -> Float[Tensor, " parameters"]:
        """The gradient over all pairs."""
        return self.total(map(self.batch_gradient, self.batches))

    def total(self, parts: Iterable[tuple[Tensor, ...]]) -> Float[Tensor, " parameters"]:
        """The sum of the micro-batches' gradients, over all processes.

        Raises:
            TrainingDiverged: if it is not finite.
        """
        sums = [torch.zeros_like(parameter) for parameter in self.parameters]
        for part in parts:
            torch._foreach_add_(sums, part)
        return self.checked(self.summed(self.subset.flatten(sums)))

    @torch.no_grad()
    def value(self) -> float:
        """The loss over all pairs."""
        return self.summed_shares(self.share(self.model.rewards_of(batch), batch) for batch in self.batches)

    def summed_shares(self, shares: Iterable[Tensor]) -> float:
        """The loss from this process's shares of it, in float64."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        return float(self.summed(torch.stack([zero, *(share.double() for share in shares)]).sum()))

    def summed(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def require_still(self) -> None:
        """Require the weights and pairs with which the measurement began.

        Raises:
            RMOptimizerError: if the measurement has ended, or a weight or a micro-batch has changed since it began.
        """
        if not self.is_open:
            raise RMOptimizerError("this operator's measurement has ended; use it inside its `with measuring(…)` block")
        if self._state_now() != self._state:
            raise RMOptimizerError(
                "a weight or a batch changed between two products, so they belong to different matrices; "
                "measure between optimizer steps, and begin again after one"
            )

    def checked(self, values: Tensor) -> Tensor:
        """The values, if they are finite.

        Raises:
            TrainingDiverged: if they are not; names pairs whose loss is not finite.
        """
        if not values.numel() or math.isfinite(largest_entry(values)):
            return values
        found: list[int] = []
        with torch.no_grad():
            for batch in self.batches:
                losses = self.pair_losses(self.model.rewards_of(batch), batch)
                found += batch.pair_index[~losses.isfinite()].tolist()
        where = "although every pair's loss is"
        if found:
            more = f" and {len(found) - 8} more" if len(found) > 8 else ""
            where = f"since the loss is NaN or infinite on pairs {', '.join(map(str, found[:8]))}{more}"
        raise TrainingDiverged(f"the curvature of the loss is not finite {where}; load an earlier checkpoint")

    @torch.no_grad()
    def _state_now(self) -> tuple[object, ...]:
        """Versions, addresses and sums of all tensors; a change through `.data` changes no version, but the sum."""
        parameters: list[Tensor] = list(self.model.parameters())
        sums = [*torch._foreach_norm(parameters, 1), *(parameter.sum() for parameter in parameters)]
        numbers = (value for batch in self.batches for value in _tensors(batch))
        return (
            tuple((tensor._version, tensor.data_ptr()) for tensor in (*parameters, *numbers)),
            tuple(torch.stack([part.double() for part in sums]).nan_to_num().tolist()),
        )


class _RewardsModule(nn.Module):
    """Rewards of a micro-batch as a module's forward pass, for `functional_call`."""

    def __init__(self, reward_model: BradleyTerryRM) -> None:
        super().__init__()
        self.reward_model = reward_model

    def forward(self, batch: AnyPairBatch) -> Tensor:
        rewards: Tensor = self.reward_model.rewards_of(batch)
        return rewards


def _tensors(batch: object) -> Iterator[Tensor]:
    """All tensors of a micro-batch, including its trees."""
    for value in vars(batch).values():
        if isinstance(value, Tensor):
            yield value
        elif is_dataclass(value):
            yield from _tensors(value)


@contextmanager
def measuring(
    model: BradleyTerryRM,
    batches: Sequence[AnyPairBatch],
    loss: LossConfig,
    *,
    params: str | Sequence[str] = TRAINABLE,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    twice: bool = True,
) -> Iterator[PairObjective]:
    """Loss over fixed pairs of a model with fixed weights; after the block, the model is as it was.

    If the weights have another type than `dtype`, a copy of the model is measured.

    Args:
        model: the reward model.
        batches: micro-batches of the pairs, of either kind; with a group, this process's share.
        loss: training loss.
        params: parameters to derive by; see `select_parameters`.
        dtype: type to compute in, float32 or float64.
        group: processes that hold the other pairs; all of them must make the same calls.
        twice: True for second derivatives; otherwise the model keeps its own attention.

    Raises:
        ConfigError: if no parameter is selected, or the model cannot be differentiated twice.
        DataError: if there are no pairs.
    """
    subset = select_parameters(model, params)
    held = model
    if any(parameter.is_floating_point() and parameter.dtype != dtype for parameter in model.parameters()):
        held = copy.copy(model)
        held._modules = dict(model._modules)
        inner: nn.Module = copy.deepcopy(model.model)
        held.model = inner.to(dtype)
    with frozen(held, subset), ExitStack() as stack:
        there = []
        for batch in (batch.to(held.device) for batch in batches):  # numbers of the loss in the type of the measurement
            numbers = {name: getattr(batch, name).to(dtype) for name in ("margin", "label", "weight", "scores")}
            there.append(replace(batch, **numbers))
        objective = PairObjective(held, there, loss, subset, group)
        if objective.num_pairs == 0:
            raise DataError("curvature needs at least one pair, got none")
        if twice:
            _require_own_loss(objective)
            stack.enter_context(attention_with(held.model, kernel_for_twice))
        try:
            yield objective
        finally:
            objective.is_open = False


@torch.no_grad()
def _require_own_loss(objective: PairObjective) -> None:
    """Require that attention which can be differentiated twice gives the loss of the model's own attention.

    Rounding is relative to the rewards, whose difference may be much smaller.

    Raises:
        ConfigError: if the losses differ beyond rounding, or the model's attention cannot be switched.
    """
    losses = []
    for kernel in (kernel_for_twice, own_kernel):
        with attention_with(objective.model.model, kernel):
            rewards = [objective.model.rewards_of(batch) for batch in objective.batches]
            losses.append(objective.summed_shares(map(objective.share, rewards, objective.batches)))
    weights = (batch.weight.sum() / objective.total_weight for batch in objective.batches)
    size = objective.summed_shares(each.abs().max() * weight for each, weight in zip(rewards, weights, strict=True))
    is_rough = objective.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    rounding = _ROUNDING * (2**-10 if is_rough else torch.finfo(torch.float32).eps)
    measured, own = losses
    if abs(measured - own) > rounding * (abs(own) + objective.loss.beta * size):
        raise ConfigError(
            f"curvature must be that of the model's own loss, {own:.6g}, got {measured:.6g} from attention that can be "
            "differentiated twice; load the model with attn_implementation=eager, or report its family"
        )
