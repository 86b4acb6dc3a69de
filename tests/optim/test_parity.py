"""Each entry against an implementation that is not ours, or a closed form where its rule has one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rm_optimizer.optim import build_optimizer, set_train_mode
from rm_optimizer.optim.algorithms import SAM, Lion, ScheduleFreeAdamW

DECAY = 0.1


@pytest.fixture
def popt():
    return pytest.importorskip("pytorch_optimizer", reason="the optimizers extra is not installed")


def gradients(model, steps, scale=0.1):
    generator = torch.Generator().manual_seed(5)
    return [[scale * torch.randn(p.shape, generator=generator) for p in model.parameters()] for _ in range(steps)]


def follow(model, optimizer, steps=20):
    """Weights after steps along a fixed sequence of gradients."""
    for grads in gradients(model, steps):

        def closure(grads=grads):
            for p, g in zip(model.parameters(), grads, strict=True):
                p.grad = g.clone()
            return 0.0

        if isinstance(optimizer, SAM):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def split(model):
    """Decayed and undecayed parameters by hand: only the two dense weights decay."""
    decayed = [p for name, p in model.named_parameters() if name.endswith("dense.weight")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("dense.weight")]
    return [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]


def assert_same(ours, theirs, tolerance=0.0):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


REFERENCES = {
    "adam": ("torch.optim", "Adam", {"betas": (0.9, 0.999), "eps": 1e-8}),
    "adamw": ("torch.optim", "AdamW", {"betas": (0.9, 0.999), "eps": 1e-8}),
    "sgd": ("torch.optim", "SGD", {"momentum": 0.9, "nesterov": True}),
    "adafactor": ("torch.optim", "Adafactor", {"beta2_decay": -0.8, "d": 1.0}),
    "lion": ("pytorch_optimizer", "Lion", {"betas": (0.9, 0.99)}),
    "sam": ("torch.optim", "AdamW", {"betas": (0.9, 0.999), "eps": 1e-8}),
    "schedulefree": ("schedulefree", "AdamWScheduleFree", {"betas": (0.9, 0.999), "foreach": False}),
    "soap": ("pytorch_optimizer", "SOAP", {"betas": (0.95, 0.95), "precondition_frequency": 10}),
    "ademamix": (
        "pytorch_optimizer",
        "AdEMAMix",
        {"betas": (0.9, 0.999, 0.99), "alpha": 5.0, "t_alpha_beta3": 40.0, "weight_decouple": True},
    ),
    "prodigy": ("pytorch_optimizer", "Prodigy", {"bias_correction": True, "safeguard_warmup": True}),
    "mars": ("pytorch_optimizer", "MARS", {"betas": (0.95, 0.99), "betas_1d": (0.95, 0.99), "weight_decay_1d": 0.0}),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_presets_follow_the_reference_exactly(name, toy, preset, head):
    """The closures of SAM ignore the weights, so it must equal its base optimizer here."""
    package, kind, options = REFERENCES[name]
    reference = pytest.importorskip(package, reason=f"{package} is not installed")
    config = preset(name, weight_decay=DECAY)
    extra = {"lr_1d": config.lr} if name == "mars" else {}
    ours, theirs = toy(), toy()
    optimizer = build_optimizer(ours, config, head_names=head, num_steps=40)
    expected = getattr(reference, kind)(split(theirs), lr=config.lr, **options, **extra)
    for one in (optimizer, expected):
        set_train_mode(one, True)
    assert_same(follow(ours, optimizer), follow(theirs, expected))


def test_moments_in_eight_bits_follow_adamw_to_three_hundredths(toy, preset, head):
    """The distance after 30 steps of random gradients, relative to the way, is 0.018; embeddings have whole moments."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    generator = torch.Generator().manual_seed(0)
    models = [toy(width=128) for _ in range(2)]
    start = {name: parameter.detach().clone() for name, parameter in models[0].named_parameters()}
    names = ("adamw_8bit", "adamw")
    steps = [build_optimizer(model, preset(name), head_names=head) for name, model in zip(names, models, strict=True)]
    for _ in range(30):
        for name, parameter in models[0].named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            models[1].get_parameter(name).grad = parameter.grad.clone()
        for optimizer in steps:
            optimizer.step()
    for name, parameter in models[0].named_parameters():
        expected = models[1].get_parameter(name).detach()
        error = float((parameter.detach() - expected).norm() / (expected - start[name]).norm())
        assert error < (0.03 if name.endswith("dense.weight") else 1e-4), name
        assert (error > 1e-3) == name.endswith("dense.weight"), name


def test_muon_follows_torchs_muon_and_adamw_stepped_apart(toy, preset, head):
    config = preset("muon", weight_decay=DECAY)
    ours, theirs = toy(), toy()
    hidden, rest = split(theirs)
    muon = torch.optim.Muon(hidden["params"], lr=config.lr, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest["params"], lr=config.adamw_lr, weight_decay=0.0)

    class Both:
        def step(self):
            muon.step()
            adamw.step()

    assert_same(follow(ours, build_optimizer(ours, config, head_names=head)), follow(theirs, Both()))


def test_muon_follows_pytorch_optimizers(popt, toy, preset, head):
    config = preset("muon", weight_decay=DECAY)
    ours, theirs = toy(), toy()
    hidden, rest = split(theirs)
    shared = {"weight_decay": DECAY, "lr": config.lr, "adamw_lr": config.adamw_lr}
    groups = [hidden | shared | {"use_muon": True}, rest | shared | {"use_muon": False, "weight_decay": 0.0}]
    groups[1] |= {"lr": config.adamw_lr, "betas": (0.9, 0.999), "eps": 1e-8}
    reference = popt.Muon(groups, momentum=0.95, use_adjusted_lr=True, adamw_betas=(0.9, 0.999), adamw_eps=1e-8)
    # The two AdamW halves round in a different order: float32 after 20 steps of size 1e-3.
    assert_same(follow(ours, build_optimizer(ours, config, head_names=head)), follow(theirs, reference), 2e-6)


@pytest.mark.parametrize("adaptive", [False, True])
def test_sam_follows_pytorch_optimizers(popt, adaptive):
    def problem():
        torch.manual_seed(1)
        model = nn.Linear(5, 3)
        x, y = torch.randn(8, 5), torch.randn(8, 3)

        def closure():
            model.zero_grad()
            loss = (model(x).tanh() - y).square().mean()
            loss.backward()
            return loss.item()

        return model, closure

    ours, closure = problem()
    sam = SAM(torch.optim.AdamW(ours.parameters(), lr=0.01), rho=0.3, adaptive=adaptive)
    theirs, their_closure = problem()
    reference = popt.SAM(theirs.parameters(), torch.optim.AdamW, rho=0.3, adaptive=adaptive, lr=0.01, perturb_eps=1e-12)
    for _ in range(20):
        sam.step(closure)
        their_closure()
        reference.first_step(zero_grad=True)
        their_closure()
        reference.second_step()
    assert_same(ours.parameters(), theirs.parameters(), 1e-6)


def test_schedule_free_averages_follow_the_official_package(toy):
    official = pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    ours, theirs = toy(), toy()
    options = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-8}
    one = ScheduleFreeAdamW(ours.parameters(), beta1=0.9, beta2=0.999, **options)
    other = official.AdamWScheduleFree(theirs.parameters(), betas=(0.9, 0.999), foreach=False, **options)
    for optimizer in (one, other):
        set_train_mode(optimizer, True)
    assert_same(follow(ours, one), follow(theirs, other))
    for optimizer in (one, other):
        set_train_mode(optimizer, False)
    assert_same(ours.parameters(), theirs.parameters())


def test_lion_first_step_is_a_sign():
    p = nn.Parameter(torch.tensor([3.0, -2.0, 1.0]))
    p.grad = torch.tensor([0.1, -7.0, 0.0])
    Lion([p], lr=0.5, beta1=0.9, beta2=0.99, weight_decay=0.2).step()
    torch.testing.assert_close(p.detach(), 0.9 * torch.tensor([3.0, -2.0, 1.0]) - 0.5 * torch.tensor([1.0, -1.0, 0.0]))


def test_ademamix_without_slow_momentum_is_adamw(popt, toy, preset, head):
    ours, theirs = toy(), toy()
    config = preset("ademamix", alpha=0, weight_decay=DECAY)
    adamw = torch.optim.AdamW(split(theirs), lr=config.lr)
    # One order of operations against another in float32.
    assert_same(follow(ours, build_optimizer(ours, config, head_names=head, num_steps=40)), follow(theirs, adamw), 2e-6)


def test_mars_without_correction_is_adamw(popt, toy, preset, head):
    """On gradients of norm below one, which MARS does not clip, away from zero, where its second epsilon matters."""
    ours, theirs = toy(), toy()
    config = preset("mars", gamma=0, eps=1e-12, weight_decay=DECAY)
    mars = build_optimizer(ours, config, head_names=head)
    adamw = torch.optim.AdamW(split(theirs), lr=config.lr, betas=(0.95, 0.99), eps=1e-12)
    for grads in gradients(ours, 20, 0.01):
        for model, optimizer in ((ours, mars), (theirs, adamw)):
            for p, g in zip(model.parameters(), grads, strict=True):
                p.grad = g + 0.01 * g.sign()
            optimizer.step()
    assert_same(ours.parameters(), theirs.parameters(), 2e-6)


def test_shampoo_before_its_start_is_rmsprop_with_averaged_nesterov_momentum(popt, toy, preset, head):
    model, config = toy(), preset("shampoo", weight_decay=0)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads = gradients(model, 3)
    follow(model, build_optimizer(model, config, head_names=head), steps=3)
    for i, (name, p) in enumerate(model.named_parameters()):
        expected, v, m = start[name], torch.zeros_like(p), torch.zeros_like(p)
        for step in grads:
            g = step[i]
            v = config.beta2 * v + (1 - config.beta2) * g**2
            update = g / v.sqrt()
            m = config.beta1 * m + (1 - config.beta1) * update
            expected = expected - config.lr * (config.beta1 * m + (1 - config.beta1) * update)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-6)


def test_scion_steps_have_the_norm_of_their_role(popt, toy, preset, head):
    model, config = toy(), preset("scion", weight_decay=0)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    follow(model, build_optimizer(model, config, head_names=head), steps=1)
    step = {name: (start[name] - p.detach()) / config.lr for name, p in model.named_parameters()}
    singular = torch.linalg.svdvals(step["model.layers.0.dense.weight"]) / config.hidden_scale
    # Newton-Schulz with these coefficients brings singular values to about [0.7, 1.2], small ones less surely.
    assert 0.4 < singular.min() < singular.max() < 1.3
    signs = step["score.weight"].abs() * 32 / config.sign_scale
    torch.testing.assert_close(signs, torch.ones_like(signs), rtol=1e-3, atol=0)
    assert step["model.norm.weight"].square().mean().sqrt().item() == pytest.approx(config.vector_scale, rel=1e-3)
