"""From a model and options to the optimizer that trains it."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.optim import Optimizer

from rm_optimizer.optim.param_groups import partition
from rm_optimizer.optim.registry import optimizer_info
from rm_optimizer.schema.optimizers import OptimizerConfig


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    *,
    head_names: Collection[str],
    new_module_names: Collection[str] = (),
    num_steps: int | None = None,
) -> Optimizer:
    """The optimizer of a model's trainable parameters, each in exactly one group.

    Groups carry `role` and `algorithm` beside what torch needs; `describe_groups` puts them in words.

    Args:
        model: the model before any distributed wrapper.
        config: the options of a registered optimizer.
        head_names: full names of the reward head's parameters.
        new_module_names: full names of further modules whose matrices count as new.
        num_steps: optimizer steps of the whole run; ademamix needs it for the warm-up of its slow momentum.

    Raises:
        ConfigError: if the optimizer is unknown, it must know a parameter's role and cannot tell, or an option would
            train something else than it says.
        MissingExtra: if the optimizer's package is not installed.
    """
    info = optimizer_info(config.name)
    params = partition(model, head_names=head_names, new_module_names=new_module_names)
    optimizer = info.build(params, config, num_steps)
    for group in optimizer.param_groups:
        group.setdefault("algorithm", config.name)
    return optimizer
