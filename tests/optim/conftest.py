"""A toy reward model with every common role, and the presets as typed options."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rm_optimizer.schema.composition import compose, typed
from rm_optimizer.schema.config import TrainConfig
from rm_optimizer.schema.optimizers import OptimizerConfig

WIDTH = 32
WIDE = {"adamw_8bit": 128}
"""Width for an optimizer that treats small matrices in another way."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)


class Backbone(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.layers = nn.ModuleList([Block(width), Block(width)])
        self.norm = nn.LayerNorm(width)


class ToyRewardModel(nn.Module):
    base_model_prefix = "model"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = Backbone(width)
        self.score = nn.Linear(width, 1)

    def losses(self, targets: list[Tensor]) -> Tensor:
        pairs = zip(self.parameters(), targets, strict=True)
        return 0.05 * torch.stack([(p - target).square().sum() for p, target in pairs]).sum()


HEAD = ("score.weight", "score.bias")


@pytest.fixture
def toy(request: pytest.FixtureRequest) -> Callable[..., ToyRewardModel]:
    name = request.getfixturevalue("entry").name if "entry" in request.fixturenames else "adamw"

    def build(dtype: torch.dtype = torch.float32, seed: int = 0, width: int = WIDE.get(name, WIDTH)) -> ToyRewardModel:
        torch.manual_seed(seed)
        return ToyRewardModel(width).to(dtype)

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
