"""Setting of a comparison of optimizers: options that are refused if unfair, and pairs, model and steps of every arm.

The setting is written and hashed before the first run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rm_optimizer.core.model.identity import weights_digest
from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.core.tokens.dataset import PreferenceDataset, load_pairs, require_disjoint_prompts
from rm_optimizer.errors import ConfigError, DataError, did_you_mean
from rm_optimizer.experiments.cost import steps_of
from rm_optimizer.experiments.study import FROZEN_FILE
from rm_optimizer.experiments.training_trials import require_shared
from rm_optimizer.experiments.trial import stored
from rm_optimizer.optim import check_compatible
from rm_optimizer.optim.registry import OPTIMIZERS
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.files import write_json_lines, write_text
from rm_optimizer.records.run_options import flat, is_among, options_of
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.optimizers import ScheduleName
from rm_optimizer.training.preparation import build_model

REFERENCE = "adamw"
"""The arm that others are compared with, if it is among the optimizers."""
OWNED = MappingProxyType(
    {
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
KEPT = ("id", "source", "subset")
"""Metadata that the written pairs keep."""
FIRST_TUNING_SEED = 1000
"""First tuning seed; final seeds start at 0 and end before it, so that no rate is judged on a seed that chose it."""
HELD_OUT = 0.2
"""Share of the prompts that is held out if no validation pairs are given; it is divided into validation and test."""
_OF_AN_ARM = ("optimizer", "schedule", "seed", "output_dir", "data", "model.adamw_lr", "model.lora_lr", "logger")


class Budget(StrEnum):
    """Sizes of a comparison."""

    smoke = "smoke"
    standard = "standard"
    paper = "paper"


BUDGETS: Mapping[Budget, Mapping[str, int]] = MappingProxyType(
    {
        Budget.smoke: {"rates": 3, "tuning_seeds": 1, "seeds": 2, "curvature_pairs": 16}
        | dict.fromkeys(("pairs", "val_pairs", "test_pairs"), 256),
        Budget.standard: {"rates": 5, "tuning_seeds": 1, "seeds": 5, "curvature_pairs": 64},
        Budget.paper: {"rates": 7, "tuning_seeds": 2, "seeds": 10, "curvature_pairs": 256},
    }
)
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
        fields: dict[str, Any] = {**BUDGETS[Budget(budget)]}
        fields |= {name: value for name, value in given.items() if value is not None}
        reference = reference or (REFERENCE if REFERENCE in optimizers else next(iter(optimizers), REFERENCE))
        return cls(budget=Budget(budget), train=train, optimizers=tuple(optimizers), reference=reference, **fields)

    def __post_init__(self) -> None:
        optimizers = self.optimizers
        for name in optimizers:
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
        if self.reference not in optimizers:
            names = ", ".join(optimizers)
            raise ConfigError(f"--reference must be one of --optimizers ({names}), got {self.reference}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        if self.seeds > FIRST_TUNING_SEED:
            raise ConfigError(
                f"--seeds must be at most {FIRST_TUNING_SEED}, where the tuning seeds begin, got {self.seeds}"
            )
        if self.rates % 2 == 0 or self.rates < 3:
            raise ConfigError(
                f"--rates must be odd and at least 3, so that each preset's rate is in the middle and an optimum "
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


@cache
def _composed(optimizer: str, overrides: tuple[str, ...]) -> TrainConfig:
    """Options of a run.

    Several devices and constant schedules are refused, since their effects would be compared.
    """
    shared = [override for override in overrides if not override.lstrip("+").startswith("data.")]
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


def pairs_file(folder: Path, split: str) -> Path:
    """File of the pairs of a split, `train`, `val` or `test`, in the folder of a comparison."""
    return folder / "data" / f"{split}.jsonl"


def freeze(options: ComparisonOptions, folder: Path) -> Frozen:
    """Write the pairs and the setting of a comparison, or read the setting if the folder holds the same comparison.

    Args:
        options: options of the comparison.
        folder: folder of the comparison.

    Raises:
        ConfigError: if options are refused, or the folder holds another comparison.
        DataError: if pairs cannot be read, or the splits share prompts.
    """
    options.require_fair()
    splits = _splits(options)
    known = Frozen.read(folder)
    fingerprints = {part: data.fingerprint for part, data in splits.items()}
    if known is not None:
        before = replace(known.options, seeds=options.seeds)  # only the number of final seeds may change
        if before != options or known.fingerprints != fingerprints:
            names = [name for name in vars(options) if getattr(before, name) != getattr(options, name)]
            changed = ", ".join(names) or "pairs in the same files"
            raise ConfigError(f"{folder} holds a comparison with other {changed}; choose another --output")
        known = replace(known, options=options)
        write_text(folder / FROZEN_FILE, known.to_json() + "\n")
        return known
    for part, data in splits.items():
        rows = []
        for pair in data.pairs:
            row = pair.to_dict()
            metadata = row.pop("metadata")
            rows.append(row | {name: metadata[name] for name in KEPT if metadata.get(name) is not None})
        write_json_lines(pairs_file(folder, part), rows)
    config = options.config(options.reference)
    contents = {
        "model": weights_digest(build_model(config.model, splits["train"], seed=0).model),
        "fingerprints": fingerprints,
        "shared": digest([[name, value] for name, value in flat(options_of(config)) if not is_among(name, _OF_AN_ARM)]),
        "steps": steps_of(config, len(splits["train"])),
    }
    frozen = Frozen(
        digest=digest(contents),
        options=options,
        sizes={part: len(data) for part, data in splits.items()},
        prompts={part: len(set(data.prompt_ids)) for part, data in splits.items()},
        **contents,  # type: ignore[arg-type]
    )
    write_text(folder / FROZEN_FILE, frozen.to_json() + "\n")
    return frozen


def _splits(options: ComparisonOptions) -> dict[str, PreferenceDataset]:
    named = [override for override in options.overrides if override.lstrip("+").startswith("data.")]
    data = typed(compose([*named, "model=custom", "model.path=x", "output_dir=."]), TrainConfig).data
    train = load_pairs(options.train, data)
    if options.val is None:
        train, held_out = train.split_by_prompt(HELD_OUT, data.split_seed)
    else:
        held_out = load_pairs(options.val, data)
    if options.test is None:
        sizes = options.val_pairs, options.test_pairs
        share = 0.5 if sizes[0] is None or sizes[1] is None else sizes[1] / (sizes[0] + sizes[1])
        val, test = held_out.split_by_prompt(share, data.split_seed)
    else:
        val, test = held_out, load_pairs(options.test, data)
    # Tuning chooses by the validation pairs, so a shared prompt would make the test scores optimistic.
    require_disjoint_prompts(train, val)
    for name, other in (("training", train), ("validation", val)):
        if not set(other.prompt_ids).isdisjoint(test.prompt_ids):
            raise DataError(
                f"test prompts must be untouched, but some are in the {name} pairs; remove them from --test"
            )
    return {
        "train": train if options.pairs is None else train.subset(options.pairs, data.split_seed),
        "val": _limited(val, options.pairs_per_prompt, options.val_pairs, data.split_seed),
        "test": _limited(test, options.pairs_per_prompt, options.test_pairs, data.split_seed),
    }


def _limited(data: PreferenceDataset, per_prompt: int | None, most: int | None, seed: int) -> PreferenceDataset:
    """A random subset of at most `most` pairs, in their order, with at most `per_prompt` pairs of each prompt."""
    if per_prompt is not None:
        seen: Counter[str] = Counter()
        kept = []
        for position in np.random.default_rng(seed).permutation(len(data)).tolist():
            seen[data.prompt_ids[position]] += 1
            if seen[data.prompt_ids[position]] <= per_prompt:
                kept.append(position)
        data = PreferenceDataset(data[position] for position in sorted(kept))
    return data if most is None else data.subset(most, seed)
