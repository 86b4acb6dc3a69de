"""Options that others imply, and options that others make unused. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from rm_optimizer.errors import ConfigError
from rm_optimizer.schema.store import has_adapter


def completed(overrides: Sequence[str]) -> list[str]:
    """The overrides, with `model=custom` where they name a model by its path and choose no preset.

    The default preset builds a toy, whose learning rate and length suit no other model.

    Raises:
        hydra.errors.HydraException: if an override cannot be read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = {item.key_or_group: item for item in OverridesParser.create().parse_overrides(list(overrides))}
    path = given.get("model.path")
    if path is None or path.is_delete() or path.value() is None or "model" in given:
        return list(overrides)
    return [*overrides, "model=custom"]


def refuse_unread_rates(overrides: Sequence[str], config: DictConfig) -> None:
    """Refuse the learning rate of full fine-tuning with an adapter, and LoRA's without one, since it would not be used.

    Raises:
        ConfigError: naming the option that is read.
    """
    adapter = OmegaConf.select(config, "adapter.kind")
    unread, read = ("adamw_lr", "lora_lr") if has_adapter(config) else ("lora_lr", "adamw_lr")
    for line in overrides:
        if line.lstrip("+").startswith(f"model.{unread}="):
            raise ConfigError(
                f"model.{unread} is not read with adapter={getattr(adapter, 'value', adapter)}; set model.{read}, "
                "which the optimizer presets scale, or optimizer.lr"
            )
