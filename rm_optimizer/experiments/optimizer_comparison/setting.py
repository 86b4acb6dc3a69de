"""Setting and stored records of a comparison of optimizers. Imports no torch.

Options that would be unfair are refused. The setting is written and hashed before the first run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from rm_optimizer.errors import ConfigError, require_known
from rm_optimizer.experiments.study import FROZEN_FILE
from rm_optimizer.experiments.training_trials import require_shared
from rm_optimizer.experiments.trial import stored
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.checks import require, require_once
from rm_optimizer.schema.optimizers import ScheduleName

REFERENCE = "adamw"
"""The arm that others are compared with, if it is among the optimizers."""
OWNED: Mapping[str, str] = {
    "optimizer": "learning rates are tuned and the other options are each preset's",
    "seed": "tuning and final runs have different seeds",
    "schedule": "every optimizer takes its preset's; schedule.warmup_ratio and schedule.min_lr_ratio may be set",
    "output_dir": "--output names the folder",
    "hydra.run.dir": "--output names the folder",
    "resume": "a comparison continues where it stopped",
    "publish": "weights of a comparison are not kept",
    "data.train": "--data names the training pairs",
    "data.val": "--val names the validation pairs",
    "data.over_long": "every optimizer is scored on all pairs, cut to model.max_length",
    **dict.fromkeys(("data.thinking", "data.special_tokens"), "every optimizer reads pairs as the base model does"),
    "training.early_stopping": "every run is judged by its last weights after the whole schedule",
    "training.monitor": "every run is judged by its last weights after the whole schedule",
    "training.checkpoint_every": "every run is judged by its last weights after the whole schedule",
}
"""Options, and groups of them, that a comparison sets itself, each with the reason."""
LEAST: Mapping[str, int] = {
    **dict.fromkeys(("tuning_seeds", "seeds"), 1),
    **dict.fromkeys(("pairs", "val_pairs", "test_pairs"), 2),
    "curvature_pairs": 0,
}
"""Smallest allowed values of the sizes."""
SHARED = ("schedule.warmup_ratio", "schedule.min_lr_ratio")
"""Options of these groups that may be set, with the same value for all optimizers."""
TUNE, FINAL = "tune", "final"
MARGINS_FILE, CURVE_FILE = "margins.npz", "curve.json"
"""Files in a trial's work folder: margins on the validation and test pairs, and the learning curve."""
FIRST_TUNING_SEED = 1000
"""First tuning seed; final seeds start at 0 and end before it, so that no rate is judged on a seed that chose it."""

HALF_DECADE = math.sqrt(10.0)
"""Factor from one learning rate to the next."""
MOST_EXTRA = 2
"""Most rates that are added beyond the edges of the grid."""


class Budget(StrEnum):
    """Sizes of a comparison."""

    smoke = "smoke"
    standard = "standard"
    paper = "paper"


BUDGETS: Mapping[Budget, Mapping[str, int]] = {
    Budget.smoke: {"rates": 3, "tuning_seeds": 1, "seeds": 2, "curvature_pairs": 16}
    | dict.fromkeys(("pairs", "val_pairs", "test_pairs"), 256),
    Budget.standard: {"rates": 5, "tuning_seeds": 1, "seeds": 5, "curvature_pairs": 64},
    Budget.paper: {"rates": 7, "tuning_seeds": 2, "seeds": 10, "curvature_pairs": 256},
}
"""Sizes of each budget, by their names in `ComparisonOptions`."""


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
            ConfigError: if an option is unknown or out of its range, or an optimizer has no learning rate to tune.
        """
        from rm_optimizer.optim import OPTIMIZERS  # imports torch, which stored options do not need

        require_known("--budget", budget, Budget.__members__)
        fields: dict[str, Any] = {**BUDGETS[Budget(budget)]}
        fields |= {name: value for name, value in given.items() if value is not None}
        reference = reference or (REFERENCE if REFERENCE in optimizers else next(iter(optimizers), REFERENCE))
        found = cls(budget=Budget(budget), train=train, optimizers=tuple(optimizers), reference=reference, **fields)
        for name in found.optimizers:
            if OPTIMIZERS[name].family == "lr_free":
                raise ConfigError(
                    f"{name} estimates its own learning rate, so it cannot be given as many tuned rates as the others; "
                    "leave it out of --optimizers"
                )
        return found

    def __post_init__(self) -> None:
        optimizers = self.optimizers
        require_once("--optimizers", "optimizer", optimizers, "differing seeds are --seeds")
        names = ", ".join(optimizers)
        require(len(optimizers) > 1, "--optimizers", "name at least 2 optimizers", names or "none")
        require(self.reference in optimizers, "--reference", f"be one of --optimizers ({names})", self.reference)
        for name, least in LEAST.items():
            value = getattr(self, name)
            require(value is None or value >= least, f"--{name.replace('_', '-')}", f"be at least {least}", value)
        most = f"be at most {FIRST_TUNING_SEED}, where the tuning seeds begin"
        require(self.seeds <= FIRST_TUNING_SEED, "--seeds", most, self.seeds)
        odd = "be odd and at least 3, so that each preset's rate is in the middle and an optimum at the edge is seen"
        require(self.rates % 2 == 1 and self.rates > 2, "--rates", odd, self.rates)
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
        if {"adam", "adamw"} <= configs.keys() and configs["adamw"].optimizer.weight_decay == 0:
            raise ConfigError(
                "adam and adamw are the same optimizer without weight decay, which adapters bring; leave one of them "
                "out of --optimizers"
            )


@cache
def _composed(optimizer: str, overrides: tuple[str, ...]) -> TrainConfig:
    """Options of a run.

    Several devices and constant schedules are refused, since their effects would be compared.
    """
    from rm_optimizer.optim import OPTIMIZERS, check_compatible

    shared = [override for override in overrides if not override.lstrip("+~").startswith("data.")]
    config = typed(compose([f"optimizer={optimizer}", *shared, "output_dir=OUTPUT"]), TrainConfig)
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
    if config.trains_half_weights:
        raise ConfigError(
            "a comparison checks the first step of each optimizer, which is smaller than the rounding of weights in "
            "bfloat16; leave model.dtype=bfloat16 out"
        )
    check_compatible(config.optimizer, config.hardware, config.schedule)
    return config


@dataclass(frozen=True, kw_only=True)
class Frozen(JsonRecord, indent=1):
    """The setting of a comparison, `frozen.json`.

    Args:
        digest: digest of the model, the pairs, the shared options and the steps, which is part of every trial's name.
        options: options of the comparison.
        model: digest of the base model's weights with the head of seed 0.
        fingerprints: digests of the pairs, by split: `train`, `val` and `test`.
        sizes: number of pairs, by split.
        prompts: number of different prompts, by split.
        shared: digest of the options that all runs share.
        steps: optimizer steps of every run.
    """

    digest: str
    options: ComparisonOptions
    model: str
    fingerprints: dict[str, str]
    sizes: dict[str, int]
    prompts: dict[str, int]
    shared: str
    steps: int

    @classmethod
    def read(cls, folder: Path) -> Frozen | None:
        """The setting of the comparison in a folder.

        It is None if the folder holds none.

        Raises:
            ConfigError: if it is damaged.
        """
        return stored(cls, folder / FROZEN_FILE, remedy="; start the comparison in another folder")

    @classmethod
    def of(cls, folder: Path) -> Frozen:
        """The setting of the comparison in a folder.

        Raises:
            ConfigError: if the folder holds no comparison, or its setting is damaged.
        """
        if (frozen := cls.read(folder)) is None:
            raise ConfigError(
                f"{folder} holds no comparison of optimizers ({FROZEN_FILE} is missing); start one with "
                f"rm-opt compare --optimizers adamw,muon --data PAIRS --output {folder}"
            )
        return frozen


def pairs_file(folder: Path, split: str) -> Path:
    """File of the pairs of a split, `train`, `val` or `test`, in the folder of a comparison."""
    return folder / "data" / f"{split}.jsonl"


@dataclass(frozen=True, kw_only=True)
class CurvePoint(JsonRecord):
    """An evaluation during training.

    Args:
        step: optimizer steps done.
        tokens: training tokens until then, without padding.
        seconds: seconds of the steps until then.
        nll: validation NLL.
        accuracy: validation accuracy.
    """

    step: int
    tokens: int
    seconds: float
    nll: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class LearningCurve(JsonRecord):
    """Evaluations of a run, `curve.json` in a trial's work folder.

    Args:
        points: evaluations in order.
    """

    points: tuple[CurvePoint, ...]


@dataclass(frozen=True, kw_only=True)
class ChosenRate(JsonRecord):
    """The learning rate that tuning chose.

    Args:
        rate: learning rate; None if every run of every rate diverged.
        nll: mean validation NLL of its tuning runs, which is biased low because the rate was chosen by it.
        at_edge: True if the rate is the smallest or largest one tried, so that a better one may lie beyond.
        extra: number of rates added beyond the grid.
    """

    rate: float | None
    nll: float
    at_edge: bool
    extra: int


def rate_grid(center: float, count: int) -> tuple[float, ...]:
    """Learning rates in half decades around a center, to three digits.

    Args:
        center: rate of the preset.
        count: number of rates, odd.

    Example:
        >>> rate_grid(1e-4, 3)
        (3.16e-05, 0.0001, 0.000316)
    """
    return tuple(_rounded(center * HALF_DECADE**power) for power in range(-(count // 2), count // 2 + 1))


def next_rate(scores: Mapping[float, float], num_rates: int) -> float | None:
    """The next rate to try beyond an edge if the best rate is at that edge.

    It is None if no further rate is tried.

    Args:
        scores: mean validation NLL of each rate that was tried; infinite if a run diverged.
        num_rates: number of rates of the first grid.
    """
    best = chosen_rate(scores, num_rates)
    if best.rate is None or not best.at_edge or best.extra >= MOST_EXTRA:
        return None
    return _rounded(best.rate / HALF_DECADE if best.rate == min(scores) else best.rate * HALF_DECADE)


def chosen_rate(scores: Mapping[float, float], num_rates: int) -> ChosenRate:
    """The rate with the smallest mean validation NLL, or the smaller of two equally good ones.

    Args:
        scores: mean validation NLL of each rate that was tried; infinite if a run diverged.
        num_rates: number of rates of the first grid.
    """
    tried = sorted(scores)
    best = min(tried, key=lambda rate: scores[rate])
    is_known = math.isfinite(scores[best])
    return ChosenRate(
        rate=best if is_known else None,
        nll=scores[best] if is_known else math.nan,
        at_edge=is_known and best in (tried[0], tried[-1]),
        extra=len(tried) - num_rates,
    )


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")
