"""What the simulated device proves, on a real one: the numbers are the CPU's up to the rounding of its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from pytorch_lightning.trainer.connectors.accelerator_connector import _AcceleratorConnector

from rm_optimizer.records.accelerator import accelerators
from tests import simulated_paths as paths

ROUNDING = 1e-2
"""Largest relative difference: kernels that sum in another order, through optimizers that amplify it."""


@contextmanager
def unplugged() -> Iterator[None]:
    """Context in which this process sees the processor alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        patch.setattr(torch.accelerator, "device_count", lambda: 0)
        patch.setattr(torch.accelerator, "is_available", lambda: False)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(_AcceleratorConnector, "_choose_auto_accelerator", staticmethod(lambda: "cpu"))
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained on the CPU."""
    with unplugged():
        return paths.whole_run(tmp_path_factory.mktemp("source"), "hardware=cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", paths.PATHS)
def test_numbers_are_the_cpus(source, tmp_path, name):
    module, found = torch.get_device_module(accelerators()[0]), []
    for folder, place in (("cpu", unplugged()), ("device", nullcontext())):
        (tmp_path / folder).mkdir()
        module.reset_peak_memory_stats()
        before = module.max_memory_allocated()
        with place:
            found.append(paths.PATHS[name](tmp_path / folder, source))
        assert (module.max_memory_allocated() > before) == (folder == "device")
    assert paths.largest_difference(*found) < ROUNDING
