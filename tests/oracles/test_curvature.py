"""Curvature against dense float64 matrices from double backward through plain transformers, one sequence at a time."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import softplus
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rm_optimizer.analyze import analyze
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.tokenizer import train_tokenizer
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.schema import LossConfig, compose, typed
from rm_optimizer.schema.landscape import AnalyzeConfig, SpectrumOptions
from tests.builders import fresh_reward_model

LOSSES = {
    "plain": {"beta": 1.0, "label_smoothing": 0.0, "margin_scale": 0.0, "center_rewards": 0.0, "reward_l2": 0.0},
    "every term": {"beta": 1.3, "label_smoothing": 0.1, "margin_scale": 0.6, "center_rewards": 0.05, "reward_l2": 0.1},
}
ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"one {i // 2} two",
        "chosen": f"three {i * 7 % 11} four",
        "rejected": f"five {'six ' * (i % 4)}",
        "weight": weight,
        "margin": 0.1 * i,
        "label": (1.0, 0.8, 0.5, 0.7, 0.3)[i % 5],
    }
    for i, weight in enumerate([1.0, 2.0, 1.0, 0.5, 1.0, 3.0, 1.0])
]
WEIGHT = np.array([row["weight"] for row in ROWS]) / sum(row["weight"] for row in ROWS)
PROMPT = np.array([i // 2 for i in range(len(ROWS))])
MODELS = {  # fields, the parameters measured, and the tolerance that float32 norms of plain Llama leave
    "bert": ({"type_vocab_size": 1}, ["*encoder.layer*", "*pooler*", "*classifier*"], 1e-6),
    "llama": ({"num_key_value_heads": 1}, ["*layers*", "*model.norm*", "*score*"], 2e-4),
}
SHAPE = {"hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1}


@dataclass(frozen=True)
class Dense:
    """A loss over pairs as a function of one vector, with its derivatives written out."""

    family: str
    terms: dict[str, float]
    model: Any
    ids: list[list[list[int]]]
    names: list[str]

    def rewards(self, vector: Tensor) -> Tensor:
        """Rewards, one row a pair."""
        point, start = {}, 0
        for name, p in self.model.named_parameters():
            if name in self.names:
                point[name] = vector[start : start + p.numel()].view_as(p)
                start += p.numel()
        found = []
        for pair in self.ids:
            sides = [functional_call(self.model, point, kwargs={"input_ids": torch.tensor([s])}) for s in pair]
            found.append(torch.stack([side.logits[0, 0] for side in sides]))
        return torch.stack(found)

    def pair_losses(self, rewards: Tensor) -> Tensor:
        t = self.terms
        y, m = (torch.tensor([row[key] for row in ROWS], dtype=torch.float64) for key in ("label", "margin"))
        c, r = rewards.T
        z = t["beta"] * (c - r - t["margin_scale"] * m)
        p = y + t["label_smoothing"] * (1 - 2 * y)
        own = p * softplus(-z) + (1 - p) * softplus(z)
        return own + t["center_rewards"] * (c + r) ** 2 + t["reward_l2"] * (c**2 + r**2) / 2

    def loss(self, vector: Tensor) -> Tensor:
        return (torch.from_numpy(WEIGHT) * self.pair_losses(self.rewards(vector))).sum()

    @property
    def point(self) -> Tensor:
        return torch.cat([p.detach().flatten() for name, p in self.model.named_parameters() if name in self.names])

    def columns(self, pattern: str) -> np.ndarray:
        """True for each parameter whose name has the pattern."""
        parts = [np.full(p.numel(), pattern in n) for n, p in self.model.named_parameters() if n in self.names]
        return np.concatenate(parts)


@cache
def folder(family: str, root: Path) -> Path:
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    texts = [f"Prompt: {r['prompt']}\n\nResponse: {r['chosen']} {r['rejected']}" for r in ROWS]
    fields = SHAPE | MODELS[family][0] | {"max_position_embeddings": 48}
    model = fresh_reward_model(family, train_tokenizer(texts, 280), max_length=48, fields=fields)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.4 * torch.randn(p.shape, generator=generator)
    model.save_pretrained(root / family)
    return root / family


@cache
def dense(family: str, loss: str, root: Path) -> Dense:
    path = folder(family, root)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager").double().eval()
    ids = []
    for row in ROWS:
        texts = [f"Prompt: {row['prompt']}\n\nResponse: {row[side]}" for side in ("chosen", "rejected")]
        ids.append([[0, *tokenizer(text, add_special_tokens=False).input_ids, 1] for text in texts])
    parts = [pattern.strip("*") for pattern in MODELS[family][1]]
    names = [name for name, _ in model.named_parameters() if any(part in f"model.{name}" for part in parts)]
    return Dense(family, LOSSES[loss], model, ids, names)


@cache
def matrices(family: str, loss: str, root: Path) -> dict[str, np.ndarray]:
    """Gradient, and each pair's Gauss-Newton and Fisher matrix with their weighted means over pairs."""
    d = dense(family, loss, root)
    vector = d.point.requires_grad_()
    rewards = d.rewards(vector)
    rows = torch.stack([torch.autograd.grad(each, vector, retain_graph=True)[0] for each in rewards.flatten()])
    rows = rows.view(len(ROWS), 2, -1)
    slope, block = of_outputs(d, rewards)
    slopes = torch.einsum("pa,pai->pi", slope, rows)
    newton, w = torch.einsum("pai,pab,pbj->pij", rows, block, rows), torch.from_numpy(WEIGHT)
    found = {"gradient": w @ slopes, "pair newton": newton, "pair fisher": torch.einsum("pi,pj->pij", slopes, slopes)}
    found |= {"gauss_newton": torch.einsum("p,pij->ij", w, newton)}
    found |= {"fisher": torch.einsum("p,pi,pj->ij", w, slopes, slopes)}
    return {name: value.detach().numpy() for name, value in found.items()}


@cache
def hessians(family: str, loss: str, root: Path) -> np.ndarray:
    """Hessian of each pair's loss."""
    d = dense(family, loss, root)
    vector = d.point.requires_grad_()
    rewards, seconds = d.rewards(vector), []
    slope = of_outputs(d, rewards)[0]
    unit = torch.eye(len(vector), dtype=torch.float64)
    for pair, sides in zip(rewards, slope, strict=True):  # the rewards' own curvature, weighted by the loss's slope
        gradient = torch.autograd.grad(pair @ sides, vector, create_graph=True)[0]
        seconds.append(torch.autograd.grad(gradient, vector, unit, retain_graph=True, is_grads_batched=True)[0])
    return matrices(family, loss, root)["pair newton"] + torch.stack(seconds).numpy()


def of_outputs(d: Dense, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and second derivative of each pair's loss by its two rewards."""
    at = rewards.detach().requires_grad_()
    slope = torch.autograd.grad(d.pair_losses(at).sum(), at, create_graph=True)[0]
    block = [torch.autograd.grad(slope[:, k].sum(), at, retain_graph=True)[0] for k in (0, 1)]
    return slope.detach(), torch.stack(block, dim=1)


def hessian(family: str, loss: str, root: Path) -> np.ndarray:
    return np.einsum("p,pij->ij", WEIGHT, hessians(family, loss, root))


def analyzed(family: str, loss: str, root: Path, matrix: str, method: str, **options: Any) -> dict[str, Any]:
    """The spectrum's JSON, with the derived numbers under `quantities`."""
    model = BradleyTerryRM.from_pretrained(str(folder(family, root)))
    analyzer = HessianAnalyzer(
        model, loss=LossConfig(**LOSSES[loss]), params=MODELS[family][1], token_budget=90, dtype=torch.float64
    )
    further = {name: options.pop(name) for name in ("top_k", "with_density") if name in options}
    spectrum = analyzer.compute_spectrum(
        str(root / "pairs.jsonl"), method, matrix=matrix, options=SpectrumOptions(**options), **further
    )
    numbers = {name: quantity.value for name, quantity in spectrum.quantities.items()}
    return json.loads(spectrum.to_json()) | {"quantities": numbers}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("curvature")


def jackknifed(values: np.ndarray) -> float:
    """Standard error of a weighted mean over pairs, leaving out one prompt at a time."""
    left = [np.average(values[keep], weights=WEIGHT[keep]) for keep in (p != PROMPT for p in np.unique(PROMPT))]
    return math.sqrt((len(left) - 1) * np.var(left))


def linearized(values: np.ndarray, weight: np.ndarray) -> float:
    """Standard error of a weighted mean over pairs, from its residuals summed over each prompt."""
    share = weight / weight.sum()
    totals = np.bincount(PROMPT, share * (values - share @ values))
    return math.sqrt(len(totals) / (len(totals) - 1) * (totals**2).sum())


@pytest.mark.parametrize(("family", "loss"), [("bert", "every term"), ("llama", "plain")])
def test_the_full_hessian_and_every_number_of_it(family: str, loss: str, root: Path):
    m, tolerance = matrices(family, loss, root), MODELS[family][2]
    found = analyzed(
        family, loss, root, "hessian", "full", effective_rank=True, sam_rho=0.1, num_sampled=1, num_probes=2
    )
    whole = hessian(family, loss, root)
    values, vectors = np.linalg.eigh(whole)
    values, top, g = values[::-1], vectors[:, -1], m["gradient"]
    assert found["eigenvalues"] == pytest.approx(values, abs=tolerance * values[0])
    assert (found["num_parameters"], found["num_pairs"]) == (len(values), len(ROWS))
    assert found["trace"]["value"] == pytest.approx(values.sum(), rel=tolerance)
    d, length = dense(family, loss, root), np.linalg.norm(g)
    at = d.loss(d.point).item()
    image = whole @ g
    geometry = {"loss": at, "gradient_norm": length, "rho": 0.1, "num_pairs": len(ROWS)}
    geometry |= {"sam_sharpness": d.loss(d.point + 0.1 * torch.from_numpy(g / length)).item() - at}
    geometry |= {"gradient_curvature": g @ image / length**2}
    geometry |= {"gradient_alignment": g @ image / length / np.linalg.norm(image)}
    assert found["geometry"] == pytest.approx(geometry, rel=20 * tolerance)
    curvature = np.einsum("i,pij,j->p", top, hessians(family, loss, root), top)
    assert found["sampling"][0]["standard_error"] == pytest.approx(jackknifed(curvature), rel=1e-3)
    sizes, newton = np.sort(np.abs(values))[::-1], np.abs(np.linalg.eigvalsh(m["gauss_newton"]))
    shares, of_newton = sizes / sizes.sum(), newton / newton.sum()
    numbers = {
        "top_ratio": values[0] / values[4],
        "flatness": 1 / values[0],
        "sharpness_score": values[0] / values.sum() if values.sum() > 0 else None,
        "frobenius_norm": math.sqrt((values**2).sum()),
        "entropy_rank": math.exp(-(shares * np.log(shares)).sum()),
        "participation_rank": sizes.sum() ** 2 / (sizes**2).sum(),
        "stable_rank": (values**2).sum() / sizes[0] ** 2,
        "intrinsic_dimension": sizes.sum() / sizes[0],
        "negative_share": -values[values < 0].sum() / sizes.sum(),
        "effective_rank": math.exp(-(of_newton * np.log(np.maximum(of_newton, 1e-300))).sum()),
    }
    for name, value in numbers.items():
        expected = value if value is None else pytest.approx(value, rel=100 * tolerance)
        assert found["quantities"][name] == expected, name


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["gauss_newton", "fisher"])
@pytest.mark.parametrize("method", ["gauss_newton_exact", "lanczos"])
def test_gauss_newton_and_fisher(kind: str, loss: str, method: str, root: Path):
    top = {"top_k": 4, "which": "largest"} if method == "lanczos" else {}
    found = analyzed("bert", loss, root, kind, method, num_probes=20, num_sampled=1, **top)
    m = matrices("bert", loss, root)
    values = np.linalg.eigvalsh(m[kind])[::-1]
    kept = 4 if method == "lanczos" else len(found["eigenvalues"])
    assert found["eigenvalues"][:kept] == pytest.approx(values[:kept], rel=1e-5, abs=1e-7)
    each = m["pair newton" if kind == "gauss_newton" else "pair fisher"]
    left = [np.average(each[keep], axis=0, weights=WEIGHT[keep]) for keep in (p != PROMPT for p in np.unique(PROMPT))]
    spread = np.std([np.linalg.eigvalsh(matrix)[-1] for matrix in left])
    assert found["sampling"][0]["standard_error"] == pytest.approx(math.sqrt(len(left) - 1) * spread, rel=1e-5)
    traces = np.trace(each, axis1=1, axis2=2)
    if method == "lanczos":
        assert abs(found["trace"]["value"] - values.sum()) <= 4 * found["trace"]["standard_error"] + 1e-6
        return
    assert np.abs(values[kept:]).max(initial=0.0) < 1e-7
    assert found["trace"]["value"] == pytest.approx(values.sum())
    assert found["trace"]["standard_error"] == pytest.approx(jackknifed(traces), rel=1e-6)
    half = stats.t.ppf(0.975, PROMPT[-1]) * jackknifed(traces)
    assert found["trace"]["high"] == pytest.approx(values.sum() + half)


@pytest.mark.parametrize(
    ("product", "which"),
    [("kept_graph", "both"), ("reverse", "largest"), ("forward", "magnitude"), ("kept_graph", "smallest")],
)
def test_lanczos_by_each_product_and_at_each_end(product: str, which: str, root: Path):
    options = {"product": product, "which": which, "top_k": 3, "tolerance": 1e-7}
    found = analyzed("bert", "every term", root, "hessian", "lanczos", **options)
    values = np.linalg.eigvalsh(hessian("bert", "every term", root))[::-1]
    expected = {"both": [*values[:3], *values[-3:]], "largest": values[:3], "smallest": values[-3:]}
    expected["magnitude"] = sorted(values[np.argsort(-np.abs(values))[:3]], reverse=True)
    assert found["eigenvalues"] == pytest.approx(list(expected[which]), rel=1e-5)


@pytest.mark.parametrize("method", ["deflated", "hutchinson", "hutchpp", "xtrace"])
def test_each_estimate_of_the_trace_lies_within_its_error(method: str, root: Path):
    options = {"trace_method": method, "num_probes": 30, "top_k": 2}
    trace = analyzed("bert", "every term", root, "hessian", "lanczos", **options)["trace"]
    whole = np.trace(hessian("bert", "every term", root))
    assert abs(trace["value"] - whole) < 4 * trace["standard_error"] + 1e-6
    assert trace["standard_error"] < 0.35 * np.linalg.norm(hessian("bert", "every term", root))


def test_the_density_has_the_moments_of_the_matrix(root: Path):
    options = {"num_probes": 8, "probe_steps": 6, "top_k": 2, "with_density": True}
    density = analyzed("bert", "every term", root, "hessian", "lanczos", **options)["density"]
    values = np.linalg.eigvalsh(hessian("bert", "every term", root))
    exact = np.array(density["exact"])
    for power in range(4):
        probes = [
            (exact**power).sum() + np.dot(w, np.array(n) ** power)
            for n, w in zip(density["nodes"], density["weights"], strict=True)
        ]
        error = np.std(probes, ddof=1) / math.sqrt(len(probes))
        assert abs(np.mean(probes) - (values**power).sum()) < 4 * error + 1e-6, power


def test_slices_along_eigenvectors_are_the_losses_there(root: Path):
    d = dense("bert", "every term", root)
    values, vectors = np.linalg.eigh(hessian("bert", "every term", root))
    vectors = vectors[:, np.argsort(-np.abs(values))]
    given = [
        f"checkpoint={folder('bert', root)}",
        f"data.train={root}/pairs.jsonl",
        "landscape=slices",
        "progress=false",
    ]
    given += [f"landscape.params={MODELS['bert'][1]}", "landscape.dtype=float64", f"output_dir={root}/slices"]
    given += ["landscape.directions=eigenvectors", "landscape.num_points=5", "landscape.tolerance=1e-8"]
    given += ["landscape.num_directions=2", *(f"loss.{k}={v}" for k, v in LOSSES["every term"].items())]
    analyze(typed(compose(given, "analyze"), AnalyzeConfig))
    found = json.loads((root / "slices" / "slices.json").read_text())
    y = np.array([row["label"] for row in ROWS])

    def at(vector: np.ndarray) -> tuple[float, ...]:
        with torch.no_grad():
            rewards = d.rewards(d.point + torch.from_numpy(vector))
            losses = d.pair_losses(rewards).numpy()
        lead = (rewards[:, 0] - rewards[:, 1]).numpy() * np.sign(y - 0.5)
        right, w = 0.5 + 0.5 * np.sign(lead), WEIGHT * (y != 0.5)
        return float(WEIGHT @ losses), linearized(losses, WEIGHT), float(w @ right / w.sum()), linearized(right, w)

    for i in range(2):
        got = [list(point.values()) for point in found["points"][i]]
        line = vectors[:, i]
        steps = np.array(found["steps"] if np.ndim(found["steps"]) == 1 else found["steps"][i])
        expected = [at(step * line) for step in steps]
        better = min((expected, expected[::-1]), key=lambda e: abs(np.array(e)[0, 0] - got[0][0]))
        np.testing.assert_allclose(got, better, rtol=1e-4, atol=1e-6)
