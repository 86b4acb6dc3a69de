"""From presets and overrides to typed options, in one process or the next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf

PACKAGE = Path(__file__).resolve().parent.parent
ConfigT = TypeVar("ConfigT")


def config_root() -> str:
    """Directory of the YAML presets: `rm_optimizer/configs` in a wheel, `configs` in a checkout."""
    shipped = PACKAGE / "configs"
    return str(shipped if shipped.is_dir() else PACKAGE.parent / "configs")


def compose(overrides: Sequence[str] = (), name: str = "config") -> DictConfig:
    """The configuration that `python -m rm_optimizer.train` would compose from the same overrides."""
    from rm_optimizer.schema.store import register

    register()
    with initialize_config_dir(config_root(), version_base="1.3"):
        return hydra_compose(config_name=name, overrides=list(overrides))


def typed(config: DictConfig, kind: type[ConfigT]) -> ConfigT:
    """The composed configuration as dataclasses, every option checked.

    Raises:
        ConfigError: if an option is out of its range.
        omegaconf.errors.OmegaConfBaseException: if a value has the wrong type or is missing.
    """
    built = OmegaConf.to_object(config)
    assert isinstance(built, kind), f"composed {type(built).__name__}, not {kind.__name__}"
    return built
