"""Composition of presets and overrides to typed options, and the dataclasses that Hydra checks them against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rm_optimizer.errors import ConfigError
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from rm_optimizer.schema.checks import require
from rm_optimizer.schema.config import (
    BatchingConfig,
    HardwareConfig,
    LoggerConfig,
    LossConfig,
    ModelConfig,
    TrainConfig,
    TrainingConfig,
)
from rm_optimizer.schema.data import DataConfig
from rm_optimizer.schema.diagnose import explain
from rm_optimizer.schema.landscape import AnalyzeConfig, LandscapeConfig
from rm_optimizer.schema.optimizers import OPTIMIZER_OPTIONS, OptimizerConfig, ScheduleConfig
from rm_optimizer.schema.registry import import_plugins, load_entry_points
from rm_optimizer.schema.rlhf import RLHFConfig, RLHFRunConfig

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

PACKAGE = Path(__file__).resolve().parent.parent
ConfigT = TypeVar("ConfigT")


def completed(overrides: Sequence[str]) -> list[str]:
    """The overrides, with `model=custom` where they name a model by its path and choose no preset.

    The default preset builds a toy, whose learning rate and length suit no other model.

    Raises:
        ConfigError: if an override cannot be read.
    """
    given = by_option(overrides)
    path = given.get("model.path")
    if path is None or path.is_delete() or path.value() is None or "model" in given:
        return list(overrides)
    return [*overrides, "model=custom"]


def by_option(overrides: Sequence[str]) -> dict[str, Override]:
    """Overrides in Hydra's grammar, by option.

    Raises:
        ConfigError: if one cannot be read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return {item.key_or_group: item for item in OverridesParser.create().parse_overrides(list(overrides))}
    except HydraException as error:
        raise ConfigError(explain(error, overrides)) from error


def check_overrides(overrides: Sequence[str], config: DictConfig) -> None:
    """Refuse options that nothing will read, whose field names a condition that the configuration does not meet.

    Of the two learning rates of a model, a run reads the one that `read_rate` names. Of an analysis only the options of
    its landscape are checked, since its overrides also hold all that its run recorded. A number for an option that is
    true or false is refused too, since OmegaConf would take it as true.

    Args:
        overrides: overrides that the user typed; values of presets may be unread.
        config: the composed options.

    Raises:
        ConfigError: naming the option and the one that it needs.
    """
    read = f"model.{read_rate(config)}"
    for option, item in by_option(overrides).items():
        group, _, leaf = option.rpartition(".")
        kind, value = OmegaConf.get_type(OmegaConf.select(config, group) if group else config), item.value()
        if isinstance(value, int | float) and not isinstance(value, bool) and is_dataclass(kind):
            require(get_type_hints(kind).get(leaf) is not bool, option, "be true or false", f"'{value}'")
        if "training" not in config and not option.startswith("landscape."):
            continue
        if option in ("model.adamw_lr", "model.lora_lr") and option != read:
            raise ConfigError(
                f"{option} is not read with adapter={config.adapter.kind.value}; set {read}, which the optimizer "
                "presets scale, or optimizer.lr"
            )
        if not OmegaConf.select(config, option):
            continue  # set to nothing
        owner: Any = config
        for name in option.split("."):
            kind = OmegaConf.get_type(owner)
            if not is_dataclass(kind):
                break
            needs = {item.name: item.metadata.get("needs", "") for item in fields(kind)}.get(name, "")
            for need in filter(None, needs.split(",")):
                _require_met(option, option.rpartition(f".{name}")[0], need, owner)
            owner = OmegaConf.select(owner, name)


def _require_met(option: str, group: str, need: str, owner: DictConfig) -> None:
    """Raise unless one alternative of a field's condition is met by the options of its group."""
    values: dict[str, list[str]] = {}
    for each in need.lstrip("!").split("|"):
        name, _, wanted = each.partition("=")
        found = OmegaConf.select(owner, name)
        if str(found) == wanted if wanted else bool(found) != need.startswith("!"):
            return
        values.setdefault(name, []).append(wanted)
    asked = " or ".join(f"{group}.{name}" + f"={', '.join(each)}" * any(each) for name, each in values.items())
    condition = f"while {asked} is null" if need.startswith("!") else f"with {asked}"
    got = next(iter(values))
    raise ConfigError(
        f"{option} has an effect only {condition}, got {group}.{got}={OmegaConf.select(owner, got)}; leave {option} out"
    )


def config_root() -> str:
    """Directory of the YAML presets: `rm_optimizer/configs` in a wheel, `configs` in a checkout."""
    shipped = PACKAGE / "configs"
    return str(shipped if shipped.is_dir() else PACKAGE.parent / "configs")


def described(file: str) -> Any:
    """Content of a YAML file of `configs` that is no preset, such as a layout."""
    # OmegaConf takes 15 times as long, a quarter of a second for all layouts.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((Path(config_root()) / file).read_text(encoding="utf-8"), Loader=loader)


def model_overrides(name: str) -> list[str]:
    """Overrides of a model preset, or of a model by its path or hub id."""
    is_preset = (Path(config_root()) / "model" / f"{name}.yaml").is_file()
    return [f"model={name}" if is_preset else f"model.path={name}"]


def compose(overrides: str | Sequence[str] = (), name: str = "config") -> DictConfig:
    """The configuration that `python -m rm_optimizer.train` would compose from the same overrides.

    Raises:
        ConfigError: if a group, option or value is unknown.

    Example:
        >>> compose(["optimizer=muon", "seed=3"]).seed
        3
    """
    from hydra import compose as hydra_compose

    overrides = [overrides] if isinstance(overrides, str) else overrides
    with composing(overrides, name):
        config = hydra_compose(config_name=name, overrides=completed(overrides))
    check_overrides(overrides, config)
    return config


@contextmanager
def composing(overrides: Sequence[str], name: str) -> Iterator[None]:
    """Context in which Hydra composes, with the plug-ins that the overrides name; its errors become one sentence.

    Args:
        overrides: overrides, in Hydra's grammar.
        name: name of the main configuration file.
    """
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    register()
    try:
        given = by_option(overrides)
        if "plugins" in given:
            named = given["plugins"].value()
            import_plugins(named if isinstance(named, list) else [str(named)])
        if "optimizer" in given and str(given["optimizer"].value()) not in OPTIMIZER_OPTIONS:
            load_entry_points("optimizer")
        with initialize_config_dir(config_root(), "train" if name == "config" else name, version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(explain(error, overrides)) from error


def typed(config: DictConfig, kind: type[ConfigT]) -> ConfigT:
    """The composed configuration as dataclasses, every option checked.

    Raises:
        ConfigError: if an option is out of its range, has the wrong type or is missing.
    """
    from hydra.core.hydra_config import HydraConfig

    try:
        if not HydraConfig.initialized() and OmegaConf.is_interpolation(config, "output_dir"):
            checked = config.copy()
            checked.output_dir = "."
            OmegaConf.to_object(checked)  # a mistake elsewhere is named first
            raise ConfigError(
                "output_dir must be given where Hydra does not choose it; add 'output_dir=FOLDER' to the overrides"
            )
        built = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, ())) from error
    assert isinstance(built, kind), f"composed {type(built).__name__}, not {kind.__name__}"
    return built


GROUPS = {
    "model": ModelConfig,
    "adapter": AdapterConfig,
    "data": DataConfig,
    "batching": BatchingConfig,
    "loss": LossConfig,
    "schedule": ScheduleConfig,
    "training": TrainingConfig,
    "hardware": HardwareConfig,
    "logger": LoggerConfig,
    "landscape": LandscapeConfig,
    "rlhf": RLHFConfig,
}


def read_rate(config: DictConfig) -> str:
    """Name of the model's learning rate that a composed configuration reads: LoRA factors' with an adapter."""
    has_adapter = OmegaConf.select(config, "adapter") is not None
    return "lora_lr" if has_adapter and config.adapter.kind != AdapterKind.none else "adamw_lr"


def by_adapter(full: float, lora: float, *, _root_: DictConfig) -> float:
    """The number of a preset for training every weight, or the one for LoRA factors, as OmegaConf's root decides."""
    return float(full if read_rate(_root_) == "adamw_lr" else lora)


def peak_lr(full: float, lora: float, *, _root_: DictConfig) -> float:
    """Peak learning rate: one of two multiples, as in `by_adapter`, of the model's rate that the run reads."""
    return by_adapter(full, lora, _root_=_root_) * float(_root_.model[read_rate(_root_)])


def store_optimizer(name: str, options: type[OptimizerConfig]) -> None:
    """Let Hydra compose `optimizer=NAME` from the defaults of its options; a missing rate or decay is AdamW's."""
    from hydra.core.config_store import ConfigStore

    node = OmegaConf.structured(options)
    node.name = name
    for option, value in {"lr": "${peak_lr:1.0,1.0}", "weight_decay": "${by_adapter:0.01,0.0}"}.items():
        if OmegaConf.is_missing(node, option):
            node[option] = value
    ConfigStore.instance().store(group="optimizer", name=name, node=node)


@cache
def register() -> None:
    """Store every schema under `schema/…` and the resolvers of presets; calling twice changes nothing."""
    from hydra.core.config_store import ConfigStore

    OmegaConf.register_new_resolver("either", lambda first, second: second if first is None else first, replace=True)
    OmegaConf.register_new_resolver("by_adapter", by_adapter, replace=True)
    OmegaConf.register_new_resolver("peak_lr", peak_lr, replace=True)
    store = ConfigStore.instance()
    store.store(group="schema", name="train", node=TrainConfig)
    store.store(group="schema", name="analyze", node=AnalyzeConfig)
    store.store(group="schema", name="rlhf_run", node=RLHFRunConfig)
    for group, node in GROUPS.items():
        store.store(group=f"schema/{group}", name="base", node=node)
    for name, node in OPTIMIZER_OPTIONS.items():
        store.store(group="schema/optimizer", name=name, node=node)
