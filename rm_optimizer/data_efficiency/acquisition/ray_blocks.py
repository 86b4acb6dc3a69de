"""Blocks of a pool computed by workers of a Ray cluster, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch

from rm_optimizer.experiments.trial import connected_ray

ResultT = TypeVar("ResultT")


def on_ray(
    compute: Callable[..., ResultT], model: Any, tasks: Iterable[tuple[Any, ...]], num_workers: int
) -> Iterator[ResultT]:
    """Results of `compute(model, *task)` in the order of the tasks, by workers that receive the model once.

    Args:
        compute: function in a module that the workers can import.
        model: model that all tasks share.
        tasks: further arguments of each task.
        num_workers: tasks at a time, positive; each uses a GPU if this machine has one.

    Raises:
        MissingExtra: if Ray is not installed.
    """
    ray = connected_ray()
    remote = ray.remote(num_cpus=1, num_gpus=1 if torch.cuda.is_available() else 0)(_computed)
    shared = ray.put(model)
    left = iter(tasks)
    waiting = deque(remote.remote(compute, shared, task) for task in islice(left, num_workers))
    while waiting:
        yield ray.get(waiting.popleft())
        waiting.extend(remote.remote(compute, shared, task) for task in islice(left, 1))


def _computed(compute: Callable[..., ResultT], model: Any, task: tuple[Any, ...]) -> ResultT:
    return compute(model, *task)
