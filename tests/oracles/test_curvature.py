"""Curvature against dense float64 matrices from double backward through plain transformers, one sequence at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from rm_optimizer.analyze import analyze
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.schema import LossConfig, compose, typed
from rm_optimizer.schema.landscape import AnalyzeConfig, SpectrumOptions
from tests.oracles.dense import LOSSES, MODELS, ROWS, dense, folder, hessian, hessians, jackknifed, matrices


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
    top = {"top_k": 4, "which": "largest"} if method == "lanczos" else {}
    found = analyzed("bert", loss, root, kind, method, num_probes=20, num_sampled=1, **top)
    m, d = matrices("bert", loss, root), dense("bert", loss, root)
    values = np.linalg.eigvalsh(m[kind])[::-1]
    kept = 4 if method == "lanczos" else len(found["eigenvalues"])
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
    reach = math.sqrt(2 / np.abs(values).max())  # a rise of the parabola by 1 nat
    assert found["steps"] == pytest.approx(np.linspace(-reach, reach, 5), rel=1e-6)
    assert found["measured"]["values"] == pytest.approx(sorted(values, key=abs)[:-3:-1], rel=1e-6)
    for i in range(2):
        got = [list(point.values()) for point in found["points"][i]]
        line = vectors[:, i]
        expected = [[*d.measured(d.point + step * torch.from_numpy(line)).values()] for step in found["steps"]]
        better = min((expected, expected[::-1]), key=lambda e: abs(np.array(e)[0, 0] - got[0][0]))
        np.testing.assert_allclose(got, better, rtol=1e-4, atol=1e-6)
