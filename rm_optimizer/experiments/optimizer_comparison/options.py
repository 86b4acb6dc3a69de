"""Options of a comparison of optimizers, and refusal of options under which the comparison would be unfair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any

from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.experiments.training_trials import require_shared
from rm_optimizer.optim import check_compatible
from rm_optimizer.optim.registry import OPTIMIZERS
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.optimizers import ScheduleName

REFERENCE = "adamw"
"""The arm that others are compared with, if it is among the optimizers."""
OWNED = MappingProxyType(
    {
        "optimizer": "learning rates are tuned and the other options are each preset's",
        "seed": "tuning and final runs have seeds of their own",
        "schedule": "every optimizer takes its preset's; schedule.warmup_ratio and schedule.min_lr_ratio may be set",
        "output_dir": "--output names the folder",
        "hydra.run.dir": "--output names the folder",
        "resume": "a comparison goes on where it stopped by itself",
        "publish": "weights of a comparison are not kept",
        "data.train": "--data names the training pairs",
        "data.val": "--val names the validation pairs",
        "training.early_stopping": "every run is judged by its last weights after the whole schedule",
        "training.monitor": "every run is judged by its last weights after the whole schedule",
        "training.checkpoint_every": "every run is judged by its last weights after the whole schedule",
    }
)
"""Options, and groups of them, that a comparison sets itself, each with the reason."""
LEAST = MappingProxyType(
    {
        **dict.fromkeys(("tuning_seeds", "seeds", "pairs_per_prompt"), 1),
        **dict.fromkeys(("pairs", "val_pairs", "test_pairs"), 2),
        "curvature_pairs": 0,
    }
)
"""Smallest allowed values of the sizes."""
SHARED = ("schedule.warmup_ratio", "schedule.min_lr_ratio")
"""Options of these groups that may be set, with the same value for all optimizers."""


class Budget(StrEnum):
    """Sizes of a comparison."""

    smoke = "smoke"
    standard = "standard"
    paper = "paper"


@dataclass(frozen=True)
class BudgetSizes:
    """Numbers of runs of a budget.

    Args:
        rates: number of learning rates of each optimizer, odd.
        tuning_seeds: number of seeds of each rate.
        seeds: number of final seeds of each optimizer.
        pairs: most training pairs; None means all.
        test_pairs: most validation pairs, and most test pairs; None means all.
        curvature_pairs: number of training pairs for the measurement of curvature.
    """

    rates: int
    tuning_seeds: int
    seeds: int
    pairs: int | None
    test_pairs: int | None
    curvature_pairs: int


BUDGETS: Mapping[Budget, BudgetSizes] = MappingProxyType(
    {
        Budget.smoke: BudgetSizes(3, 1, 2, 256, 256, 16),
        Budget.standard: BudgetSizes(5, 1, 5, None, None, 64),
        Budget.paper: BudgetSizes(7, 2, 10, None, None, 256),
    }
)


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(JsonRecord, indent=1):
    """The options of a comparison, which are the same for all optimizers.

    Args:
        train: source of the training pairs.
        val: source of the validation pairs; None splits them from the training pairs by prompt.
        test: source of the test pairs; None splits them from the validation pairs by prompt.
        optimizers: compared optimizers.
        overrides: further options of every run, as name=value.
        reference: optimizer that the others are compared with.
        budget: smoke, standard or paper.
        rates: number of learning rates of each optimizer, odd, so that the preset's is in the middle.
        tuning_seeds: number of tuning seeds of each rate.
        seeds: number of final seeds of each optimizer.
        pairs: most training pairs, drawn at random; None means all.
        val_pairs: most validation pairs; None means all.
        test_pairs: most test pairs; None means all.
        pairs_per_prompt: most validation and test pairs of one prompt; None means all.
        curvature_pairs: number of training pairs for the measurement of curvature; 0 measures none.
    """

    train: str
    val: str | None = None
    test: str | None = None
    optimizers: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    reference: str = REFERENCE
    budget: Budget = Budget.standard
    rates: int
    tuning_seeds: int
    seeds: int
    pairs: int | None = None
    val_pairs: int | None = None
    test_pairs: int | None = None
    pairs_per_prompt: int | None = None
    curvature_pairs: int

    @classmethod
    def of_budget(
        cls, budget: str, train: str, optimizers: Sequence[str], *, reference: str | None = None, **given: Any
    ) -> ComparisonOptions:
        """The options of a budget, with the given ones in place of the budget's.

        Args:
            budget: smoke, standard or paper.
            train: source of the training pairs.
            optimizers: compared optimizers.
            reference: optimizer that the others are compared with; None means adamw, or the first one without adamw.
            given: further fields by name; a value of None means the budget's.

        Raises:
            ConfigError: if an option is unknown or out of its range.
        """
        if budget not in Budget.__members__:
            raise ConfigError(did_you_mean("--budget", budget, Budget.__members__))
        sizes = BUDGETS[Budget(budget)]
        fields: dict[str, Any] = {"val_pairs": sizes.test_pairs, **vars(sizes)}
        fields |= {name: value for name, value in given.items() if value is not None}
        reference = reference or (REFERENCE if REFERENCE in optimizers else next(iter(optimizers), REFERENCE))
        return cls(budget=Budget(budget), train=train, optimizers=tuple(optimizers), reference=reference, **fields)

    def __post_init__(self) -> None:
        _require_optimizers(self.optimizers, self.reference)
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        if self.rates % 2 == 0 or self.rates < 3:
            raise ConfigError(
                f"--rates must be odd and at least 3, so that each preset's rate stands in the middle and an optimum "
                f"at the edge is seen; got {self.rates}"
            )
        require_shared(self.overrides, OWNED, "a comparison of optimizers", but=SHARED)

    def config(self, optimizer: str) -> TrainConfig:
        """Options of a run of an optimizer, composed and checked once.

        Raises:
            ConfigError: if an option is unknown, out of its range, or would make the comparison unfair.
        """
        return _composed(optimizer, self.overrides)

    def require_fair(self) -> None:
        """Refuse options under which two arms would be one optimizer, or an arm would not be what its name says.

        Raises:
            ConfigError: if there are such options, with their names.
        """
        configs = {name: self.config(name) for name in self.optimizers}
        for config in configs.values():
            check_compatible(config.optimizer, config.hardware, config.schedule)
        if {"adam", "adamw"} <= configs.keys() and configs["adamw"].optimizer.weight_decay == 0:
            raise ConfigError(
                "adam and adamw are the same optimizer without weight decay, which adapters bring; leave one of them "
                "out of --optimizers"
            )


def _require_optimizers(optimizers: tuple[str, ...], reference: str) -> None:
    for name in optimizers:
        if name not in OPTIMIZERS:
            raise ConfigError(did_you_mean("optimizer", name, OPTIMIZERS))
        if optimizers.count(name) > 1:
            raise ConfigError(
                f"--optimizers must name each optimizer once, got {name} twice; differing seeds are --seeds"
            )
        if OPTIMIZERS[name].family == "lr_free":
            raise ConfigError(
                f"{name} estimates its own learning rate, so it cannot be given as many tuned rates as the others; "
                "leave it out of --optimizers"
            )
    if len(optimizers) < 2:
        raise ConfigError(f"--optimizers must name at least 2 optimizers, got {', '.join(optimizers) or 'none'}")
    if reference not in optimizers:
        raise ConfigError(f"--reference must be one of --optimizers ({', '.join(optimizers)}), got {reference}")


@cache
def _composed(optimizer: str, overrides: tuple[str, ...]) -> TrainConfig:
    shared = [override for override in overrides if not override.lstrip("+").startswith("data.")]
    config = typed(compose([f"optimizer={optimizer}", *shared, "output_dir=OUTPUT"]), TrainConfig)
    _require_fair(config)
    return config


def _require_fair(config: TrainConfig) -> None:
    """Refuse several devices and constant schedules, whose effects would be compared instead of the optimizers'."""
    if config.hardware.devices * config.hardware.num_nodes > 1:
        raise ConfigError(
            f"a comparison runs each trial on one device, got hardware.devices={config.hardware.devices}; "
            "set hardware.devices=1, and --workers for several trials at a time"
        )
    is_averaged = OPTIMIZERS[config.optimizer.name].family == "schedule_free"
    if config.schedule.name == ScheduleName.constant and not is_averaged:
        raise ConfigError(
            f"{config.optimizer.name} would be compared without a decay of its learning rate, which "
            "hides its best weights; leave the schedule to the presets"
        )
