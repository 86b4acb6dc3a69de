"""Register the dataclasses with Hydra, so that presets are checked against them."""

from __future__ import annotations

from functools import cache

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from rm_optimizer.schema.adapters import AdapterConfig
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


@cache
def register() -> None:
    """Store every schema under `schema/…` and the `times` resolver; calling twice changes nothing."""
    OmegaConf.register_new_resolver("times", lambda a, b: float(a) * float(b), replace=True)
    store = ConfigStore.instance()
    store.store(group="schema", name="train", node=TrainConfig)
    store.store(group="schema", name="analyze", node=AnalyzeConfig)
    for group, node in GROUPS.items():
        store.store(group=f"schema/{group}", name="base", node=node)
    for name, node in OPTIMIZERS.items():
        store.store(group="schema/optimizer", name=name, node=node)
