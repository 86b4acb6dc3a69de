"""Builders of torch's optimizers, and of this package's own except Muon."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from rm_optimizer.optim.lion import Lion
from rm_optimizer.optim.param_groups import ParamPartition
from rm_optimizer.optim.sam import SAM
from rm_optimizer.optim.schedule_free import ScheduleFreeAdamW
from rm_optimizer.schema.optimizers import (
    AdafactorConfig,
    AdamConfig,
    LionConfig,
    SAMConfig,
    ScheduleFreeConfig,
    SGDConfig,
)


def build_adam(params: ParamPartition, config: AdamConfig, num_steps: int | None) -> Optimizer:
    """`torch.optim.Adam`."""
    return torch.optim.Adam(params.groups(config), lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def build_adamw(params: ParamPartition, config: AdamConfig, num_steps: int | None) -> Optimizer:
    """`torch.optim.AdamW`."""
    return torch.optim.AdamW(params.groups(config), lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def build_sgd(params: ParamPartition, config: SGDConfig, num_steps: int | None) -> Optimizer:
    """`torch.optim.SGD`."""
    return torch.optim.SGD(params.groups(config), lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)


def build_adafactor(params: ParamPartition, config: AdafactorConfig, num_steps: int | None) -> Optimizer:
    """`torch.optim.Adafactor`."""
    return torch.optim.Adafactor(params.groups(config), lr=config.lr, beta2_decay=config.beta2_decay, d=config.clip)


def build_lion(params: ParamPartition, config: LionConfig, num_steps: int | None) -> Optimizer:
    """`Lion` of this package."""
    return Lion(params.groups(config), lr=config.lr, beta1=config.beta1, beta2=config.beta2)


def build_sam(params: ParamPartition, config: SAMConfig, num_steps: int | None) -> Optimizer:
    """`SAM` of this package, with `torch.optim.AdamW` as its base."""
    return SAM(build_adamw(params, config, num_steps), rho=config.rho, adaptive=config.adaptive)


def build_schedule_free(params: ParamPartition, config: ScheduleFreeConfig, num_steps: int | None) -> Optimizer:
    """`ScheduleFreeAdamW` of this package."""
    return ScheduleFreeAdamW(
        params.groups(config),
        lr=config.lr,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_lr_power=config.weight_lr_power,
    )
