"""Curvature against dense float64 matrices from double backward through plain transformers, one sequence at a time."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from rm_optimizer.analyze import analyze
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.series import compare_spectra
from rm_optimizer.schema import LossConfig, compose, typed
from rm_optimizer.schema.landscape import AnalyzeConfig, SpectrumOptions
from tests.oracles.dense import (
    LOSSES,
    MODELS,
    ROWS,
    Dense,
    agree,
    dense,
    folder,
    hessian,
    hessians,
    hessians_of,
    interval,
    jackknifed,
    matrices,
    matrices_of,
    over,
)

LOSS, SEED = "every term", 4


def analyzed(family: str, loss: str, root: Path, matrix: str, method: str, **options: Any) -> dict[str, Any]:
    """The spectrum's JSON, with the derived numbers under `quantities`."""
    model = BradleyTerryRM.from_pretrained(str(folder(family, root)))
    analyzer = HessianAnalyzer(
        model,
        loss=LossConfig(**LOSSES[loss]),
        params=MODELS[family][1],
        token_budget=90,
        dtype=torch.float64,
        seed=SEED,
    )
    further = {name: options.pop(name) for name in ("top_k", "with_density") if name in options}
    spectrum = analyzer.compute_spectrum(
        str(root / "pairs.jsonl"), method, matrix=matrix, options=SpectrumOptions(**options), **further
    )
    numbers = {name: quantity.value for name, quantity in spectrum.quantities.items()}
    estimates = {name: quantity.estimate and vars(quantity.estimate) for name, quantity in spectrum.quantities.items()}
    return json.loads(spectrum.to_json()) | {"quantities": numbers, "estimates": estimates}


@pytest.mark.parametrize(("family", "loss"), [("bert", LOSS), ("llama", "plain")])
def test_the_full_hessian_and_every_number_of_it(family: str, loss: str, root: Path):
    m, tolerance, began = matrices(family, loss, root), MODELS[family][2], time.monotonic()
    found = analyzed(
        family, loss, root, "hessian", "full", effective_rank=True, sam_rho=0.1, num_sampled=1, num_probes=2
    )
    elapsed, whole = time.monotonic() - began, hessian(family, loss, root)
    values, vectors = np.linalg.eigh(whole)
    values, top, g = values[::-1], vectors[:, -1], m["gradient"]
    assert found["eigenvalues"] == pytest.approx(values, abs=tolerance * values[0])
    assert (found["num_parameters"], found["num_pairs"]) == (len(values), len(ROWS))
    assert 0 < found["wall_seconds"] < elapsed
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
    assert found["sampling"][0]["standard_error"] == pytest.approx(jackknifed(curvature, d), rel=1e-3)
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
    top = {"top_k": 9, "tolerance": 1e-7} if method == "lanczos" else {}  # `both` ends: of this matrix the largest
    found = analyzed("bert", loss, root, kind, method, num_probes=20, num_sampled=1, effective_rank=True, **top)
    m, d = matrices("bert", loss, root), dense("bert", loss, root)
    values = np.linalg.eigvalsh(m[kind])[::-1]
    kept = (7 if loss == "plain" else 9) if method == "lanczos" else len(found["eigenvalues"])
    by_rows = method == "gauss_newton_exact"
    assert (len(found["eigenvalues"]), found["product"]) == (kept, "pair_gradients" if by_rows else "reverse")
    newton = np.abs(np.linalg.eigvalsh(m["gauss_newton"]))
    share = newton[newton > 1e-12 * newton.max()] / newton.sum()
    assert found["quantities"]["effective_rank"] == pytest.approx(math.exp(-(share * np.log(share)).sum()), rel=1e-4)
    assert found["eigenvalues"][:kept] == pytest.approx(values[:kept], rel=1e-5, abs=1e-7)
    each = m["pair newton" if kind == "gauss_newton" else "pair fisher"]
    others = [d.prompt != prompt for prompt in np.unique(d.prompt)]
    left = [np.average(each[rest], axis=0, weights=d.weight[rest]) for rest in others]
    spread = np.std([np.linalg.eigvalsh(matrix)[-1] for matrix in left])
    assert found["sampling"][0]["standard_error"] == pytest.approx(math.sqrt(len(left) - 1) * spread, rel=1e-5)
    traces = np.trace(each, axis1=1, axis2=2)
    if method == "lanczos":
        assert abs(found["trace"]["value"] - values.sum()) <= 4 * found["trace"]["standard_error"] + 1e-6
        return
    assert np.abs(values[kept:]).max(initial=0.0) < 1e-7
    assert found["trace"]["value"] == pytest.approx(values.sum())
    assert found["trace"]["standard_error"] == pytest.approx(jackknifed(traces, d), rel=1e-6)
    half = stats.t.ppf(0.975, d.prompt[-1]) * jackknifed(traces, d)
    assert found["trace"]["high"] == pytest.approx(values.sum() + half)


@pytest.mark.parametrize(
    ("product", "which"),
    [("kept_graph", "both"), ("reverse", "largest"), ("forward", "magnitude"), ("kept_graph", "smallest")],
)
def test_lanczos_by_each_product_and_at_each_end(product: str, which: str, root: Path):
    options = {"product": product, "which": which, "top_k": 3, "tolerance": 1e-7}
    found = analyzed("bert", LOSS, root, "hessian", "lanczos", **options)
    values = np.linalg.eigvalsh(hessian("bert", LOSS, root))[::-1]
    expected = {"both": [*values[:3], *values[-3:]], "largest": values[:3], "smallest": values[-3:]}
    expected["magnitude"] = sorted(values[np.argsort(-np.abs(values))[:3]], reverse=True)
    assert found["eigenvalues"] == pytest.approx(list(expected[which]), rel=1e-5)


def signs(count: int, size: int) -> np.ndarray:
    """The random vectors of the estimates, which have the seed after that of the starting vector."""
    generator = torch.Generator().manual_seed(SEED + 1)
    return 2.0 * torch.randint(0, 2, (count, size), generator=generator).numpy() - 1


def without(matrix: np.ndarray, listed: list[float]) -> np.ndarray:
    """The matrix without the eigenvectors of these eigenvalues."""
    values, vectors = np.linalg.eigh(matrix)
    taken = vectors[:, [int(np.abs(values - value).argmin()) for value in listed]]
    rest = np.eye(len(values)) - taken @ taken.T
    return rest @ matrix @ rest


def of_signs(matrix: np.ndarray, z: np.ndarray, known: float = 0.0) -> dict[str, Any]:
    """Hutchinson's trace: its variance is twice that of the terms `z_i (A z)_i`, its freedom Satterthwaite's."""
    images, count = z @ matrix, len(z)
    terms = z * images
    error = math.sqrt(2 * terms.var(axis=0, ddof=1).sum() / count)
    grams = [images[k : k + 2] @ images[k : k + 2].T for k in range(0, count - 1, 2)]
    freedom = sum(np.trace(g) ** 2 for g in grams) / sum((g**2).sum() for g in grams)
    return interval(known + terms.sum(axis=1).mean(), error, count, count * max(1.0, freedom))


def sketched(matrix: np.ndarray, z: np.ndarray, kept: list[int]) -> float:
    """XTrace from some of the vectors: each estimate has a sketch without its own vector."""
    found = []
    for i in kept:
        q = np.linalg.qr(matrix @ z[[k for k in kept if k != i]].T)[0]
        own = z[i] - q @ (q.T @ z[i])
        found.append(np.trace(q.T @ matrix @ q) + own @ matrix @ own)
    return float(np.mean(found))


@pytest.mark.parametrize("method", ["deflated", "hutchinson", "hutchpp", "xtrace"])
def test_each_estimate_of_the_trace_is_that_of_its_paper(method: str, root: Path):
    options = {"trace_method": method, "num_probes": 13, "top_k": 2, "tolerance": 1e-8}
    found, matrix = analyzed("bert", LOSS, root, "hessian", "lanczos", **options), hessian("bert", LOSS, root)
    size, trace = len(matrix), found["trace"]
    if method == "hutchinson":
        expected = of_signs(matrix, signs(13, size))
    elif method == "deflated":
        expected = of_signs(without(matrix, found["eigenvalues"]), signs(13, size), sum(found["eigenvalues"]))
    elif method == "hutchpp":
        z = signs(9, size)  # 4 for the sketch, whose trace takes as many products, and 5 for the rest
        q = np.linalg.qr(matrix @ z[:4].T)[0]
        rest = np.eye(size) - q @ q.T
        expected = of_signs(rest @ matrix @ rest, z[4:], np.trace(q.T @ matrix @ q))
    else:
        z, every = signs(6, size), [*range(6)]
        left = [sketched(matrix, z, [k for k in every if k != i]) for i in every]
        expected = interval(sketched(matrix, z, every), math.sqrt(5 * np.var(left)), 6)
    assert agree(trace, expected, rel=1e-5)


@pytest.mark.parametrize("method", ["deflated", "hutchinson", "hutchpp", "xtrace"])
def test_the_trace_of_a_semidefinite_matrix_has_the_interval_of_a_sum_of_squares(method: str, root: Path):
    options = {"num_probes": 7, "top_k": 2, "tolerance": 1e-8, "trace_method": method}
    found = analyzed("bert", LOSS, root, "fisher", "lanczos", **options)
    values = found["eigenvalues"]
    matrix, known, z = matrices("bert", LOSS, root)["fisher"], 0.0, signs(7, 161)
    if method == "deflated":
        matrix, known = without(matrix, values), sum(values)
    elif method == "hutchpp":
        q = np.linalg.qr(matrix @ z[:2].T)[0]
        rest, z = np.eye(161) - q @ q.T, z[2:5]
        matrix, known = rest @ matrix @ rest, np.trace(q.T @ matrix @ q)
    forms, images = ((z @ matrix) * z).sum(axis=1), z @ matrix
    mean, variance = forms.mean(), max(2 * (images**2).sum(axis=1).mean(), forms.var(ddof=1))
    freedom = len(z) * max(1.0, 2 * mean**2 / variance)
    low, high = (known + freedom * mean / stats.chi2.ppf(tail, freedom) for tail in (0.975, 0.025))
    error, kind = math.sqrt(variance / len(z)), "chi_squared"
    if method == "xtrace":
        q = np.linalg.qr(matrix @ z[:3].T)[0]
        left = [sketched(matrix, z, [k for k in range(3) if k != i]) for i in range(3)]
        mean, error, kind = sketched(matrix, z, [0, 1, 2]), math.sqrt(2 * np.var(left)), "student"
        z, high = z[:3], mean + stats.t.ppf(0.975, 2) * error
        low = max(2 * mean - high, min(np.trace(q.T @ matrix @ q), mean))
    expected = {"value": known + mean, "standard_error": error, "low": low, "high": high, "num_samples": len(z)}
    trace = found["trace"]
    assert (trace.pop("kind"), trace) == (kind, pytest.approx(expected, rel=1e-5))
    score = found["estimates"]["sharpness_score"]
    of_trace = {name: values[0] / expected[end] for name, end in (("value", "value"), ("low", "high"), ("high", "low"))}
    of_trace |= {"standard_error": of_trace["value"] * error / expected["value"], "num_samples": len(z)}
    assert (score.pop("kind"), score) == (kind, pytest.approx(of_trace, rel=1e-4))


def quadrature(matrix: np.ndarray, z: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the Gauss rule of a vector, from a Krylov basis by QR."""
    basis = [z / np.linalg.norm(z)]
    while len(basis) < steps:
        new = matrix @ basis[-1]
        for _ in range(2):
            new = new - sum((new @ b) * b for b in basis)
        basis.append(new / np.linalg.norm(new))
    nodes, vectors = np.linalg.eigh(np.array(basis) @ matrix @ np.array(basis).T)
    return nodes, z @ z * vectors[0] ** 2


def test_the_density_is_the_quadrature_of_each_random_vector(root: Path):
    options = {"num_probes": 6, "probe_steps": 5, "top_k": 2, "tolerance": 1e-8}
    found = analyzed("bert", LOSS, root, "hessian", "lanczos", with_density=True, **options)
    whole, density, known = hessian("bert", LOSS, root), found["density"], np.array(found["eigenvalues"])
    matrix = without(whole, found["eigenvalues"])
    values, vectors = np.linalg.eigh(whole)
    taken = vectors[:, [int(np.abs(values - value).argmin()) for value in known]]
    probes = [z - taken @ (taken.T @ z) for z in signs(6, len(matrix))]
    rules, shorter = ([quadrature(matrix, z, steps) for z in probes] for steps in (5, 4))
    assert density["exact"] == found["eigenvalues"]
    assert (density["num_parameters"], density["num_products"]) == (len(matrix), 30)
    for nodes, weights, rule in zip(density["nodes"], density["weights"], rules, strict=True):
        assert (nodes, weights) == (pytest.approx(rule[0], rel=1e-4), pytest.approx(rule[1], rel=1e-4))
    forms, squares = (np.array([w @ n**power for n, w in rules]) for power in (1, 2))
    variance = max(forms.var(ddof=1), 2 * (squares.mean() - forms.mean() ** 2 / len(matrix)))
    assert agree(found["trace"], interval(known.sum() + forms.mean(), math.sqrt(variance / 6), 6), rel=1e-5)

    def estimate(function: Any) -> dict[str, Any]:
        """A function of the sums of size, square and negative part, with the error of vectors and of the last step."""

        def of(rules: list[Any]) -> float:
            nodes = np.concatenate([known, *(n for n, _ in rules)])
            weights = np.concatenate([np.ones(len(known)), *(w / len(rules) for _, w in rules)])
            return function(weights @ abs(nodes), weights @ nodes**2, -weights @ np.minimum(nodes, 0))

        left = [of([rule for rule in rules if rule is not out]) for out in rules]
        return interval(of(rules), math.hypot(math.sqrt(5 * np.var(left)), of(rules) - of(shorter)), 6)

    top = abs(known).max()
    for name, function in {
        "frobenius_norm": lambda size, square, negative: math.sqrt(square),
        "negative_share": lambda size, square, negative: negative / size,
        "participation_rank": lambda size, square, negative: size**2 / square,
        "stable_rank": lambda size, square, negative: square / top**2,
        "intrinsic_dimension": lambda size, square, negative: size / top,
    }.items():
        expected, got = estimate(function), found["estimates"][name]
        is_resolved = expected["standard_error"] <= expected["value"] / 2
        assert agree(got, expected, rel=1e-4) if is_resolved else got is None, name


def resampled(function: Any, d: Dense, count: int, kind: str) -> dict[str, Any]:
    """Interval of a function of the pairs' weights over resampled prompts: basic, or BCa (Efron, 1987)."""
    prompts = np.unique(d.prompt)
    drawn = np.random.default_rng(SEED).integers(len(prompts), size=(count, len(prompts)))
    counts = np.array([np.bincount(row, minlength=len(prompts)) for row in drawn])
    value = function(d.weight)
    found = np.array([function(d.weight * row[d.prompt]) for row in counts])
    tails = np.array([0.025, 0.975])
    if kind == "basic":
        high, low = 2 * value - np.quantile(found, tails)
        low, high = min(max(low, 0.0), value), max(high, value)
    else:
        left = np.array([function(d.weight * (d.prompt != prompt)) for prompt in prompts])
        rest, bias = left.mean() - left, stats.norm.ppf(np.mean(found < value))
        skew, shifted = (rest**3).sum() / (6 * (rest**2).sum() ** 1.5), bias + stats.norm.ppf(tails)
        low, high = np.quantile(found, stats.norm.cdf(bias + shifted / (1 - skew * shifted)))
    ends = {"low": low, "high": high, "kind": "resampled", "num_samples": len(prompts)}
    return {"value": value, "standard_error": found.std(ddof=1), **ends}


@pytest.mark.parametrize(("matrix", "method"), [("gauss_newton", "gauss_newton_exact"), ("hessian", "lanczos")])
def test_intervals_over_many_prompts_are_resampled(matrix: str, method: str, root: Path):
    rows = [ROWS[i % 7] | {"prompt": f"{i - i // 6:02d}"} for i in range(50)]
    d = over(rows, "bert", LOSS, root)
    d = replace(d, names=[name for name in d.names if "encoder" not in name])
    each = matrices_of(d)["pair newton"] if matrix == "gauss_newton" else hessians_of(d)
    how = {
        "params": ["*pooler*", "*classifier*"],
        "dtype": torch.float64,
        "seed": SEED,
        "loss": LossConfig(**LOSSES[LOSS]),
    }
    analyzer = HessianAnalyzer(BradleyTerryRM.from_pretrained(folder("bert", root)), **how)
    options, told = SpectrumOptions(num_sampled=2, tolerance=1e-8), list[int]()
    how = {"matrix": matrix, "top_k": 2, "options": options, "on_product": told.append}
    spectrum = analyzer.compute_spectrum(rows, method, **how)
    found, prompts = json.loads(spectrum.to_json()), np.unique(d.prompt)
    first = np.isin(d.prompt, np.random.default_rng(SEED).permutation(prompts)[: len(prompts) // 2])

    def mean(weight: np.ndarray) -> np.ndarray:
        return np.average(each, axis=0, weights=weight)

    def along(vector: np.ndarray) -> np.ndarray:
        return np.einsum("i,pij,j->p", vector, each, vector)

    def of_mean(curvature: np.ndarray) -> dict[str, Any]:
        return resampled(lambda weight: np.average(curvature, weights=weight), d, 1000, "bca")

    whole, a, b = (np.linalg.eigh(mean(d.weight * inside))[1] for inside in (first | ~first, first, ~first))
    linear = [of_mean(along(whole[:, -k])) for k in (1, 2)]
    crossed = [of_mean(np.where(first, along(b[:, -k]), along(a[:, -k]))) for k in (1, 2)]
    expected, scale = linear, {"rel": 0.05, "abs": 0.01}
    if matrix == "gauss_newton":
        tops = [lambda weight, k=k: np.linalg.eigvalsh(mean(weight))[-k] for k in (1, 2)]
        expected, scale = [resampled(top, d, 200, "basic") for top in tops], {"rel": 1e-6, "abs": 0.0}
        trace = resampled(lambda weight: np.trace(mean(weight)), d, 200, "basic")
        assert {**found["trace"], "kind": "resampled"} == {
            name: end if isinstance(end, str) else pytest.approx(end, rel=1e-6) for name, end in trace.items()
        }
    pairs = [*zip(found["sampling"], expected, strict=True), *zip(found["cross_fit"]["values"], crossed, strict=True)]
    for got, estimate in pairs:
        assert got.pop("kind") == estimate.pop("kind")
        assert got == pytest.approx(estimate, **scale)
    assert found["cross_fit"]["num_products"] == max(told, default=found["num_products"]) - found["num_products"]
    ends = {"population_low": crossed[0]["low"], "population_high": max(crossed[0]["high"], linear[0]["high"])}
    assert {name: found["cross_fit"][name] for name in ends} == pytest.approx(ends, **scale)


def test_two_spectra_are_compared_by_their_values_and_vectors(root: Path):
    model, spectra, ends = BradleyTerryRM.from_pretrained(folder("bert", root)), [], []
    params = ["*pooler*", "*classifier*"]
    d = dense("bert", LOSS, root)
    d = replace(d, names=[name for name in d.names if "encoder" not in name])
    for _ in range(2):
        analyzer = HessianAnalyzer(model, loss=LossConfig(**LOSSES[LOSS]), params=params, dtype=torch.float64)
        options = SpectrumOptions(num_probes=5, trace_method="hutchinson", tolerance=1e-8)
        spectra.append(analyzer.compute_spectrum(ROWS, top_k=4, options=options))
        matrix = d.at(model.model.state_dict()).hessian()
        values, vectors = np.linalg.eigh(matrix)
        z = 2.0 * torch.randint(0, 2, (5, len(values)), generator=torch.Generator().manual_seed(1)).numpy() - 1
        ends.append((values, vectors[:, -3:], ((z @ matrix) * z).sum() / 5))
        with torch.no_grad():
            for p in model.parameters():
                p += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    (old, v, trace), (new, u, new_trace) = ends
    found = json.loads(compare_spectra(*spectra, top_k=3).to_json())
    assert found["ratios"] == pytest.approx((new / old)[:-4:-1], rel=1e-5)
    assert found["bottom_ratios"] == pytest.approx((new / old)[:3], rel=1e-5)
    assert found["trace_ratio"] == pytest.approx(new_trace / trace, rel=1e-5)
    assert found["subspace_overlap"] == pytest.approx(((v.T @ u) ** 2).sum() / 3, rel=1e-5)
    assert (found["num_compared"], found["num_pairs"]) == (3, [7, 7])


def test_slices_along_eigenvectors_are_the_losses_there(root: Path):
    d = dense("bert", LOSS, root)
    values, vectors = np.linalg.eigh(hessian("bert", LOSS, root))
    vectors = vectors[:, np.argsort(-np.abs(values))]
    given = [
        f"checkpoint={folder('bert', root)}",
        f"data.train={root}/pairs.jsonl",
        "landscape=slices",
        "progress=false",
    ]
    given += [f"landscape.params={MODELS['bert'][1]}", "landscape.dtype=float64", f"output_dir={root}/slices"]
    given += ["landscape.directions=eigenvectors", "landscape.num_points=5", "landscape.tolerance=1e-8"]
    given += ["landscape.num_directions=2", *(f"loss.{k}={v}" for k, v in LOSSES[LOSS].items())]
    analyze(typed(compose(given, "analyze"), AnalyzeConfig))
    found = json.loads((root / "slices" / "slices.json").read_text())
    reach = math.sqrt(2 / np.abs(values).max())  # a rise of the parabola by 1 nat
    assert found["steps"] == pytest.approx(np.linspace(-reach, reach, 5), rel=1e-6)
    assert found["measured"]["values"] == pytest.approx(sorted(values, key=abs)[:-3:-1], rel=1e-6)
    for i in range(2):
        got = [list(point.values()) for point in found["points"][i]]
        line = vectors[:, i]
        expected = [[*d.measured(d.point + step * torch.from_numpy(line)).values()] for step in found["steps"]]
        better = min((expected, expected[::-1]), key=lambda e: abs(np.array(e)[0, 0] - got[0][0]))
        np.testing.assert_allclose(got, better, rtol=1e-4, atol=1e-6)
