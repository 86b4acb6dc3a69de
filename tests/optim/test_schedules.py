"""Schedules over the real number of steps."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from rm_optimizer.errors import ConfigError
from rm_optimizer.optim import build_schedule
from rm_optimizer.schema.optimizers import ScheduleConfig, ScheduleName

PEAK = 0.4
DECAYING = [ScheduleName.linear, ScheduleName.cosine, ScheduleName.wsd]


def config_of(name, **options):
    decay = {"decay_ratio": 0.2} if name is ScheduleName.wsd else {}
    return ScheduleConfig(name=name, **decay, **options)


def trajectory(config, num_steps):
    """Learning rate of each step, and after the last."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=PEAK)
    schedule = build_schedule(optimizer, config, num_steps)
    lrs = [optimizer.param_groups[0]["lr"]]
    for _ in range(num_steps):
        optimizer.step()
        schedule.step()
        lrs.append(optimizer.param_groups[0]["lr"])
    return lrs


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.parametrize("num_steps", [1, 2, 7, 479])
@pytest.mark.parametrize("lowest", [0.0, 0.1])
def test_the_rate_after_the_last_step_is_exactly_the_minimum(name, num_steps, lowest):
    assert trajectory(config_of(name, min_lr_ratio=lowest), num_steps)[-1] == lowest * PEAK


@pytest.mark.parametrize("name", list(ScheduleName))
@pytest.mark.parametrize("options", [{"warmup_steps": 30}, {"warmup_ratio": 30 / 200}])
def test_the_peak_is_reached_right_after_warm_up(name, options):
    lrs = trajectory(config_of(name, **options), 200)
    assert lrs[:30] == pytest.approx([PEAK * (k + 1) / 31 for k in range(30)])
    assert lrs[30] == PEAK
    assert max(lrs) == PEAK


@pytest.mark.parametrize("name", DECAYING)
def test_the_rate_never_rises_after_warm_up(name):
    lrs = trajectory(config_of(name, warmup_steps=5), 60)[5:]
    assert all(a >= b for a, b in pairwise(lrs))


def test_constant_stays():
    assert set(trajectory(config_of(ScheduleName.constant), 20)) == {PEAK}


def test_linear_is_a_line_and_cosine_half_a_cosine():
    linear, cosine = (trajectory(config_of(name, min_lr_ratio=0.1), 8) for name in DECAYING[:2])
    assert linear == pytest.approx([PEAK * (1 - 0.9 * k / 8) for k in range(9)])
    assert cosine == pytest.approx([PEAK * (0.1 + 0.9 * (1 + math.cos(math.pi * k / 8)) / 2) for k in range(9)])


def test_wsd_is_stable_until_its_decay():
    lrs = trajectory(config_of(ScheduleName.wsd, warmup_steps=10), 100)
    assert set(lrs[10:81]) == {PEAK}
    assert lrs[81:] == pytest.approx([PEAK * (1 - math.sqrt(k / 20)) for k in range(1, 21)])


def test_cosine_after_warm_up_equals_torchs():
    ours = trajectory(config_of(ScheduleName.cosine, warmup_steps=10), 50)[10:]
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=PEAK)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    expected = [PEAK]
    for _ in range(40):
        optimizer.step()
        torchs.step()
        expected.append(optimizer.param_groups[0]["lr"])
    assert ours == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("ratio", [0.07, 0.29, 0.03])
def test_the_ratio_rounds_up_and_whole_numbers_stay(ratio):
    lrs = trajectory(config_of(ScheduleName.linear, warmup_ratio=ratio), 100)
    assert lrs.index(PEAK) == round(100 * ratio)


def test_a_warm_up_as_long_as_the_run_is_refused():
    sentence = "schedule.warmup_steps must be shorter than the run of 50 steps, got 50 steps"
    with pytest.raises(ConfigError, match=sentence):
        trajectory(config_of(ScheduleName.cosine, warmup_steps=50), 50)


@pytest.mark.parametrize("num_steps", [1, 2, 50])
def test_a_ratio_leaves_a_step_at_the_peak_however_short_the_run(num_steps):
    assert max(trajectory(config_of(ScheduleName.linear, warmup_ratio=0.99), num_steps)) == PEAK


def test_a_warm_up_into_the_decay_is_refused():
    with pytest.raises(
        ConfigError, match="warmup_steps must leave room before step 40, where the decay of a run of 50"
    ):
        trajectory(config_of(ScheduleName.wsd, warmup_steps=45), 50)
