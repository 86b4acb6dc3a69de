"""Builders of the optimizers of torch, of this package, of pytorch_optimizer and of users."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from copy import deepcopy
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
from omegaconf import MISSING
from torch import nn
from torch.optim import Optimizer

from rm_optimizer.errors import ConfigError, MissingExtra
from rm_optimizer.optim.algorithms import SAM, Lion, ScheduleFreeAdamW, StochasticRounding, half_weights
from rm_optimizer.optim.param_groups import ParamPartition, Role, partition
from rm_optimizer.optim.registry import (
    AVERAGES,
    BFLOAT16,
    CLIPPED,
    FLAT,
    GLOBAL,
    HALF_WEIGHTS,
    OPTIMIZERS,
    POPT,
    TOGETHER,
    WHOLE,
    Builder,
    OptimizerInfo,
    built_in,
    require_setups,
)
from rm_optimizer.schema import optimizers as configs
from rm_optimizer.schema.composition import store_optimizer
from rm_optimizer.schema.optimizers import OptimizerConfig

BuilderT = TypeVar("BuilderT", bound=Builder)


@built_in(configs.AdamConfig, "elementwise", 8, refuses=CLIPPED)
def build_adam(params: ParamPartition, config: configs.AdamConfig, num_steps: int | None) -> Optimizer:
    """`torch.optim.Adam`."""
    return torch.optim.Adam(params.groups(config), lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


@built_in(configs.AdamWConfig, "elementwise", 8, refuses=CLIPPED)
def build_adamw(params: ParamPartition, config: configs.AdamConfig, num_steps: int | None) -> Optimizer:
    """`torch.optim.AdamW`."""
    return torch.optim.AdamW(params.groups(config), lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


@built_in(configs.AdamW8bitConfig, "elementwise", 2 + 2 * 4 / 256, refuses=CLIPPED | WHOLE, extra="qlora")
def build_adamw_8bit(params: ParamPartition, config: configs.AdamW8bitConfig, num_steps: int | None) -> Optimizer:
    """`bitsandbytes.optim.AdamW8bit`, with whole moments for embeddings (as in transformers) and small parameters."""
    base: Any = _load("AdamW8bit", "bitsandbytes.optim", "qlora")

    class AdamW8bit(base):  # type: ignore[misc]
        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            given: dict[str, Any] = super().get_config(gindex, pindex, group)
            return given | {"optim_bits": 32} if group["role"] == Role.embedding else given

    groups = params.groups(config)
    for group in groups:
        group["algorithm"] = "adamw" if group["role"] == Role.embedding else config.name
    options = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    return cast("Optimizer", AdamW8bit(groups, is_paged=config.paged, **options))


@built_in(configs.SGDConfig, "elementwise", 4, refuses=CLIPPED)
def build_sgd(params: ParamPartition, config: configs.SGDConfig, num_steps: int | None) -> Optimizer:
    """`torch.optim.SGD`."""
    return torch.optim.SGD(params.groups(config), lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)


@built_in(configs.AdafactorConfig, "factored", 0, refuses=FLAT | WHOLE)
def build_adafactor(params: ParamPartition, config: configs.AdafactorConfig, num_steps: int | None) -> Optimizer:
    """`torch.optim.Adafactor`."""
    return torch.optim.Adafactor(params.groups(config), lr=config.lr, beta2_decay=config.beta2_decay, d=config.clip)


@built_in(configs.LionConfig, "elementwise", 4, refuses=CLIPPED)
def build_lion(params: ParamPartition, config: configs.LionConfig, num_steps: int | None) -> Optimizer:
    """`Lion` of this package."""
    return Lion(params.groups(config), lr=config.lr, beta1=config.beta1, beta2=config.beta2)


@built_in(configs.SAMConfig, "two_pass", 8, refuses=GLOBAL | TOGETHER, passes_per_step=2)
def build_sam(params: ParamPartition, config: configs.SAMConfig, num_steps: int | None) -> Optimizer:
    """`SAM` of this package, with `torch.optim.AdamW` as its base."""
    return SAM(build_adamw(params, config, num_steps), rho=config.rho, adaptive=config.adaptive)


@built_in(configs.ScheduleFreeConfig, "schedule_free", 8, refuses=AVERAGES | CLIPPED)
def build_schedule_free(params: ParamPartition, config: configs.ScheduleFreeConfig, num_steps: int | None) -> Optimizer:
    """`ScheduleFreeAdamW` of this package."""
    return ScheduleFreeAdamW(
        params.groups(config),
        lr=config.lr,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_lr_power=config.weight_lr_power,
    )


SPECTRAL_ROLES = (Role.hidden, Role.lora, Role.new)


@built_in(configs.SOAPConfig, "matrix", 24, refuses=FLAT | WHOLE, extra=POPT)
def build_soap(params: ParamPartition, config: configs.SOAPConfig, num_steps: int | None) -> Optimizer:
    """`pytorch_optimizer.SOAP`; its first step only starts the preconditioner, as in the authors' code."""
    return _adam_like(
        "SOAP",
        params,
        config,
        precondition_frequency=config.precondition_frequency,
        max_precondition_dim=config.max_precondition_dim,
    )


@built_in(configs.AdEMAMixConfig, "elementwise", 12, refuses=CLIPPED, extra=POPT)
def build_ademamix(params: ParamPartition, config: configs.AdEMAMixConfig, num_steps: int | None) -> Optimizer:
    """`pytorch_optimizer.AdEMAMix`.

    Raises:
        ValueError: if the slow momentum has a warm-up and the run's length is not given.
    """
    if config.slow_warmup_ratio and num_steps is None:
        raise ValueError("ademamix with slow_warmup_ratio > 0 needs build_optimizer(…, num_steps=…)")
    betas = (config.beta1, config.beta2, config.beta3)
    warmup = config.slow_warmup_ratio * (num_steps or 0) or None
    options = {"betas": betas, "alpha": config.alpha, "weight_decouple": True, "t_alpha_beta3": warmup}
    return _adam_like("AdEMAMix", params, config, **options)


@built_in(configs.ProdigyConfig, "lr_free", 16, refuses=GLOBAL | TOGETHER | WHOLE, extra=POPT)
def build_prodigy(params: ParamPartition, config: configs.ProdigyConfig, num_steps: int | None) -> Optimizer:
    """`pytorch_optimizer.Prodigy` with bias correction, and with its safeguard of the estimate during a warm-up."""
    return _adam_like("Prodigy", params, config, d_coef=config.d_coef, bias_correction=True, safeguard_warmup=True)


@built_in(configs.MARSConfig, "elementwise", 12, refuses=FLAT | WHOLE, extra=POPT)
def build_mars(params: ParamPartition, config: configs.MARSConfig, num_steps: int | None) -> Optimizer:
    """`pytorch_optimizer.MARS` of type adamw; AdamW updates vectors at the same learning rate without weight decay.

    The library adds 1e-15 to the mean square before it takes the root, which matters for gradients below about 1e-7.
    """
    vectors = {"lr_1d": config.lr, "betas_1d": (config.beta1, config.beta2), "weight_decay_1d": 0.0}
    return _adam_like("MARS", params, config, gamma=config.gamma, **vectors)


@built_in(configs.ScionConfig, "matrix", 4, refuses=FLAT | BFLOAT16, extra=POPT)
def build_scion(params: ParamPartition, config: configs.ScionConfig, num_steps: int | None) -> Optimizer:
    """`pytorch_optimizer.SCION` with a norm for each role: spectral for matrices, sign for tables, RMS for vectors.

    Raises:
        ConfigError: for stacked experts and convolutions, since SCION would misread their dimensions as a
            matrix's, and for matrices of unknown layers.
    """
    params.require_known_matrices("scion")
    stacked = [item.name for item in params.parameters if item.role is Role.other and item.parameter.ndim != 2]
    if stacked:
        raise ConfigError(f"optimizer=scion has no norm for stacked experts or convolutions, got {', '.join(stacked)}")
    scion = _load("SCION")
    norms = import_module("pytorch_optimizer.optimizer.scion").LMONorm
    scales = {norms.SPECTRAL: config.hidden_scale, norms.BIAS: config.vector_scale, norms.SIGN: config.sign_scale}
    groups = []
    for group in params.groups(config):
        members = defaultdict(list)
        for name, parameter in group["params"]:
            matrix = norms.SPECTRAL if Role(group["role"]) in SPECTRAL_ROLES else norms.SIGN
            members[norms.BIAS if parameter.ndim < 2 else matrix].append((name, parameter))
        groups += [group | {"params": some, "norm_type": int(n), "scale": scales[n]} for n, some in members.items()]
    return scion(groups, lr=config.lr, momentum=1 - config.momentum)


@built_in(configs.ShampooConfig, "matrix", 28, refuses=FLAT | WHOLE, extra=POPT)
def build_shampoo(params: ParamPartition, config: configs.ShampooConfig, num_steps: int | None) -> Optimizer:
    """`pytorch_optimizer.ScalableShampoo` with decoupled weight decay and averaged momentum.

    Its state holds objects of the library. They are declared safe so that `torch.load(weights_only=True)` reads them.
    """
    shampoo = _load("ScalableShampoo")
    graft = import_module("pytorch_optimizer.optimizer.utils.graft")
    preconditioner = import_module("pytorch_optimizer.optimizer.utils.preconditioner")
    stored = [getattr(preconditioner, name) for name in ("PreConditioner", "BlockPartitioner", "PreConditionerType")]
    stored += [graft.SGDGraft, graft.AdaGradGraft, graft.RMSPropGraft]
    torch.serialization.add_safe_globals(stored)
    return shampoo(
        params.groups(config),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        moving_average_for_momentum=True,
        decoupled_weight_decay=True,
        start_preconditioning_step=config.start_step,
        preconditioning_compute_steps=config.precondition_frequency,
        block_size=config.block_size,
        graft_type=getattr(graft.LayerWiseGrafting, config.graft.name.upper()),
    )


def _adam_like(name: str, params: ParamPartition, config: configs.AdamConfig, **options: Any) -> Optimizer:
    """An optimizer of pytorch_optimizer with Adam's options and further ones."""
    adam = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    return _load(name)(params.groups(config), **adam | options)


def _load(name: str, module: str = "pytorch_optimizer", extra: str = POPT) -> Callable[..., Optimizer]:
    """A class of another package, imported when first needed because the import takes seconds."""
    package = module.partition(".")[0]
    try:
        return cast("Callable[..., Optimizer]", getattr(import_module(module), name))
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtra(package.replace("_", "-"), extra) from error


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, *, head_names: str | Collection[str], num_steps: int | None = None
) -> Optimizer:
    """The optimizer of a model's trainable parameters, each in exactly one group.

    In addition to torch's entries, groups have `role` and `algorithm`, which `describe_groups` returns as a table. With
    weights in bfloat16 it is a `StochasticRounding`.

    Args:
        model: the model before any distributed wrapper.
        config: the options of a registered optimizer.
        head_names: full names of the reward head's parameters.
        num_steps: optimizer steps of the whole run; ademamix needs it for the warm-up of its slow momentum.

    Raises:
        ConfigError: if the optimizer is unknown, the role of a parameter that decides its rule is unknown, or an option
            does not work as its name says.
        MissingExtra: if the optimizer's package is not installed.
    """
    names = [head_names] if isinstance(head_names, str) else head_names
    optimizer = OPTIMIZERS[config.name].build(partition(model, head_names=names), config, num_steps)
    for group in optimizer.param_groups:
        group.setdefault("algorithm", config.name)
    if any(each.dtype == torch.float16 for group in optimizer.param_groups for each in group["params"]):
        raise ConfigError("weights that train must be float32 or bfloat16, got float16, which would lose small updates")
    if not half_weights(optimizer):
        return optimizer
    require_setups(config, [HALF_WEIGHTS])
    return StochasticRounding(optimizer)


def register_optimizer(name: str, options: type[OptimizerConfig], **facts: Any) -> Callable[[BuilderT], BuilderT]:
    """Decorator that makes a function an optimizer of runs: `optimizer=NAME`.

    The function is called with the model's parameters, whose `groups(config)` the optimizer takes, the options, and the
    run's number of steps or None.

    Args:
        name: name of the optimizer, as the user types it.
        options: dataclass that extends `OptimizerConfig`, with a default for each further field. Without defaults
            of `lr` and `weight_decay`, AdamW's for the model are taken.
        facts: further fields of `OptimizerInfo`. If a step of a weight depends on the others or needs the closure,
            `bfloat16` is added to `refuses`.

    Raises:
        ConfigError: if the name is taken, an option has no default, or the optimizer leaves a parameter out, does not
            descend, or does not continue from its saved state.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(kw_only=True)
        ... class PlainOptions(OptimizerConfig):
        ...     dampening: float = 0.0
        >>> @register_optimizer("plain", PlainOptions)
        ... def build_plain(params, config, num_steps):
        ...     return torch.optim.SGD(params.groups(config), lr=config.lr, dampening=config.dampening)
    """

    def register(build: BuilderT) -> BuilderT:
        if not _require_optimizer(name, options, build):
            reason = "its steps of one weight alone and without a closure are other steps"
            facts["refuses"] = {"bfloat16": reason, **facts.get("refuses", {})}
        OPTIMIZERS.add(name, OptimizerInfo(name, options, build, **facts), build)
        store_optimizer(name, options)
        return build

    return register


def _require_optimizer(name: str, options: type[OptimizerConfig], build: Builder) -> bool:
    """Refuse an optimizer that leaves a parameter out, does not descend, or does not continue from its saved state.

    Returns True if it steps each weight by itself, without a closure.
    """
    if not (isinstance(options, type) and issubclass(options, OptimizerConfig)):
        raise ConfigError(f"the options of optimizer '{name}' must be a dataclass that extends OptimizerConfig")
    config = options(name=name)
    config.lr, config.weight_decay = 1e-3, 0.0
    if missing := [option for option, value in vars(config).items() if value == MISSING]:
        raise ConfigError(f"the options of optimizer '{name}' need a default for {', '.join(missing)}")

    def started() -> tuple[nn.Module, Optimizer]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.ModuleDict({"hidden": nn.Linear(6, 6), "head": nn.Linear(6, 1, bias=False)})
        return model, build(partition(model, head_names=["head.weight"]), config, 40)

    def losses(model: nn.Module, optimizer: Optimizer) -> list[float]:
        def closure() -> float:
            optimizer.zero_grad()
            loss = torch.stack([(p - 1).square().sum() for p in model.parameters()]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())

        return [float(optimizer.step(closure) or math.nan) for _ in range(20)]

    model, optimizer = started()
    grouped = sorted(id(p) for group in optimizer.param_groups for p in group["params"] if "role" in group)
    if grouped != sorted(map(id, model.parameters())):
        raise ConfigError(f"optimizer '{name}' must step every parameter once; give it params.groups(config)")
    found = losses(model, optimizer)
    if not found[-1] < found[0]:
        raise ConfigError(
            f"optimizer '{name}' must descend, but 20 steps on a quadratic took its loss from {found[0]:.4g} to "
            f"{found[-1]:.4g}; step against the gradient, and return the closure's loss"
        )
    moved = [each.detach().clone() for each in model.parameters()]
    again, reloaded = started()
    again.load_state_dict(model.state_dict())
    reloaded.load_state_dict(deepcopy(optimizer.state_dict()))
    if losses(again, reloaded) != losses(model, optimizer):
        raise ConfigError(
            f"optimizer '{name}' must continue from its saved state; keep all that it remembers in self.state"
        )
    single, optimizer = started()
    try:
        losses(single, StochasticRounding(optimizer))
    except TypeError:  # its step needs the closure
        return False
    return all(map(torch.allclose, single.parameters(), moved))
