"""Composition of presets and overrides to typed options, in one process or the next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rm_optimizer.errors import ConfigError
from rm_optimizer.schema.implied import completed, refuse_unread
from rm_optimizer.schema.store import register

PACKAGE = Path(__file__).resolve().parent.parent
ConfigT = TypeVar("ConfigT")


def config_root() -> str:
    """Directory of the YAML presets: `rm_optimizer/configs` in a wheel, `configs` in a checkout."""
    shipped = PACKAGE / "configs"
    return str(shipped if shipped.is_dir() else PACKAGE.parent / "configs")


def model_overrides(name: str) -> list[str]:
    """Overrides of a model preset, or of a model by its path or hub id."""
    if (Path(config_root()) / "model" / f"{name}.yaml").is_file():
        return [f"model={name}"]
    return [f"model.path={name}"]


def compose(overrides: Sequence[str] = (), name: str = "config") -> DictConfig:
    """The configuration that `python -m rm_optimizer.train` would compose from the same overrides.

    Raises:
        ConfigError: if a group, option or value is unknown.

    Example:
        >>> compose(["optimizer=muon", "seed=3"]).seed
        3
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    from rm_optimizer.schema.diagnose import explain
    from rm_optimizer.schema.values import require_switches

    register()
    try:
        with initialize_config_dir(config_root(), version_base="1.3"):
            config = hydra_compose(config_name=name, overrides=completed(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, overrides)) from error
    refuse_unread(overrides, config)
    require_switches(config, overrides)
    return config


def typed(config: DictConfig, kind: type[ConfigT]) -> ConfigT:
    """The composed configuration as dataclasses, every option checked.

    Raises:
        ConfigError: if an option is out of its range, has the wrong type or is missing.
    """
    from hydra.core.hydra_config import HydraConfig

    from rm_optimizer.schema.diagnose import explain
    from rm_optimizer.schema.values import require_finite

    try:
        built = OmegaConf.to_object(config if HydraConfig.initialized() else _without_hydra(config))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, ())) from error
    require_finite(config)
    assert isinstance(built, kind), f"composed {type(built).__name__}, not {kind.__name__}"
    return built


def _without_hydra(config: DictConfig) -> DictConfig:
    """The configuration with `output_dir` missing where Hydra, which is not running, would have chosen it."""
    if not OmegaConf.is_interpolation(config, "output_dir"):
        return config
    checked = config.copy()
    checked.output_dir = "."
    OmegaConf.to_object(checked)  # a mistake elsewhere is named first
    raise ConfigError(
        "output_dir must be given where Hydra does not choose it; add 'output_dir=FOLDER' to the overrides"
    )
