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
from rm_optimizer.schema.optimizers import (
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    AdEMAMixConfig,
    LionConfig,
    MARSConfig,
    MuonConfig,
    OptimizerConfig,
    ProdigyConfig,
    SAMConfig,
    ScheduleConfig,
    ScheduleFreeConfig,
    ScionConfig,
    SGDConfig,
    ShampooConfig,
    SOAPConfig,
)
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
OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "adam": AdamConfig,
    "adamw": AdamWConfig,
    "sgd": SGDConfig,
    "muon": MuonConfig,
    "lion": LionConfig,
    "adafactor": AdafactorConfig,
    "sam": SAMConfig,
    "schedulefree": ScheduleFreeConfig,
    "soap": SOAPConfig,
    "ademamix": AdEMAMixConfig,
    "prodigy": ProdigyConfig,
    "mars": MARSConfig,
    "scion": ScionConfig,
    "shampoo": ShampooConfig,
}


def has_adapter(config: DictConfig) -> bool:
    """True if a composed configuration trains LoRA factors."""
    kind = OmegaConf.select(config, "adapter.kind", default=AdapterKind.none)
    return bool(kind != AdapterKind.none)


def by_adapter(full: float, lora: float, *, _root_: DictConfig) -> float:
    """The number of a preset that applies, of two.

    Args:
        full: value for training every weight.
        lora: value for training LoRA factors.
        _root_: the whole configuration, which OmegaConf passes.
    """
    return float(lora if has_adapter(_root_) else full)


def peak_lr(full: float, lora: float, *, _root_: DictConfig) -> float:
    """Peak learning rate: a multiple of the one that suits AdamW on the model, or on its LoRA factors.

    Args:
        full: factor on `model.adamw_lr`, where every weight trains.
        lora: factor on `model.lora_lr`, where LoRA factors train.
        _root_: the whole configuration, which OmegaConf passes.
    """
    if has_adapter(_root_):
        return float(lora) * float(_root_.model.lora_lr)
    return float(full) * float(_root_.model.adamw_lr)


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
    for name, node in OPTIMIZERS.items():
        store.store(group="schema/optimizer", name=name, node=node)
