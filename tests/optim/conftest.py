"""A toy reward model with every common role, and the presets as typed options."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rm_optimizer.schema.compose import compose, typed
from rm_optimizer.schema.config import TrainConfig
from rm_optimizer.schema.optimizers import OptimizerConfig

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)


class ToyRewardModel(nn.Module):
    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model = Backbone()
        self.score = nn.Linear(WIDTH, 1)

    def losses(self, targets: list[Tensor]) -> Tensor:
        pairs = zip(self.parameters(), targets, strict=True)
        return 0.05 * torch.stack([(p - target).square().sum() for p, target in pairs]).sum()


HEAD = ("score.weight", "score.bias")


@pytest.fixture
def toy() -> Callable[..., ToyRewardModel]:
    def build(dtype: torch.dtype = torch.float32, seed: int = 0) -> ToyRewardModel:
        torch.manual_seed(seed)
        return ToyRewardModel().to(dtype)

    return build


@pytest.fixture
def head() -> tuple[str, ...]:
    return HEAD


@cache
def _preset(name: str, overrides: tuple[str, ...]) -> TrainConfig:
    given = [f"optimizer={name}", "model.adamw_lr=1e-3", "output_dir=unused", *overrides]
    return typed(compose(given), TrainConfig)


@pytest.fixture
def preset() -> Callable[..., OptimizerConfig]:
    def build(name: str, **options: Any) -> OptimizerConfig:
        overrides = tuple(f"optimizer.{option}={value}" for option, value in options.items())
        return _preset(name, overrides).optimizer

    return build
