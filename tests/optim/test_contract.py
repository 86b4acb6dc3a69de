"""What every registered optimizer keeps."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from copy import deepcopy

import pytest
import torch
from torch import nn

from rm_optimizer.errors import ConfigError, MissingExtra
from rm_optimizer.optim import OPTIMIZERS, build_optimizer, build_schedule, check_compatible, set_train_mode
from rm_optimizer.optim.algorithms import StochasticRounding
from rm_optimizer.schema.config import HardwareConfig
from rm_optimizer.schema.optimizers import OPTIMIZER_OPTIONS, ScheduleConfig, ScheduleName

CONSTANT = ScheduleConfig(name=ScheduleName.constant)
LINEAR = ScheduleConfig(name=ScheduleName.linear, warmup_ratio=0.1)
HARDWARE = {
    "fsdp1": {"strategy": "fsdp"},
    "fsdp2": {"strategy": "fsdp2"},
    "deepspeed": {"strategy": "deepspeed_stage_2"},
    "decay": {},
    "bfloat16": {},
}


@pytest.fixture(params=sorted(OPTIMIZERS))
def entry(request):
    if OPTIMIZERS[request.param].extra == "optimizers":
        pytest.importorskip("pytorch_optimizer", reason="the optimizers extra is not installed")
    return OPTIMIZERS[request.param]


def build(entry, model, preset, head, num_steps=60, **options):
    optimizer = build_optimizer(model, preset(entry.name, **options), head_names=head, num_steps=num_steps)
    set_train_mode(optimizer, True)
    return optimizer


def random_closure(model, generator):
    """Gradients that differ from call to call, whatever the weights."""

    def closure():
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.grad_dtype) * 0.1
        return 0.0

    return closure


def run(optimizer, schedule, closure, steps):
    for _ in range(steps):
        optimizer.step(closure)
        schedule.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def bytes_in(value):
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(bytes_in(v) for v in value.values())
    if isinstance(value, list | tuple):
        return sum(bytes_in(v) for v in value)
    return bytes_in(vars(value)) if hasattr(value, "__dict__") else 0


def test_registry_schemas_and_presets_have_the_same_names(preset):
    assert set(OPTIMIZERS) == set(OPTIMIZER_OPTIONS)
    assert all(preset(name).name == name for name in OPTIMIZERS)


def test_every_parameter_is_in_exactly_one_group(entry, toy, preset, head):
    model = toy()
    optimizer = build(entry, model, preset, head)
    counts = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    assert counts == Counter(id(p) for p in model.parameters())
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_only_matrices_are_decayed(entry, toy, preset, head):
    optimizer = build(entry, toy(), preset, head, weight_decay=0.1)
    decayed = {group["role"] for group in optimizer.param_groups if group["weight_decay"]}
    assert decayed == {"hidden"}


def test_one_group_for_each_role_and_no_more(entry, toy, preset, head):
    optimizer = build(entry, toy(), preset, head)
    roles = Counter(group["role"] for group in optimizer.param_groups)
    vectors_apart = Counter({"head": 1}) if entry.name == "scion" else Counter()
    assert roles == Counter(["hidden", "embedding", "norm", "bias", "head"]) + vectors_apart


def test_parameters_keep_their_type(entry, toy, preset, head):
    model = toy(torch.float64)
    optimizer = build(entry, model, preset, head)
    run(optimizer, build_schedule(optimizer, CONSTANT, 60), random_closure(model, torch.Generator()), 2)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_half_weights_are_stepped_one_by_one_or_refused(entry, toy, preset, head):
    if "bfloat16" in entry.refuses:
        with pytest.raises(ConfigError, match=f"optimizer={entry.name} does not go with model.dtype=bfloat16: "):
            build(entry, toy(torch.bfloat16), preset, head)
        return
    whole, single = toy(), toy()
    optimizers = [build(entry, whole, preset, head), StochasticRounding(build(entry, single, preset, head))]
    for model, optimizer in zip((whole, single), optimizers, strict=True):
        run(optimizer, build_schedule(optimizer, LINEAR, 60), random_closure(model, torch.Generator()), 6)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(single), strict=True))


def test_half_weights_have_state_in_float32_which_a_reload_keeps(entry, toy, preset, head):
    if "bfloat16" in entry.refuses:
        pytest.skip("refused")

    def start():
        model = toy(torch.bfloat16)
        optimizer = build(entry, model, preset, head)
        torch.manual_seed(2)  # of the rounding
        return model, optimizer, build_schedule(optimizer, LINEAR, 60), torch.Generator()

    model, optimizer, schedule, generator = start()
    run(optimizer, schedule, random_closure(model, generator), 12)
    again, reloaded, schedule, generator = start()
    run(reloaded, schedule, random_closure(again, generator), 6)
    rounding = torch.get_rng_state()
    states = deepcopy([again.state_dict(), reloaded.state_dict(), schedule.state_dict()])
    again, reloaded, schedule, _ = start()
    for thing, state in zip((again, reloaded, schedule), states, strict=True):
        thing.load_state_dict(state)
    torch.set_rng_state(rounding)
    run(reloaded, schedule, random_closure(again, generator), 6)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(again), strict=True))
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert {value.dtype for value in tensors if value.ndim and value.is_floating_point()} <= {torch.float32}


def test_one_step_takes_the_stated_number_of_passes(entry, toy, preset, head):
    model, calls = toy(), []
    optimizer = build(entry, model, preset, head)
    closure = random_closure(model, torch.Generator())
    optimizer.step(lambda: calls.append(None) or closure())
    assert len(calls) == entry.passes_per_step


def test_step_returns_the_loss_of_the_closure(entry, toy, preset, head):
    model = toy()
    optimizer = build(entry, model, preset, head)
    closure = random_closure(model, torch.Generator())
    assert optimizer.step(lambda: closure() + 0.25) == 0.25


def test_zero_gradients_move_nothing(entry, toy, preset, head):
    model = toy()
    optimizer = build(entry, model, preset, head, weight_decay=0)
    before = weights(model)

    def closure():
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        return 0.0

    run(optimizer, build_schedule(optimizer, CONSTANT, 60), closure, 30)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_schedule_reaches_every_group(entry, toy, preset, head):
    model = toy()
    optimizer = build(entry, model, preset, head)
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = build_schedule(optimizer, LINEAR, 60)
    run(optimizer, schedule, random_closure(model, torch.Generator()), 33)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5 * peak for peak in peaks])


def test_a_reloaded_run_continues_bit_for_bit(entry, toy, preset, head):
    def start():
        model = toy()
        optimizer = build(entry, model, preset, head)
        return model, optimizer, build_schedule(optimizer, LINEAR, 60)

    model, optimizer, schedule = start()
    generator = torch.Generator().manual_seed(1)
    run(optimizer, schedule, random_closure(model, generator), 30)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), schedule.state_dict(), generator.get_state()], file)
    run(optimizer, schedule, random_closure(model, generator), 25)

    again, optimizer, schedule = start()
    states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for thing, state in zip((again, optimizer, schedule), states, strict=False):
        thing.load_state_dict(state)
    generator.set_state(states[-1])
    run(optimizer, schedule, random_closure(again, generator), 25)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(again), strict=True))


def test_decreases_a_quadratic(entry, toy, preset, head):
    model = toy()
    targets = [p.detach() + 0.02 * torch.randn_like(p) for p in model.parameters()]
    optimizer = build(entry, model, preset, head, 200, weight_decay=0)
    schedule = build_schedule(optimizer, CONSTANT if entry.family == "schedule_free" else LINEAR, 200)

    def closure():
        optimizer.zero_grad()
        loss = model.losses(targets)
        loss.backward()
        return loss.item()

    first = closure()
    run(optimizer, schedule, closure, 200)
    set_train_mode(optimizer, False)
    assert model.losses(targets).item() < 0.5 * first


def test_state_has_the_stated_size(entry, toy, preset, head):
    model = toy()
    optimizer = build(entry, model, preset, head)
    run(optimizer, build_schedule(optimizer, CONSTANT, 60), random_closure(model, torch.Generator()), 30)
    matrix = model.model.layers[0].dense.weight
    # Adafactor keeps one row and one column; step counters are a few bytes.
    allowance = 4 * (2 * matrix.shape[0] + 4) / matrix.numel()
    state = optimizer.state[matrix]
    shared = sum(bytes_in(state[name]) for name in ("qmap1", "qmap2") if name in state)  # values of the 256 codes
    measured = (bytes_in(state) - shared) / matrix.numel()
    assert entry.state_bytes_per_param <= measured <= entry.state_bytes_per_param + allowance


def test_gradients_are_left_as_they_were(entry, toy, preset, head):
    model = toy()
    optimizer = build(entry, model, preset, head)
    closure = random_closure(model, torch.Generator().manual_seed(3))
    last = []

    def recording():
        loss = closure()
        last[:] = [p.grad.clone() for p in model.parameters()]
        return loss

    for _ in range(2):
        optimizer.step(recording)
    assert all(torch.equal(a, p.grad) for a, p in zip(last, model.parameters(), strict=True))


def test_refuses_what_it_says_and_nothing_else(entry, preset):
    config = preset(entry.name)
    check_compatible(config, HardwareConfig(), CONSTANT)
    check_compatible(config, HardwareConfig(strategy="ddp", precision="bf16-mixed"), CONSTANT)
    for setup, options in HARDWARE.items():
        refused = pytest.raises(ConfigError, match=f"optimizer={entry.name} does not go with")
        schedule, half = LINEAR if setup == "decay" else CONSTANT, setup == "bfloat16"
        with refused if setup in entry.refuses else contextlib.nullcontext():
            check_compatible(config, HardwareConfig(**options), schedule, trains_half_weights=half)


def test_paged_moments_need_a_gpu(monkeypatch, preset):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    config = preset("adamw_8bit", paged="true")
    with pytest.raises(ConfigError, match=r"optimizer\.paged=true moves moments .* torch finds no GPU here"):
        check_compatible(config, HardwareConfig(), CONSTANT)
    monkeypatch.setattr("rm_optimizer.optim.registry.accelerators", lambda: [torch.device("cuda", 0)])
    check_compatible(config, HardwareConfig(), CONSTANT)


@pytest.mark.parametrize("paged", [False, True])
def test_paging_reaches_the_library(paged, toy, preset, head):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    assert build_optimizer(toy(), preset("adamw_8bit", paged=paged), head_names=head).is_paged is paged


def test_parameters_without_gradient_stay(entry, toy, preset, head):
    model = toy()
    optimizer = build(entry, model, preset, head)
    before = deepcopy(model.model.embed.weight)
    closure = random_closure(model, torch.Generator())

    def without_embedding():
        loss = closure()
        model.model.embed.weight.grad = None
        return loss

    run(optimizer, build_schedule(optimizer, CONSTANT, 60), without_embedding, 2)
    assert torch.equal(before, model.model.embed.weight)


def test_a_missing_package_names_its_extra(monkeypatch, toy, preset, head):
    import sys

    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(
        MissingExtra, match=r"pytorch-optimizer is not installed; pip install 'rm-optimizer\[optimizers\]'"
    ):
        build_optimizer(toy(), preset("soap"), head_names=head)


def test_an_unknown_name_gets_a_suggestion(toy, preset, head):
    config = deepcopy(preset("adamw"))
    config.name = "moun"
    with pytest.raises(ConfigError, match="unknown optimizer 'moun'; did you mean 'muon'"):
        build_optimizer(toy(), config, head_names=head)


def test_bf16_parameters_are_refused():
    with pytest.raises(ConfigError, match=r"hardware\.precision must be 32-true or bf16-mixed, .* got bf16-true"):
        HardwareConfig(precision="bf16-true")


def test_a_model_without_trainable_parameters_is_refused(preset):
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing is trainable"):
        build_optimizer(model, preset("adamw"), head_names=())
