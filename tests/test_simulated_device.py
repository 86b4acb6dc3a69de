"""Everything on a simulated accelerator gives the CPU's numbers, and waits for the device no more than it must."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from rm_optimizer import train_reward_model
from rm_optimizer.core.tokens.loader import create_dataloader
from rm_optimizer.errors import ConfigError, OutOfMemory
from rm_optimizer.optim import OPTIMIZERS
from rm_optimizer.records.accelerator import accelerators
from rm_optimizer.records.randomness import random_state, set_random_state
from rm_optimizer.training.fitting import build_trainer
from rm_optimizer.training.lightning_module import RewardModelLightning, RunModule
from rm_optimizer.training.preparation import Run
from tests import simulated_paths as paths
from tests.builders import tiny_reward_model
from tests.simulated_device import SIM, Module, plugged
from tests.simulated_device import simulated as simulated

ROUNDING = 5e-6
"""Largest relative difference: sums in another order in float32, and of rewards that are near to each other."""
COMBINATIONS = list(itertools.product(paths.ADAPTER, ("llama", "bert"), ("32-true", "bf16-mixed")))
SLOW = {name for name in paths.PATHS if name.startswith("analyze")} - {"analyze layers"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained on the CPU."""
    return paths.whole_run(tmp_path_factory.mktemp("source"), "hardware=cpu")


@pytest.fixture
def ones(simulated: Module) -> Tensor:
    return torch.ones(3, device="sim")


# --- the device


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x, y: x + y,
        lambda x, y: y.add_(x),
        lambda x, y: torch.tensor(0.0).add_(x.sum()),
        lambda x, y: x @ y,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: x.index_add(0, torch.tensor([0]), x[:1]),
        lambda x, y: torch.nn.functional.linear(x[None], y[None]),
        lambda x, y: torch.optim.AdamW([torch.nn.Parameter(x)]).add_param_group({"params": [x]}) or x.addcmul(x, y),
        lambda x, y: torch.rand(3, device="sim", generator=torch.Generator()),
        lambda x, y: torch.randn(3, generator=torch.Generator("sim")),
        lambda x, y: torch.randperm(3, generator=torch.Generator("sim")),
        lambda x, y: y.normal_(generator=torch.Generator("sim")),
        lambda x, y: torch.multinomial(y, 1, generator=torch.Generator("sim")),
    ],
)
def test_an_operation_that_mixes_devices_raises(ones, mixed):
    with pytest.raises(RuntimeError, match=r"same device|Expected a '(sim|cpu)' device type"):
        mixed(ones, torch.ones(3))


def test_single_numbers_and_indices_of_the_cpu_may_take_part(ones):
    assert (ones + torch.tensor(2.0))[torch.tensor([0, 1])].tolist() == [3.0, 3.0]
    assert ones.device == (ones * 2).device == torch.device("sim:0") != torch.ones(1).device


def test_what_makes_the_host_wait_is_counted(ones, simulated):
    def waits(compute) -> list[str]:
        simulated.waits.clear()
        compute()
        return sorted(name for name, _ in simulated.waits.elements())

    assert waits(lambda: (ones * 2 + ones.sum()).relu()) == []
    for compute in (ones[0].item, lambda: bool(ones[0]), lambda: float(ones[0])):
        assert waits(compute) == ["_local_scalar_dense"]
    assert waits(ones.cpu) == waits(ones.tolist) == ["copy to the host"]
    assert waits(ones.nonzero) == ["nonzero"]
    assert waits(lambda: ones[ones > 0]) == ["index", "nonzero"]
    assert waits(lambda: torch.tensor([1.0], device="sim")) == waits(lambda: torch.ones(1).to("sim")) == ["upload"]
    assert waits(lambda: torch.ones(1).to("sim", non_blocking=True)) == []
    assert waits(simulated.current_stream().synchronize) == ["synchronize"]


def test_a_copy_that_does_not_wait_has_no_numbers_before_the_device_was_synchronized(ones, simulated):
    copied = ones.to("cpu", non_blocking=True)
    target = torch.zeros(3).pin_memory()
    target.copy_(ones, non_blocking=True)
    assert copied.isnan().all()
    assert target.isnan().all()
    simulated.synchronize()
    assert copied.tolist() == target.tolist() == [1.0, 1.0, 1.0]


def test_generators_of_the_device_draw_apart_from_the_cpu(ones, caplog):
    def drawn(generator: torch.Generator | None) -> list[float]:
        return torch.rand(2, device="sim", generator=generator).tolist()

    own = torch.Generator("sim").manual_seed(3)
    assert own.device == SIM
    assert drawn(own) == torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist()
    torch.manual_seed(5)
    state, first = random_state(), drawn(None)
    assert torch.rand(2).tolist() == first  # the same seed, another generator
    assert drawn(None) != first
    set_random_state(state)
    assert drawn(None) == first
    set_random_state(state | {"accelerator": state["accelerator"] * 3})
    assert drawn(None) != first
    assert "has 3 random generators of accelerators and this process 1, so they keep their own" in caplog.text


def test_memory_is_counted_and_ends(ones, simulated):
    before = simulated.allocated
    kept = torch.ones(1000, device="sim")
    view = kept[:10]
    del kept
    assert simulated.allocated == before + 4000
    del view
    assert (simulated.allocated, simulated.peak >= before + 4000) == (before, True)
    simulated.limit = before + 3999
    assert simulated.mem_get_info()[0] == 3999
    with pytest.raises(torch.OutOfMemoryError, match="4000 bytes"):
        torch.ones(1000, device="sim")
    assert simulated.allocated == before


def test_autocast_gives_the_types_of_the_cpu(ones):
    x = torch.rand(2, 2)
    layers = torch.nn.functional
    results = [
        lambda x: x @ x,
        lambda x: layers.linear(x, x),
        lambda x: x.sum() + layers.softmax(x, 0),
        lambda x: torch.bmm(x[None], x[None]),
        lambda x: layers.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    ]
    for compute in results:
        found = []
        for each in (x, x.to("sim")):
            with torch.autocast(each.device.type, torch.bfloat16):
                found.append(compute(each))
        assert found[0].dtype == found[1].dtype
        assert paths.largest_difference(*found) < 2**-7


def test_the_package_sees_the_device_only_while_it_is_plugged_in():
    assert accelerators() == []
    with plugged():
        assert accelerators() == [SIM]
    assert not torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() is None


# --- training


def assert_same_training(optimizer: str, adapter: str, family: str, precision: str) -> None:
    if OPTIMIZERS[optimizer].extra == "optimizers":
        pytest.importorskip("pytorch_optimizer", reason="the optimizers extra is not installed")
    options = (paths.prepared(family, adapter), optimizer, f"hardware.precision={precision}")
    on_cpu = paths.trained(*options)
    with plugged() as device:
        on_device = paths.trained(*options)
        assert device.peak > 0
    # a moment in eight bits may be rounded to the next level, which moves an update of 1e-3 by a 256th
    limit = 1e-3 if optimizer.endswith("8bit") else ROUNDING  # rounding may move a moment to the next of 256 values
    assert paths.largest_difference(on_cpu, on_device) < limit


@pytest.mark.parametrize(("number", "optimizer"), list(enumerate(sorted(OPTIMIZERS))))
def test_every_optimizer_trains_as_on_the_cpu(number, optimizer):
    assert_same_training(optimizer, *COMBINATIONS[(number + 2) % len(COMBINATIONS)])  # all of them, Muon in bf16


@pytest.mark.slow
@pytest.mark.parametrize(("number", "optimizer"), list(enumerate(sorted(OPTIMIZERS))))
def test_every_other_combination_trains_as_on_the_cpu(number, optimizer):
    for other in range(1, len(COMBINATIONS)):
        assert_same_training(optimizer, *COMBINATIONS[(number + 2 + other) % len(COMBINATIONS)])


def test_half_weights_are_rounded_on_the_device_as_on_the_cpu():
    whole = paths.prepared("llama", "none")
    model = deepcopy(whole.module.model).to(torch.bfloat16)
    half = replace(whole, module=RunModule(model, whole.config, whole.datamodule))
    found = []
    for place in (contextlib.nullcontext(), plugged()):
        with place as device:
            torch.manual_seed(0)
            found.append(paths.trained(half, "muon"))
    assert device.peak > 0
    assert paths.largest_difference(*found) < ROUNDING
    assert found[0]["weights"]["model.model.embed_tokens.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("sharing", ["on", "off"])
def test_a_step_waits_once_and_for_a_mask_of_the_library_in_each_padded_pass(sharing):
    run = paths.prepared("llama", "none", f"batching.prefix_sharing={sharing}")
    with plugged() as device:
        counts = []
        for steps in (1, 3):
            device.waits.clear()
            paths.fitted(run, steps=steps)
            counts.append(device.waits.copy())
    passes = sum(len(batch.micro) for batch in run.datamodule.steps(1, 3))
    assert sum((counts[1] - counts[0]).values()) == 2 + (passes if sharing == "off" else 0), counts[1] - counts[0]


def test_a_scored_batch_waits_once_and_where_the_library_looks_at_its_mask(source):
    with plugged() as device:
        model = paths.moved(source)
        batches = [(["a", "b b b b"], ["c", "d e"]), ([paths.PROMPT] * len(paths.RESPONSES), paths.RESPONSES)]
        counts = []
        for prompts, responses in batches:
            device.waits.clear()
            model.score(prompts, responses)
            counts.append(sum(device.waits.values()))
    assert counts == [1 + 2, 1 + 1]  # transformers looks whether a mask has zeros, twice if it has some


def test_a_plain_trainer_trains_and_validates_as_on_the_cpu():
    def fitted() -> paths.Numbers:
        module = RewardModelLightning(tiny_reward_model("llama", attn_implementation="eager"), learning_rate=1e-3)
        loader = create_dataloader(paths.pairs(), module.model, 4, shuffle=False)
        trainer = build_trainer(paths.config(Path("unused")).hardware, [], [], 3)
        trainer.limit_val_batches = 1.0
        trainer.fit(module, loader, loader)
        return {"metrics": {name: value.item() for name, value in trainer.callback_metrics.items()}}

    on_cpu = fitted()
    with plugged():
        on_device = fitted()
    assert {"train/loss", "val/loss", "val/accuracy"} <= on_cpu["metrics"].keys()
    assert paths.largest_difference(on_cpu, on_device) < ROUNDING


@pytest.mark.parametrize("starts_on_the_device", [True, False])
def test_a_run_continues_on_the_other_device(source, tmp_path, starts_on_the_device):
    class Killed(Exception): ...

    class Kill(Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
            if trainer.global_step == 2:
                raise Killed

    here, there = (plugged, contextlib.nullcontext) if starts_on_the_device else (contextlib.nullcontext, plugged)
    with here(), pytest.raises(Killed):
        train_reward_model(paths.config(tmp_path / "run"), callbacks=[Kill()])
    with there():
        train_reward_model(paths.config(tmp_path / "run", "resume=auto"))
    assert paths.largest_difference(paths.run_numbers(source), paths.run_numbers(tmp_path / "run")) < ROUNDING


# --- everything else


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in paths.PATHS])
def test_numbers_are_the_cpus(source, tmp_path, name):
    found = []
    for folder, place in (("cpu", contextlib.nullcontext()), ("device", plugged())):
        (tmp_path / folder).mkdir()
        with place as device:
            before = 0 if device is None else device.peak
            found.append(paths.PATHS[name](tmp_path / folder, source))
    assert device.peak > before  # it was used
    assert paths.largest_difference(*found) < ROUNDING


# --- memory


@pytest.fixture(params=["on", "off"])
def tight(request: pytest.FixtureRequest) -> Iterator[tuple[Run, str, int]]:
    """A run of one pass a step, and the bytes in which it does not fit."""
    sharing = f"batching.prefix_sharing={request.param}"
    run = paths.prepared("llama", "none", sharing, "batching.micro_token_budget=9999")
    with plugged() as device:
        lasting = device.allocated + 8 * sum(each.numel() for each in run.module.model.parameters())
        paths.fitted(run, "sgd", steps=1)
        yield run, sharing, lasting + int(0.7 * (device.peak - lasting))


def first_gradient(run: Run, *overrides: str) -> Tensor:
    found: list[Tensor] = []

    def keep(module: RunModule) -> Tensor:
        found.append(torch.cat([each.grad.flatten().cpu() for each in module.parameters() if each.grad is not None]))
        return torch.zeros((), device=module.device)

    with mock.patch.object(RunModule, "_clip", keep):
        paths.fitted(run, "sgd", *overrides, steps=1)
    return found[0]


def test_a_pass_that_does_not_fit_names_the_tokens_that_do(tight, simulated):
    run, sharing, limit = tight
    simulated.limit = limit
    says = r"set batching\.micro_token_budget=(\d+), or hardware\.on_out_of_memory=halve"
    with pytest.raises(OutOfMemory, match=says) as told:
        paths.fitted(run, "sgd", steps=1)
    budget = re.search(says, str(told.value))[1]  # type: ignore[index]
    smaller = paths.prepared("llama", "none", sharing, f"batching.micro_token_budget={budget}")
    paths.fitted(smaller, "sgd", steps=1)


def test_halved_passes_go_on_with_the_same_gradient(tight, simulated, caplog):
    run, _, limit = tight
    whole = first_gradient(run)
    gc.collect()
    simulated.limit = limit
    halved = first_gradient(run, "hardware.on_out_of_memory=halve")
    assert paths.largest_difference(whole, halved) < ROUNDING
    assert "larger passes are halved from now on" in caplog.text


def test_what_cannot_be_made_smaller_is_told(tight, simulated):
    run = tight[0]
    simulated.limit = simulated.allocated + 8 * sum(each.numel() for each in run.module.model.parameters())
    with pytest.raises(OutOfMemory, match=r"the smallest pass, of \d+ tokens, does not fit"):
        paths.fitted(run, "sgd", "hardware.on_out_of_memory=halve", steps=1)


def test_an_optimizer_whose_state_does_not_fit_is_named(simulated):
    run = paths.prepared("llama", "none")
    full = mock.patch("torch.optim.AdamW.step", side_effect=torch.OutOfMemoryError("none left"))
    with full, pytest.raises(OutOfMemory, match=r"the state of optimizer=adamw does not fit .* none left; train an"):
        paths.fitted(run, steps=1)


def test_halving_is_refused_where_other_devices_would_wait():
    with pytest.raises(ConfigError, match=r"hardware\.on_out_of_memory must be stop where several devices"):
        paths.config(Path("unused"), "hardware.on_out_of_memory=halve", "hardware.devices=2")
