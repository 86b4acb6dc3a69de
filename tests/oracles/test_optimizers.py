"""Every optimizer against its paper's update in float64: 20 steps, no option at its default, a rate for each role.

Where pytorch_optimizer has the rule, its class is called here with every argument written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rm_optimizer.optim import build_optimizer, set_train_mode
from rm_optimizer.optim.registry import OPTIMIZERS
from rm_optimizer.schema.composition import compose, typed
from rm_optimizer.schema.config import TrainConfig

STEPS, WIDTH = 20, 8
LR, DECAY, HEAD_FACTOR, LAYER_DECAY = 0.02, 0.3, 1.7, 0.8
ADAM = {"beta1": 0.85, "beta2": 0.97, "eps": 1e-3}
CASES: dict[str, list[dict[str, Any]]] = {
    "adam": [ADAM],
    "adamw": [ADAM],
    "adamw_8bit": [ADAM | {"paged": True}],  # parameters as small as these keep whole moments
    "sgd": [{"momentum": 0.6, "nesterov": True}, {"momentum": 0.6, "nesterov": False}],
    "adafactor": [{"beta2_decay": -0.6, "clip": 1.3}],
    "lion": [{"beta1": 0.8, "beta2": 0.95}],
    "muon": [
        ADAM | {"adamw_lr": 0.03, "momentum": 0.7, "nesterov": nesterov, "ns_steps": 3, "scaling": scaling}
        for nesterov, scaling in ((True, "match_rms_adamw"), (False, "original"))
    ],
    "sam": [ADAM | {"rho": 0.4, "adaptive": adaptive} for adaptive in (False, True)],
    "schedulefree": [ADAM | {"weight_lr_power": 1.5}],
    "ademamix": [ADAM | {"beta3": 0.98, "alpha": 3.0, "slow_warmup_ratio": share} for share in (0.0, 0.5)],
    "mars": [ADAM | {"gamma": 0.4}],
    "soap": [ADAM | {"precondition_frequency": 3, "max_precondition_dim": 6}, ADAM | {"precondition_frequency": 4}],
    "prodigy": [ADAM | {"d_coef": 1.4, "lr": 0.8}],  # its estimate grows at such a rate alone
    "scion": [{"momentum": 0.7, "hidden_scale": 3.0, "sign_scale": 5.0, "vector_scale": 0.6}],
    "shampoo": [
        {"beta1": 0.8, "beta2": 0.9, "graft": graft, "block_size": 4, "start_step": 4, "precondition_frequency": 2}
        for graft in ("sgd", "rmsprop")
    ],
}
RUNS = [(name, options) for name, cases in CASES.items() for options in cases]


class Toy(nn.Module):
    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Embedding(5, WIDTH)
        self.model.layers = nn.ModuleList(nn.Linear(WIDTH, width) for width in (WIDTH, 2 * WIDTH))
        self.model.norm = nn.LayerNorm(WIDTH)
        self.score = nn.Linear(WIDTH, 1)


PLACES = {  # layers to the top, or None for the head; whether the parameter decays
    "model.embed.weight": (3, False),
    "model.layers.0.weight": (2, True),
    "model.layers.0.bias": (2, False),
    "model.layers.1.weight": (1, True),
    "model.layers.1.bias": (1, False),
    "model.norm.weight": (0, False),
    "model.norm.bias": (0, False),
    "score.weight": (None, False),
    "score.bias": (None, False),
}


def factor_of(name: str) -> float:
    place = PLACES[name][0]
    return HEAD_FACTOR if place is None else LAYER_DECAY**place


def toy() -> Toy:
    torch.manual_seed(0)
    model = Toy().double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5)
    return model


def gradient(name: str, p: Tensor, step: int) -> Tensor:
    """Of a quadratic with its own curvature for each parameter, and noise that a step's passes share."""
    generator = torch.Generator().manual_seed(1000 * step + list(PLACES).index(name))
    noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return (0.2 + 0.1 * list(PLACES).index(name)) * p.detach() + 0.3 * noise


def schedule(step: int) -> float:
    return 0.4 + 0.06 * step if step < 10 else 1.0 - 0.03 * step


def followed(model: Toy, optimizer: Any, evaluation: bool = True) -> dict[str, Tensor]:
    """Weights after 20 steps of an optimizer, whose peak rates a schedule scales."""
    peaks = [group["lr"] for group in optimizer.param_groups]
    set_train_mode(optimizer, True)
    for step in range(STEPS):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * schedule(step)

        def closure(step: int = step) -> float:
            for name, p in model.named_parameters():
                p.grad = gradient(name, p, step)
            return 0.0

        optimizer.step(closure)
    if evaluation:
        set_train_mode(optimizer, False)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def adam_step(p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any], lr: float, decay: float, k: int) -> Tensor:
    """Loshchilov & Hutter (2019), Algorithm 2."""
    s["m"] = o["beta1"] * s.get("m", 0.0) + (1 - o["beta1"]) * g
    s["v"] = o["beta2"] * s.get("v", 0.0) + (1 - o["beta2"]) * g**2
    mean, square = s["m"] / (1 - o["beta1"] ** k), s["v"] / (1 - o["beta2"] ** k)
    return p - lr * decay * p - lr * mean / (square.sqrt() + o["eps"])


def adam(p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any], lr: float, decay: float, k: int) -> Tensor:
    """Kingma & Ba (2015), Algorithm 1, with an L2 penalty."""
    return adam_step(p, g + decay * p, s, o, lr, 0.0, k)


def sgd(p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any], lr: float, decay: float, k: int) -> Tensor:
    """Sutskever et al. (2013), as torch writes it."""
    g = g + decay * p
    s["b"] = o["momentum"] * s["b"] + g if k > 1 else g
    return p - lr * (g + o["momentum"] * s["b"] if o["nesterov"] else s["b"])


def adafactor(p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any], lr: float, decay: float, k: int) -> Tensor:
    """Shazeer & Stern (2018), Algorithms 4 and 5, with relative steps and decoupled decay."""
    kept = 1 - k ** o["beta2_decay"]
    size = max(1e-3, p.square().mean().sqrt().item()) * min(lr, k**-0.5)
    if p.ndim > 1:
        s["r"] = kept * s.get("r", 0.0) + (1 - kept) * g.square().mean(-1, keepdim=True)
        s["c"] = kept * s.get("c", 0.0) + (1 - kept) * g.square().mean(-2, keepdim=True)
        s["v"] = s["r"] @ s["c"] / s["r"].mean()
    else:
        s["v"] = kept * s.get("v", 0.0) + (1 - kept) * g.square()
    u = g / s["v"].sqrt()
    u = u / max(1.0, u.square().mean().sqrt().item() / o["clip"])
    return p - lr * decay * p - size * u


def lion(p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any], lr: float, decay: float, k: int) -> Tensor:
    """Chen et al. (2023), Program 1."""
    m = s.get("m", torch.zeros_like(p))
    s["m"] = o["beta2"] * m + (1 - o["beta2"]) * g
    return p - lr * ((o["beta1"] * m + (1 - o["beta1"]) * g).sign() + decay * p)


def muon(p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any], lr: float, decay: float, k: int) -> Tensor:
    """Jordan et al. (2024): five-term Newton-Schulz in bfloat16; scaling "match_rms_adamw" of Liu et al. (2025)."""
    s["m"] = o["momentum"] * s.get("m", 0.0) + (1 - o["momentum"]) * g
    x = ((1 - o["momentum"]) * g + o["momentum"] * s["m"] if o["nesterov"] else s["m"]).bfloat16()
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm()
    for _ in range(o["ns_steps"]):
        gram = wide @ wide.T
        gram = torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315)  # fused, as its rounding to bfloat16 matters
        wide = torch.addmm(wide, gram, wide, beta=3.4445)
    x = (wide if x.shape[0] <= x.shape[1] else wide.T).double()
    rows, columns = p.shape
    scale = 0.2 * math.sqrt(max(rows, columns)) if o["scaling"] != "original" else math.sqrt(max(1, rows / columns))
    return p - lr * decay * p - lr * scale * x


def ademamix(p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any], lr: float, decay: float, k: int) -> Tensor:
    """Pagliardini et al. (2024), Algorithm 1, with their schedulers of alpha and beta3."""
    share = min(1.0, k / (o["slow_warmup_ratio"] * STEPS)) if o["slow_warmup_ratio"] else 1.0
    first, last = math.log(o["beta1"]), math.log(o["beta3"])
    slow = min(o["beta3"], math.exp(first * last / ((1 - share) * last + share * first)))
    s["m"] = o["beta1"] * s.get("m", 0.0) + (1 - o["beta1"]) * g
    s["n"] = slow * s.get("n", 0.0) + (1 - slow) * g
    s["v"] = o["beta2"] * s.get("v", 0.0) + (1 - o["beta2"]) * g**2
    top = s["m"] / (1 - o["beta1"] ** k) + share * o["alpha"] * s["n"]
    return p - lr * (top / ((s["v"] / (1 - o["beta2"] ** k)).sqrt() + o["eps"]) + decay * p)


def mars(p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any], lr: float, decay: float, k: int) -> Tensor:
    """Yuan et al. (2024), Algorithm 2, on matrices, and AdamW on vectors, with eps in their code's place."""
    o = o | {"eps": o["eps"] / math.sqrt(1 - o["beta2"] ** k)}
    if p.ndim < 2:
        return adam_step(p, g, s, o, lr, 0.0, k)
    c = g + o["gamma"] * o["beta1"] / (1 - o["beta1"]) * (g - s.get("g", torch.zeros_like(g)))
    s["g"] = g
    return adam_step(p, c / max(1.0, c.norm().item()), s, o, lr, decay, k)


RULES: dict[str, Callable[..., Tensor]] = {
    **{"adam": adam, "adamw": adam_step, "sgd": sgd, "adafactor": adafactor, "lion": lion, "ademamix": ademamix},
    **{"adamw_8bit": adam_step, "mars": mars, "muon": muon, "sam": adam_step},
}


def by_rule(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after 20 steps of a rule of this file."""
    weights = {key: p.detach().clone() for key, p in toy().named_parameters()}
    states: dict[str, dict[str, Any]] = {key: {} for key in weights}
    for step in range(STEPS):
        moved = dict(weights)
        if name == "sam":  # Foret et al. (2021), Eq. 2; ASAM: Kwon et al. (2021), Algorithm 1
            size = {key: p.abs() if options["adaptive"] else torch.ones_like(p) for key, p in weights.items()}
            g = {key: gradient(key, p, step) * size[key] for key, p in weights.items()}
            norm = math.sqrt(sum(each.square().sum().item() for each in g.values()))
            moved = {key: p + options["rho"] * size[key] * g[key] / norm for key, p in weights.items()}
        for key, p in weights.items():
            decay = DECAY * PLACES[key][1]
            rule, rate = RULES[name], LR
            if name == "muon" and not decay:
                rule, rate = adam_step, options["adamw_lr"]
            rate *= factor_of(key) * schedule(step)
            weights[key] = rule(p, gradient(key, moved[key], step), states[key], options, rate, decay, step + 1)
    return weights


def schedule_free(options: dict[str, Any], is_average: bool) -> dict[str, Tensor]:
    """Defazio et al. (2024), Algorithm 1 with Adam, in its three sequences."""
    found = {}
    for key, p in toy().named_parameters():
        x = z = p.detach().clone()
        v, weights, largest = torch.zeros_like(x), 0.0, 0.0
        for step in range(STEPS):
            rate = LR * factor_of(key) * schedule(step)
            y = (1 - options["beta1"]) * z + options["beta1"] * x
            g = gradient(key, y, step)
            v = options["beta2"] * v + (1 - options["beta2"]) * g**2
            root = (v / (1 - options["beta2"] ** (step + 1))).sqrt() + options["eps"]
            z = z - rate * (g / root + DECAY * PLACES[key][1] * y)
            largest = max(largest, rate)
            weights += largest ** options["weight_lr_power"]
            c = largest ** options["weight_lr_power"] / weights
            x = (1 - c) * x + c * z
        found[key] = x if is_average else (1 - options["beta1"]) * z + options["beta1"] * x
    return found


def by_library(name: str, o: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after 20 steps of pytorch_optimizer's class."""
    library = pytest.importorskip("pytorch_optimizer", reason="the optimizers extra is not installed")
    model, groups = toy(), []
    for key, p in model.named_parameters():
        rate = o["lr"] if name == "prodigy" else LR * factor_of(key)
        group: dict[str, Any] = {"params": [p], "lr": rate, "weight_decay": DECAY * PLACES[key][1]}
        if name == "scion":
            is_hidden = key.startswith("model.layers") and p.ndim == 2
            norm, scale = ("SPECTRAL", "hidden_scale") if is_hidden else ("SIGN", "sign_scale")
            norm, scale = (norm, scale) if p.ndim == 2 else ("BIAS", "vector_scale")
            kind = getattr(library.optimizer.scion.LMONorm, norm)
            group |= {"norm_type": int(kind), "scale": o[scale]}
        groups.append(group)
    if name == "prodigy":  # which has one estimate for all parameters of all groups
        groups = [
            {**groups[0], "params": [g["params"][0] for g in groups if g["weight_decay"] == d], "weight_decay": d}
            for d in (0.0, DECAY)
        ]
    betas = {"betas": (o["beta1"], o["beta2"])} if "beta1" in o else {}
    adam = betas | {"eps": o.get("eps")}
    if name == "soap":
        dimension = o.get("max_precondition_dim", 10000)
        frequency = o["precondition_frequency"]
        optimizer = library.SOAP(groups, **adam, precondition_frequency=frequency, max_precondition_dim=dimension)
    elif name == "prodigy":
        optimizer = library.Prodigy(groups, **adam, d_coef=o["d_coef"], bias_correction=True, safeguard_warmup=True)
    elif name == "scion":
        optimizer = library.SCION(groups, momentum=1 - o["momentum"])
    else:
        graft = {"sgd": 1, "rmsprop": 3}[o["graft"]]
        optimizer = library.ScalableShampoo(
            groups,
            **betas,
            moving_average_for_momentum=True,
            decoupled_weight_decay=True,
            start_preconditioning_step=o["start_step"],
            preconditioning_compute_steps=o["precondition_frequency"],
            block_size=o["block_size"],
            graft_type=graft,
        )
    return followed(model, optimizer)


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize(("name", "options"), RUNS)
def test_twenty_steps_are_the_papers(name: str, options: dict[str, Any]):
    rates = {} if name == "prodigy" else {"head_lr_factor": HEAD_FACTOR, "layer_lr_decay": LAYER_DECAY}
    given = {"lr": LR, "weight_decay": DECAY, **rates, **options}
    overrides = [f"optimizer={name}", "output_dir=unused", *(f"optimizer.{k}={v}" for k, v in given.items())]
    config = typed(compose(overrides), TrainConfig).optimizer
    if name in ("soap", "prodigy", "scion", "shampoo"):
        expected = by_library(name, options)
    elif name == "schedulefree":
        expected = schedule_free(options, True)
    else:
        expected = by_rule(name, options)
    model = toy()
    optimizer = build_optimizer(model, config, head_names=("score.weight", "score.bias"), num_steps=STEPS)
    found = followed(model, optimizer)
    precision = 1e-5 if name == "adamw_8bit" else 1e-6  # its moments are in float32
    for key in PLACES:
        torch.testing.assert_close(
            found[key], expected[key], rtol=precision, atol=precision / 10, msg=lambda m, key=key: f"{key}: {m}"
        )
    if name == "schedulefree":
        set_train_mode(optimizer, True)
        for key, y in schedule_free(options, False).items():
            torch.testing.assert_close(dict(model.named_parameters())[key].detach(), y, rtol=1e-6, atol=1e-7)


def test_every_optimizer_and_every_option_is_here_away_from_its_default():
    assert set(CASES) == {name for name in OPTIMIZERS if OPTIMIZERS[name].build.__module__.startswith("rm_optimizer")}
    for name, cases in CASES.items():
        default = vars(typed(compose([f"optimizer={name}", "output_dir=unused"]), TrainConfig).optimizer)
        common = {"name", "lr", "weight_decay", "head_lr_factor", "layer_lr_decay"}
        moved = {key for case in cases for key, value in case.items() if value != default[key]}
        assert set(default) - common == moved - common, name
