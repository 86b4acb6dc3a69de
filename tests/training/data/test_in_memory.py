"""Batches reach the device from page-locked memory where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rm_optimizer.core.tokens.loader import MacroBatches
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training.data import in_memory
from rm_optimizer.training.preparation import Run
from tests.builders import prepared_run

Build = Callable[..., TrainConfig]


def run_of(config: TrainConfig) -> Run:
    Path(config.output_dir).mkdir(exist_ok=True)
    return prepared_run(config)


@pytest.mark.parametrize("pins", [False, True])
def test_pinning_reaches_the_loader(pins: bool, small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    class Loader:
        def __init__(self, batches: MacroBatches, steps: range, *, pin_memory: bool, **options: Any) -> None:
            asked.append(pin_memory)
            self.batches = [batches[step] for step in steps]

        def __iter__(self) -> Any:
            return iter(self.batches)

    monkeypatch.setattr(in_memory, "MacroBatchLoader", Loader)
    run = run_of(small_config(tmp_path / "run", f"hardware.pin_memory={str(pins).lower()}"))
    next(run.datamodule.steps(0, 1))
    assert asked == [pins]


def test_pairs_are_shuffled_by_the_seed_without_an_order(small_config: Build, tmp_path: Path):
    run = run_of(config := small_config(tmp_path / "run"))
    module = in_memory.PreferenceDataModule(run.datamodule.data, config, run.module.model)
    given, found = (next(each.steps(0, 1)).micro[0].pair_index for each in (run.datamodule, module))
    assert torch.equal(given, found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_pinned_batch_is_the_batch_on_a_gpu(small_config: Build, tmp_path: Path):
    run = run_of(small_config(tmp_path / "run", "hardware.pin_memory=true"))
    batch = next(run.datamodule.steps(0, 1))
    assert all(micro.label.is_pinned() for micro in batch.micro)
    there = batch.to("cuda")
    for ours, theirs in zip(there.micro, batch.micro, strict=True):
        assert torch.equal(ours.pair_index.cpu(), theirs.pair_index)
        assert torch.equal(ours.label.cpu(), theirs.label)
