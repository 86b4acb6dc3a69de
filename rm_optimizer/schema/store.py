"""Registration of the dataclasses with Hydra, so that presets are checked against them."""

from __future__ import annotations

from functools import cache

from omegaconf import DictConfig, OmegaConf

from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
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
from rm_optimizer.schema.landscape import AnalyzeConfig, LandscapeConfig
from rm_optimizer.schema.optimizers import OPTIMIZER_OPTIONS, OptimizerConfig, ScheduleConfig
from rm_optimizer.schema.rlhf import RLHFConfig, RLHFRunConfig

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
    kind = OmegaConf.select(config, "adapter.kind", default=AdapterKind.none)
    return "adamw_lr" if kind == AdapterKind.none else "lora_lr"


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
