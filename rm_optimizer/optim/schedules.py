"""Learning-rate schedules, stepped once after each optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from rm_optimizer.schema.checks import require
from rm_optimizer.schema.optimizers import ScheduleConfig, ScheduleName


def build_schedule(optimizer: Optimizer, config: ScheduleConfig, num_steps: int) -> LRScheduler:
    """The schedule of every group's learning rate over a run of `num_steps` optimizer steps.

    Step ``k = 0 … num_steps - 1`` has the learning rate ``lr * lr_factor(k)``. The factor of the ``w`` warm-up steps is
    ``(k + 1) / (w + 1)``, and step ``w`` is the first at the peak. After the last step the rate is exactly
    ``min_lr_ratio * lr``.

    Args:
        optimizer: optimizer whose groups' learning rates are the peaks.
        config: shape of the schedule.
        num_steps: optimizer steps of the whole run, resumed parts included.

    Raises:
        ConfigError: if warm-up and decay do not fit into the run.
    """
    return LambdaLR(optimizer, lr_factor(config, num_steps))


def lr_factor(config: ScheduleConfig, num_steps: int) -> Callable[[int], float]:
    """The learning rate of step ``k`` relative to the peak, for ``k`` from 0 to `num_steps` and beyond.

    Raises:
        ConfigError: if warm-up and decay do not fit into the run.
    """
    # Without rounding first, 0.07 * 100 = 7.000000000000001 would become 8. A short run still has one step at the peak.
    warmup = min(math.ceil(round(config.warmup_ratio * num_steps, 9)), num_steps - 1)
    if config.warmup_steps is not None:
        warmup = config.warmup_steps
    start = num_steps if config.decay_ratio is None else num_steps - max(1, round(config.decay_ratio * num_steps))
    option = "schedule.warmup_steps" if config.warmup_steps is not None else "schedule.warmup_ratio"
    room = f"leave room before step {start}, where the decay of a run of {num_steps} steps starts"
    require(warmup < num_steps, option, f"be shorter than the run of {num_steps} steps", f"{warmup} steps")
    require(warmup <= start, option, room, f"{warmup} steps")
    start = start if config.name is ScheduleName.wsd else warmup
    shape, lowest = SHAPES[config.name], config.min_lr_ratio

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = (step - start) / (num_steps - start)
        return lowest + (1 - lowest) * shape(min(max(progress, 0.0), 1.0))

    return factor


SHAPES: dict[ScheduleName, Callable[[float], float]] = {
    ScheduleName.constant: lambda progress: 1.0,
    ScheduleName.linear: lambda progress: 1.0 - progress,
    # Half a cosine (Loshchilov & Hutter, 2017, Eq. 5).
    ScheduleName.cosine: lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    # Haegele et al. (2024, arXiv 2405.18392) found this decay best for the end of a constant schedule.
    ScheduleName.wsd: lambda progress: 1.0 - math.sqrt(progress),
}
