from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks import limit


def parts_of_steps(device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Parts of the last two of three steps of 1 s, 2 s apart; the 10 s of reading a profile are none of them."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    events = [
        SimpleNamespace(name=name, time_range=SimpleNamespace(start=0, end=end), self_cpu_time_total=3e5)
        for name, end in (("autograd::engine", 5e5), ("Optimizer.step", 7e5), ("aten::mm", 4e5))
    ]

    class Profile:
        def __init__(self, **options: object) -> None: ...

        def start(self) -> None: ...

        def stop(self) -> None: ...

        def events(self) -> list[SimpleNamespace]:
            now[0] += 10.0
            return events

    monkeypatch.setattr(limit, "profile", Profile)
    watched = limit.StepProfile(1)
    for step in range(3):
        now[0] += 2.0
        module = SimpleNamespace(device=torch.device(device))
        watched.on_train_batch_start(SimpleNamespace(global_step=step), module, None, step)
        now[0] += 1.0
        watched.on_train_batch_end()
    return watched.shares()


def test_the_gap_before_every_profiled_step_is_waited(monkeypatch: pytest.MonkeyPatch):
    expected = {"part_wait": 2.0, "part_dispatch": 0.5, "part_products": 0.3, "part_optimizer": 0.2}
    assert parts_of_steps("cpu", monkeypatch) == pytest.approx(expected)


def test_nothing_is_profiled_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    assert parts_of_steps("cuda", monkeypatch) == {}
