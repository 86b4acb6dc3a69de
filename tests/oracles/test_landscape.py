"""Surfaces, layers, paths of training and differences of models: each number of the files against its formula."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from rm_optimizer import analyze as entrance
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.interfaces.command_line import checked
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.landscape import AnalyzeConfig
from rm_optimizer.train import option_callbacks
from rm_optimizer.training import train_reward_model
from tests.oracles.dense import LOSSES, MODELS, Dense, agree, dense, folder, hessians, interval, jackknifed, matrices

SEED, LOSS = 3, "every term"
OPTIONS = [f"loss.{name}={value}" for name, value in LOSSES[LOSS].items()]
PARAMS = f"landscape.params={MODELS['bert'][1]}"


def analysis(kind: str, checkpoint: Path, to: Path, *given: str) -> dict[str, Any]:
    """The JSON of an analysis."""
    arguments = [f"checkpoint={checkpoint}", f"landscape={kind}", f"output_dir={to}", "progress=false"]
    arguments = entrance.read([*arguments, "landscape.dtype=float64", *given]).overrides
    entrance.analyze(checked(arguments, AnalyzeConfig, name="analyze"))
    return json.loads((to / f"{kind}.json").read_text())


def of_folder(kind: str, root: Path, *given: str, to: str = "") -> dict[str, Any]:
    own = [f"data.train={root}/pairs.jsonl", f"seed={SEED}", *OPTIONS, *given]
    return analysis(kind, folder("bert", root), root / "results" / (to or kind), *own)


def drawn(d: Dense, count: int) -> Dense:
    """The pairs that a seed draws."""
    return d.of(sorted(np.random.default_rng(SEED).permutation(len(d.rows))[:count]))


def filter_normalized(d: Dense, generator: torch.Generator) -> Tensor:
    """Gaussian rows of the length of the weights' rows (Li et al., 2018); vectors stay."""
    parts = []
    for weight in d.parts(d.point).values():
        part = torch.zeros_like(weight)
        if weight.ndim > 1:
            rows = torch.randn(weight.shape, generator=generator).double()
            part = rows / rows.norm(dim=1, keepdim=True) * weight.norm(dim=1, keepdim=True)
        parts.append(part.flatten())
    return torch.cat(parts)


def test_a_surface_is_the_loss_along_two_filter_normalized_directions(root: Path):
    given = ["landscape.num_points=5", "landscape.span=0.7", "landscape.num_pairs=6", "landscape.token_budget=90"]
    found = of_folder("surface", root, PARAMS, *given)
    d, generator = drawn(dense("bert", LOSS, root), 6), torch.Generator().manual_seed(SEED)
    across, along = (filter_normalized(d, generator) for _ in range(2))
    steps = np.linspace(-0.7, 0.7, 5)
    assert found["x"] == found["y"] == pytest.approx(steps)
    told = {"num_parameters": len(d.point), "num_pairs": 6, "num_prompts": len(set(d.prompt)), "seed": SEED}
    assert told.items() <= found["measured"].items()
    rows = [*csv.DictReader((root / "results" / "surface" / "surface.csv").read_text().splitlines())]
    for y, line in zip(steps, found["points"], strict=True):
        for x, point in zip(steps, line, strict=True):
            expected = d.measured(d.point + x * across + y * along)
            assert point == pytest.approx(expected, rel=1e-6), (x, y)
            row = {name: float(value) for name, value in rows.pop(0).items()}
            assert row == pytest.approx({"x": x, "y": y, **expected}, rel=1e-6, abs=1e-12)


def halves(d: Dense) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every division of four prompts into two and two, as masks of the pairs."""
    prompts = np.unique(d.prompt)
    for other in prompts[1:]:
        first = np.isin(d.prompt, [prompts[0], other])
        yield first, ~first


def mean_of(each: np.ndarray, inside: np.ndarray, d: Dense) -> np.ndarray:
    return np.average(each[inside], axis=0, weights=d.weight[inside])


def top_of(matrix: np.ndarray) -> tuple[float, np.ndarray]:
    values, vectors = np.linalg.eigh(matrix)
    return float(values[-1]), vectors[:, -1]


def cross_fits(each: np.ndarray, d: Dense, count: int) -> Iterator[dict[str, Any]]:
    """The top eigenvalues of a mean of matrices of pairs, cross-fitted by each division into halves."""
    own = interval(*along(each, top_of(mean_of(each, d.weight > 0, d))[1], d), 4)
    for first, second in halves(d):
        (a, v), (b, u) = (np.linalg.eigh(mean_of(each, half, d)) for half in (first, second))
        found = []
        for k in range(1, count + 1):
            held = [np.einsum("i,pij,j->p", vector[:, -k], each, vector[:, -k]) for vector in (u, v)]
            curvature = np.where(first, *held)
            found.append(interval(float(d.weight @ curvature), jackknifed(curvature, d), 4))
        ends = {"population_low": found[0]["low"], "population_high": max(found[0]["high"], own["high"])}
        yield {"values": found, "halves": sorted((a[-1], b[-1])), **ends}


def along(each: np.ndarray, vector: np.ndarray, d: Dense) -> tuple[float, float]:
    """Curvature of pairs along a vector and its error over prompts."""
    curvature = np.einsum("i,pij,j->p", vector, each, vector)
    return float(d.weight @ curvature), jackknifed(curvature, d)


def require_cross_fit(found: dict[str, Any], each: np.ndarray, d: Dense, tolerance: float, count: int = 1) -> None:
    """One of the divisions into halves gives every number."""
    quarters, both, every = found.pop("by_num_pairs")
    nearest = min(cross_fits(each, d, count), key=lambda one: math.dist(one["halves"], sorted(both["values"])))
    top = top_of(mean_of(each, d.weight > 0, d))[0]
    scale = {"rel": tolerance, "abs": tolerance * abs(top)}
    assert sorted(both["values"]) == pytest.approx(nearest.pop("halves"), **scale)
    assert found.pop("num_products") >= 0
    for value, expected in zip(found.pop("values"), nearest.pop("values"), strict=True):
        assert agree(value, expected, **scale)
    assert found == pytest.approx(nearest, **scale)
    assert (every["values"], both["num_pairs"], every["num_pairs"]) == ([pytest.approx(top, **scale)], 3.5, 7)
    single = [top_of(mean_of(each, d.prompt == prompt, d))[0] for prompt in np.unique(d.prompt)]
    assert all(min(abs(value - one) for one in single) <= scale["abs"] for value in quarters["values"])
    assert len({*quarters["values"]}) == len(quarters["values"])


def test_layers_are_the_blocks_of_the_matrices(root: Path):
    given = ["landscape.num_probes=8", "landscape.tolerance=1e-6", "landscape.product=reverse"]
    given += ["landscape.method=lanczos"]
    found = of_folder("layers", root, PARAMS, *given)
    d, newton = dense("bert", LOSS, root), matrices("bert", LOSS, root)["pair newton"]
    hessian = hessians("bert", LOSS, root)
    rest = np.einsum("p,pij->ij", d.weight, hessian - newton)
    signs = 2.0 * torch.randint(0, 2, (8, len(d.point)), generator=torch.Generator().manual_seed(SEED)).numpy() - 1
    layer = d.columns("encoder.layer")
    assert [block["block"] for block in found["blocks"]] == ["layer 1", "output"]
    assert (found["num_pairs"], found["num_prompts"], found["seed"], found["missing"]) == (7, 4, SEED, [])
    for block, inside in zip(found["blocks"], (layer, ~layer), strict=True):
        own, whole = (each[:, inside][:, :, inside] for each in (newton, hessian))
        total, curved = (np.einsum("p,pij->ij", d.weight, each) for each in (own, whole))
        assert block["num_parameters"] == inside.sum()
        values = np.linalg.eigvalsh(total)[::-1]
        assert block["gauss_newton"] == pytest.approx(values[: len(block["gauss_newton"])], rel=1e-6, abs=1e-9)
        trace = interval(np.trace(total), jackknifed(np.trace(own, axis1=1, axis2=2), d), 4)
        assert agree(block["gauss_newton_trace"], trace, rel=1e-6)
        terms = signs[:, inside] * (signs @ rest)[:, inside]
        forms, spread = terms.sum(axis=1), terms.var(axis=0, ddof=1).sum()  # the spread counts each of two twins once
        error = math.sqrt(max(forms.var(ddof=1), spread) / 8)
        assert agree(block["trace"], interval(np.trace(total) + forms.mean(), error, 8), rel=1e-6)
        top, value = block["hessian_top"], top_of(curved)[0]
        assert top["value"] == pytest.approx(value, rel=1e-6)
        assert top["converged"]
        assert top["error_bound"] <= 1e-5 * value
        assert 0 < top["cross_fit"]["num_products"] < top["num_products"]
        require_cross_fit(block["cross_fit"], own, d, 1e-6)
        require_cross_fit(top["cross_fit"], whole, d, 0.02)


def test_the_density_of_a_figure_is_a_mixture_over_its_nodes(root: Path):
    given = ["landscape.top_k=2", "landscape.num_probes=3", "landscape.probe_steps=4", "landscape.num_sampled=0"]
    density = of_folder("density", root, PARAMS, *given)["density"]
    exact, rules = density["exact"], [*zip(density["nodes"], density["weights"], strict=True)]
    known = np.array([*exact, *(node for nodes, _ in rules for node in nodes)])
    least, size = 0.01 * np.ptp(known), len(dense("bert", LOSS, root).point)

    def spread(nodes: list[float]) -> list[float]:
        gaps = [math.inf, *np.diff(nodes), math.inf]
        return [max(least, max(gap for gap in pair if gap < math.inf) / 2) for pair in pairwise(gaps)]

    def mixture(x: np.ndarray, parts: list[Any]) -> np.ndarray:
        total = sum(stats.norm.pdf(x, value, least) for value in exact)
        for nodes, weights in parts:
            normal = stats.norm.pdf(x[:, None], nodes, spread(nodes))
            total = total + normal @ np.array(weights) / len(parts)
        return total / (len(exact) + sum(sum(weights) for _, weights in parts) / len(parts))

    rows = [*csv.DictReader((root / "results" / "density" / "density.csv").read_text().splitlines())]
    x, y, error = (np.array([float(row[name]) for row in rows]) for name in ("eigenvalue", "density", "standard_error"))
    assert y == pytest.approx(mixture(x, rules), rel=1e-9)
    each = [mixture(x, [rule]) for rule in rules]
    assert error == pytest.approx(np.std(each, axis=0, ddof=1) / math.sqrt(3), rel=1e-6, abs=1e-12)
    assert np.trapezoid(y, x) == pytest.approx(1, abs=1e-3)
    assert sum(map(sum, density["weights"])) / 3 == pytest.approx(size - len(exact), rel=0.1)


@pytest.mark.parametrize(("kind", "method"), [("gauss_newton", "gauss_newton_exact"), ("hessian", "lanczos")])
def test_shares_of_groups_and_pairs_in_the_top_curvature(kind: str, method: str, root: Path):
    given = ["landscape.top_k=3", "landscape.num_sampled=2", f"landscape.method={method}"]
    given += ["landscape.tolerance=1e-7"] if kind == "hessian" else []
    found, d = of_folder(kind, root, PARAMS, *given), dense("bert", LOSS, root)
    each = matrices("bert", LOSS, root)["pair newton"] if kind == "gauss_newton" else hessians("bert", LOSS, root)
    _, vectors = np.linalg.eigh(mean_of(each, d.weight > 0, d))
    curvature = np.einsum("ik,pij,jk->pk", vectors[:, :-3:-1], each, vectors[:, :-3:-1])
    share = d.weight * curvature[:, 0] / (d.weight @ curvature[:, 0])
    scale = {"rel": 2e-3, "abs": 2e-3}
    for k, sampled in enumerate(found["sampling"]):
        assert sampled["value"] == pytest.approx(d.weight @ curvature[:, k], rel=1e-3)
        if kind == "hessian":
            assert sampled["standard_error"] == pytest.approx(jackknifed(curvature[:, k], d), rel=1e-2)
    groups = found["by_pair"]["groups"]
    assert [(group["column"], group["name"], group["num_pairs"]) for group in groups] == [
        ("source", "book", 4),
        ("source", "web", 3),
    ]
    for group in groups:
        inside = np.array([row["source"] == group["name"] for row in d.rows])
        assert group["along"] == pytest.approx(mean_of(curvature, inside, d), **scale)
        assert group["share"] == pytest.approx(share[inside].sum(), **scale)
        own = np.linalg.eigvalsh(mean_of(each, inside, d))[:-3:-1] if kind == "gauss_newton" else []
        assert group["eigenvalues"] == pytest.approx(own, rel=1e-6)
    order = np.argsort(-np.abs(share))
    heaviest = found["by_pair"]["heaviest"]
    assert [pair["share"] for pair in heaviest] == pytest.approx(share[order], **scale)
    assert [pair["curvature"] for pair in heaviest] == pytest.approx(curvature[order, 0], **scale)
    assert [pair["pair"]["prompt"] for pair in heaviest] == [d.rows[i]["prompt"] for i in order]
    require_cross_fit(found["cross_fit"], each, d, 1e-6 if kind == "gauss_newton" else 0.02, count=2)


def test_a_search_in_a_layer_ends_after_its_products(root: Path):
    given = [
        "landscape.method=lanczos",
        "landscape.max_products=2",
        "landscape.num_sampled=0",
        "landscape.product=reverse",
    ]
    [block] = of_folder("layers", root, "landscape.params=*pooler*", *given, "landscape.num_probes=2", to="ended")[
        "blocks"
    ]
    assert (block["hessian_top"]["num_products"], block["hessian_top"]["converged"]) == (2, False)
    assert block["hessian_top"]["cross_fit"] is None


@cache
def trained(root: Path) -> Path:
    """A run of four steps with a checkpoint at each, at which its curvature was measured too."""
    base, to = folder("bert", root), root / "run"
    given = {"data.train": root / "pairs.jsonl", "data.val": root / "pairs.jsonl", "model.path": base, "seed": SEED}
    given |= {"hardware": "cpu", "hardware.num_threads": 1, "training.progress": "false", "logger.tensorboard": "false"}
    given |= {"batching.batch_size": 2, "training.epochs": 1, "optimizer": "adamw", "optimizer.lr": 0.02}
    given |= {"optimizer.beta1": 0.8, "optimizer.beta2": 0.9, "optimizer.eps": 1e-3, "optimizer.head_lr_factor": 2.0}
    given |= {
        "training.checkpoint_every": 1,
        "training.keep_checkpoints": 9,
        "output_dir": to,
        "data.allow_prompt_overlap": "true",
    }
    given |= {"training.hessian.every": 1, "training.hessian.num_pairs": 6, "training.hessian.num_products": 1}
    config = typed(compose([*(f"{key}={value}" for key, value in given.items()), *OPTIONS]), TrainConfig)
    train_reward_model(config, callbacks=option_callbacks(config))
    return to


def checkpoint(root: Path, step: int) -> dict[str, Any]:
    [path] = (path for path in (trained(root) / "checkpoints").glob("step-*.ckpt") if int(path.stem[5:]) == step)
    return torch.load(path, weights_only=True)


def at_step(root: Path, step: int) -> Dense:
    """The loss at a checkpoint, over the pairs that the seed draws, by all parameters."""
    d = drawn(dense("bert", LOSS, root), 6)
    d = replace(d, names=[name for name, _ in d.model.named_parameters()])
    prefix, weights = "model.model.", checkpoint(root, step)["state_dict"] if step else {}
    return d.at({name.removeprefix(prefix): value for name, value in weights.items()})


def test_a_trajectory_is_the_plane_of_principal_directions_from_the_last_checkpoint(root: Path):
    given = ["landscape.num_points=3", "landscape.num_pairs=6"]
    found, last = analysis("trajectory", trained(root), root / "results" / "way", *given), at_step(root, 4)
    moves = torch.stack([at_step(root, step).point for step in range(1, 5)]) - last.point
    _, sizes, axes = torch.linalg.svd(moves, full_matrices=False)
    axes = axes[:2] * torch.sign(torch.tensor(found["coordinates"][0]) * (moves[0] @ axes[:2].T))[:, None]
    places, surface = moves @ axes.T, found["surface"]
    assert np.array(found["coordinates"]) == pytest.approx(places.numpy(), abs=1e-6)
    assert found["steps"] == [1, 2, 3, 4]
    assert surface["measured"]["values"] == pytest.approx((sizes**2 / (sizes**2).sum())[:2].numpy(), rel=1e-5)
    off = (moves - places @ axes).norm(dim=1).numpy()
    assert found["off_plane"] == pytest.approx(off, abs=1e-3 * off.max())
    for name, column in zip("xy", places.T.numpy(), strict=True):
        low, high, spare = column.min(), column.max(), 0.2 * np.ptp(column)
        assert surface[name] == pytest.approx(np.linspace(low - spare, high + spare, 3), abs=1e-6)
    for y, line in zip(surface["y"], surface["points"], strict=True):
        for x, point in zip(surface["x"], line, strict=True):
            there = last.point + torch.tensor([x, y], dtype=torch.float64) @ axes
            assert point == pytest.approx(last.measured(there), rel=1e-5)
    for step, point in zip(found["steps"], found["points"], strict=True):
        there = at_step(root, step)
        assert point == pytest.approx(there.measured(there.point), rel=1e-5)


def test_an_evolution_is_the_spectrum_at_each_step(root: Path):
    given = ["landscape.which=largest", "landscape.top_k=2", "landscape.num_probes=6", "landscape.tolerance=1e-7"]
    given += ["landscape.trace_method=hutchinson", "landscape.num_pairs=6", "landscape.num_sampled=0", PARAMS]
    found, before = analysis("evolution", trained(root), root / "results" / "evolution", *given), None
    assert (found["steps"], found["missing"], found["overlaps"][0]) == ([0, 1, 2, 3, 4], [], None)
    names = dense("bert", LOSS, root).names
    for step, spectrum, overlap in zip(found["steps"], found["spectra"], found["overlaps"], strict=True):
        d = replace(at_step(root, step), names=names)
        matrix = d.hessian()
        values, vectors = np.linalg.eigh(matrix)
        assert spectrum["eigenvalues"] == pytest.approx(values[:-3:-1], rel=1e-6)
        assert spectrum["loss"] == pytest.approx(d.loss(d.point).item(), rel=1e-7)
        signs = torch.randint(0, 2, (6, len(matrix)), generator=torch.Generator().manual_seed(SEED + 1)).numpy() * 2 - 1
        assert spectrum["trace"]["value"] == pytest.approx(np.mean(signs * (signs @ matrix)) * len(matrix), rel=1e-6)
        if before is not None:
            assert overlap == pytest.approx(((before.T @ vectors[:, -2:]) ** 2).sum() / 2, abs=1e-5)
        before = vectors[:, -2:]


def other_model(root: Path, seed: int) -> tuple[Path, Dense]:
    """The model with weights moved at random."""
    to, model = root / f"other-{seed}", BradleyTerryRM.from_pretrained(folder("bert", root))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.8 * torch.randn(p.shape, generator=generator)
    model.save_pretrained(to)
    d = drawn(dense("bert", LOSS, root), 6).at(model.model.state_dict())
    return to, replace(d, names=[name for name in d.names if "encoder" not in name])


def test_models_are_compared_along_the_straight_ways_between_them(root: Path):
    d = drawn(dense("bert", LOSS, root), 6)
    first = replace(d, names=[name for name in d.names if "encoder" not in name])
    (one, second), (two, third) = (other_model(root, seed) for seed in (4, 1))
    given = [f"landscape.others=[{one},{two}]", "landscape.method=full", "landscape.top_k=3", "landscape.num_points=5"]
    given += ["landscape.params=['*pooler*','*classifier*']", "landscape.num_pairs=6"]
    found, models = of_folder("between", root, *given), (first, second, third)
    assert (found["names"], found["num_prompts"]) == (["bert", "other-4", "other-1"], len(set(d.prompt)))
    tops = []
    for spectrum, model in zip(found["spectra"], models, strict=True):
        values, vectors = np.linalg.eigh(model.hessian())
        assert spectrum["eigenvalues"] == pytest.approx(values[::-1], rel=1e-5, abs=1e-6)
        tops.append(vectors[:, -3:])
    pairs, barriers = [*combinations(range(3), 2)], []
    for (i, j), path, overlap in zip(pairs, found["paths"], found["overlaps"], strict=True):
        assert (path["first"], path["second"]) == (i, j)
        assert overlap == pytest.approx(((tops[i].T @ tops[j]) ** 2).sum() / 3, rel=1e-5)
        assert path["positions"] == pytest.approx(np.linspace(0, 1, 5))
        ends, columns = (models[k].model.state_dict() for k in (i, j)), []
        start, end = ends
        for position in path["positions"]:
            there = d.at({name: start[name] + position * (end[name] - start[name]) for name in start})
            with torch.no_grad():
                columns.append(there.pair_losses(there.rewards(there.point)).numpy())
        losses = np.array(columns)
        assert path["losses"] == pytest.approx(losses @ d.weight, rel=1e-6)

        def rise(keep: np.ndarray, losses: np.ndarray = losses) -> float:
            at = losses[:, keep] @ d.weight[keep] / d.weight[keep].sum()
            return float(at[1:-1].max() - max(at[0], at[-1]))

        left = [rise(d.prompt != prompt) for prompt in np.unique(d.prompt)]
        expected = interval(rise(d.weight > 0), math.sqrt((len(left) - 1) * np.var(left)), len(left), bound=0.0)
        barriers.append(expected["value"])
        expected["value"] = max(expected["value"], 0.0)
        assert agree(path["barrier"], expected, rel=1e-5, abs=1e-12)
    assert min(barriers) < 0 < max(barriers)


def test_curvature_during_training(root: Path):
    rows = [*csv.DictReader((trained(root) / "metrics.csv").read_text().splitlines())]
    measured = {int(row["step"]): row for row in rows if row["curvature_trace"]}
    assert [*measured] == [0, 1, 2, 3, 4]
    for step, row in measured.items():
        got = {name: float(value or "nan") for name, value in row.items() if name.startswith("curvature_")}
        d = at_step(root, step)
        vector = d.point.requires_grad_()
        gradient = torch.autograd.grad(d.loss(vector), vector, create_graph=True)[0]

        def product(v: np.ndarray, gradient: Tensor = gradient, vector: Tensor = vector) -> np.ndarray:
            return torch.autograd.grad(gradient, vector, torch.from_numpy(v), retain_graph=True)[0].numpy()

        def largest(scale: np.ndarray, product: Any = product) -> float:
            size = len(scale)
            matrix = LinearOperator((size, size), lambda v: scale * product(scale * v.ravel()), dtype=np.float64)
            return float(eigsh(matrix, 1, which="LA", tol=1e-6)[0][0])

        size = len(vector)
        draws = torch.randint(0, 2, (4, size), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
        forms = np.array([sign @ product(sign) for sign in 2.0 * draws.double().numpy() - 1])
        assert got["curvature_trace_standard_error"] == pytest.approx(forms.std(ddof=1) / 2, rel=0.1)
        assert abs(got["curvature_trace"] - forms.mean()) < 0.1 * forms.std(ddof=1) / 2
        top = largest(np.ones(size))
        assert 0.97 * top < got["curvature_top_eigenvalue"] < 1.002 * top
        if not step:
            assert math.isnan(got["curvature_preconditioned_sharpness"])
            continue
        state = checkpoint(root, step)["optimizer_states"][0]
        rate = max(group["lr"] for group in state["param_groups"])
        limit = 2 * 1.8 / 0.2 / rate if rate else math.nan  # Adam's edge of stability (Cohen et al., 2022)
        assert got["curvature_stability_limit"] == pytest.approx(limit, nan_ok=True)
        scales = {}
        for group in state["param_groups"]:
            for name, place in zip(group["param_names"], group["params"], strict=True):
                second = state["state"][place]["exp_avg_sq"].double() / (1 - 0.9**step)
                divisor = (1 - 0.8**step) * (second.sqrt() + 1e-3)
                share = group["lr"] / rate if rate else 1.0
                scales[name.removeprefix("model.")] = torch.where(second > 0, (share / divisor).sqrt(), 0.0)
        sharpness = largest(torch.cat([scales[name].flatten() for name in d.names]).numpy())
        assert 0.97 * sharpness < got["curvature_preconditioned_sharpness"] < 1.002 * sharpness
