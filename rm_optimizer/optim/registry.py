"""Registry of the optimizers: origin, cost, builder, and setups in which each would be another algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from omegaconf import MISSING
from torch import nn
from torch.optim import Optimizer

from rm_optimizer.errors import ConfigError
from rm_optimizer.optim.param_groups import partition
from rm_optimizer.records.accelerator import accelerators
from rm_optimizer.schema.config import HardwareConfig
from rm_optimizer.schema.optimizers import OptimizerConfig, ScheduleConfig, ScheduleName
from rm_optimizer.schema.registry import Registry
from rm_optimizer.schema.store import store_optimizer

Family = Literal["elementwise", "factored", "matrix", "two_pass", "schedule_free", "lr_free"]
TrainingSetup = Literal["fsdp1", "fsdp2", "deepspeed", "decay", "bfloat16"]
Builder = Callable[..., Optimizer]
BuilderT = TypeVar("BuilderT", bound=Builder)


@dataclass(frozen=True)
class OptimizerInfo:
    """One entry of the registry."""

    name: str
    options: type[OptimizerConfig]
    """Dataclass of its options."""
    build: Builder
    """Builder, called with a partition, the optimizer's options and the run's number of steps or None."""
    family: Family = "elementwise"
    state_bytes_per_param: float = math.nan
    """Bytes of complete optimizer state for each entry of a square float32 hidden matrix; NaN if unknown."""
    refuses: Mapping[TrainingSetup, str] = field(default_factory=dict)
    """Setups in which it would be another algorithm than its name says, each with the reason."""
    extra: str | None = None
    """Extra of rm-optimizer that installs it; None for built-in ones."""
    passes_per_step: int = 1
    """Forward and backward passes over a macro-batch in one step."""


def _without_shards(reason: str) -> dict[TrainingSetup, str]:
    return {"fsdp1": reason.format("FSDP1"), "deepspeed": reason.format("DeepSpeed")}


FLAT = _without_shards("{} flattens every matrix to one dimension")
GLOBAL = _without_shards("under {} each process would see the norm of its shard only")
CLIPPED = _without_shards("under {} each process would clip gradients by the norm of its shard")
WHOLE: dict[TrainingSetup, str] = {"fsdp2": "its package computes on whole tensors only, not on FSDP2's shards"}
BFLOAT16: dict[TrainingSetup, str] = {
    "fsdp2": "its package would sum products of bfloat16 shards, another step than one device takes"
}
AVERAGES: dict[TrainingSetup, str] = {
    "decay": "averaging replaces the decay, and a decaying schedule on top of it trains another algorithm",
    "bfloat16": "the average of its weights would lose most of each step",
}
TOGETHER: dict[TrainingSetup, str] = {"bfloat16": "it steps all weights by one number of all, not each by itself"}
POPT = "optimizers"
"""Extra that installs pytorch-optimizer."""
OPTIMIZERS: Registry[OptimizerInfo] = Registry("optimizer")


def built_in(options: type[OptimizerConfig], family: Family, state_bytes: float, **facts: Any) -> Callable[..., Any]:
    """Decorator that registers a builder of this package under the name in its options; the tests check its contract.

    Args:
        options: dataclass of its options.
        family: kind of its update rule.
        state_bytes: bytes of its state for each entry of a hidden matrix.
        facts: further fields of `OptimizerInfo`.
    """

    def register(build: Builder) -> Builder:
        info = OptimizerInfo(options.name, options, build, family, state_bytes, **facts)
        OPTIMIZERS.add(info.name, info, build)
        return build

    return register


def register_optimizer(name: str, options: type[OptimizerConfig], **facts: Any) -> Callable[[BuilderT], BuilderT]:
    """Decorator that makes a function an optimizer of runs: `optimizer=NAME`.

    The function is called with the model's parameters, whose `groups(config)` the optimizer takes, the options, and the
    run's number of steps or None.

    Args:
        name: name of the optimizer, as the user types it.
        options: dataclass that extends `OptimizerConfig`, with a default for each further field. Without defaults
            of `lr` and `weight_decay`, AdamW's for the model are taken.
        facts: further fields of `OptimizerInfo`.

    Raises:
        ConfigError: if the name is taken, an option has no default, or the optimizer leaves a parameter out, does not
            descend, or does not continue from its saved state.

    Example:
        >>> @dataclass(kw_only=True)
        ... class PlainOptions(OptimizerConfig):
        ...     dampening: float = 0.0
        >>> @register_optimizer("plain", PlainOptions)
        ... def build_plain(params, config, num_steps):
        ...     return torch.optim.SGD(params.groups(config), lr=config.lr, dampening=config.dampening)
    """

    def register(build: BuilderT) -> BuilderT:
        _require_optimizer(name, options, build)
        OPTIMIZERS.add(name, OptimizerInfo(name, options, build, **facts), build)
        store_optimizer(name, options)
        return build

    return register


def _require_optimizer(name: str, options: type[OptimizerConfig], build: Builder) -> None:
    """Refuse an optimizer that leaves a parameter out, does not descend, or does not continue from its saved state."""
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
    again, reloaded = started()
    again.load_state_dict(model.state_dict())
    reloaded.load_state_dict(deepcopy(optimizer.state_dict()))
    if losses(again, reloaded) != losses(model, optimizer):
        raise ConfigError(
            f"optimizer '{name}' must continue from its saved state; keep all that it remembers in self.state"
        )


SHARDED_STRATEGY = "fsdp2"
"""Value of `hardware.strategy` for FSDP2."""

OTHERS = "use hardware=fsdp, which is FSDP2, or hardware=ddp"
HINTS: dict[TrainingSetup, str] = {
    "fsdp1": OTHERS,
    "fsdp2": "use hardware=ddp",
    "deepspeed": OTHERS,
    "decay": "add schedule=constant",
    "bfloat16": "use model.dtype=float32 hardware.precision=bf16-mixed",
}
HALF_WEIGHTS: tuple[TrainingSetup, str] = ("bfloat16", "model.dtype=bfloat16")
"""Setup in which weights of bfloat16 train, each stepped by itself, and the option that chooses it."""


def check_compatible(
    config: OptimizerConfig, hardware: HardwareConfig, schedule: ScheduleConfig, *, trains_half_weights: bool = False
) -> None:
    """Refuse an optimizer that would be another algorithm in this setup.

    Raises:
        ConfigError: if the combination is refused, with the reason, or moments are to be paged without a GPU.
    """
    kinds: dict[str, TrainingSetup] = {SHARDED_STRATEGY: "fsdp2", "fsdp": "fsdp1", "deepspeed": "deepspeed"}
    kind = next((kind for start, kind in kinds.items() if hardware.strategy.startswith(start)), None)
    setups: list[tuple[TrainingSetup, str]] = [] if kind is None else [(kind, f"hardware.strategy={hardware.strategy}")]
    if schedule.name is not ScheduleName.constant:
        setups.append(("decay", f"schedule.name={schedule.name.value}"))
    if trains_half_weights:
        setups.append(HALF_WEIGHTS)
    if getattr(config, "paged", False) and not accelerators():
        raise ConfigError(
            "optimizer.paged=true moves moments between the memories of a GPU and of the processor, and torch finds no "
            "GPU here; leave it out"
        )
    require_setups(config, setups)


def require_setups(config: OptimizerConfig, setups: Collection[tuple[TrainingSetup, str]]) -> None:
    """Refuse setups, given with the option that chose each, in which an optimizer would be another algorithm."""
    refuses = OPTIMIZERS[config.name].refuses
    for setup, option in setups:
        if setup in refuses:
            raise ConfigError(f"optimizer={config.name} does not go with {option}: {refuses[setup]}; {HINTS[setup]}")
