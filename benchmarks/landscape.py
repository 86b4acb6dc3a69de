"""Hessian-vector products, time and memory of a reward model's spectrum, beside PyHessian's.

Models of 5M parameters, a BERT-shaped encoder and a Llama-shaped decoder, trained for `--steps` steps from a random
start with a Bradley-Terry loss on all pairs of at most `--train-length` tokens; then the curvature of that loss over 64
of them, of varying lengths up to `--max-length`, in float32. Both sides differentiate the same micro-batches with the
same attention, and PyHessian keeps the gradient's graph, which is its fastest way. Seconds are those of the process on
one thread (`time.process_time`), which other work on the machine does not lengthen much; sides take turns, and ratios
are medians over `--rounds`.

The truth is a Lanczos run in float64 to 1e-5. An error is the largest relative one of the ten eigenvalues of largest
magnitude, both lists in descending order. `speedup_at_equal_accuracy_top10` is against PyHessian with a smaller `tol`
and a larger `maxIter`, or a lower bound (`pyhessian_gave_up` is 1) where it is not there after `--give-up` times our
seconds. Memory is the growth of a fresh process's peak.

    python benchmarks/landscape.py --pairs hh_train.jsonl.gz
    python benchmarks/landscape.py --pairs hh_train.jsonl.gz --parts gradients gauss_newton --models encoder
    python benchmarks/landscape.py --pairs hh_train.jsonl.gz --minilm FOLDER              # top 20 of a real model
    python benchmarks/landscape.py --pairs hh_train.jsonl.gz --minilm FOLDER --callback   # cost while training
    python benchmarks/landscape.py --pairs hh_train.jsonl.gz --minilm FOLDER --watch --steps 12 --num-pairs 32
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from landscape_cross_fit import measure_cross_fit
from landscape_minilm import measure_callback, measure_minilm, measure_watching
from landscape_oracle import measure_oracle
from landscape_subjects import SHAPES, Subject, ours, prepare, some, timed
from transformers.utils import logging as transformers_logging

from rm_optimizer.landscape.estimates.density import spectral_density
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.operators.base import HessianOperator
from rm_optimizer.landscape.operators.gauss_newton import gauss_newton_exact
from rm_optimizer.landscape.operators.objective import measuring
from rm_optimizer.landscape.solvers.reference import MAX_ITERATIONS, PyHessianProblem
from rm_optimizer.schema import LossConfig
from rm_optimizer.schema.landscape import SpectrumOptions

PRECISE, ACCURATE = 1e-5, 1e-3
TIGHTER = ((1e-4, 1_000), (1e-6, 100_000))
"""PyHessian's `tol` and `maxIter`, beyond its defaults."""
FURTHER_STEPS = (1, 10, 50)
DENSITY_STEPS = 3
LEAN: dict[str, Callable[[int], dict[str, Any]]] = {
    "": lambda top_k: {},
    "bounded": lambda top_k: {"max_basis": 2 * top_k},
    "rebuilt": lambda top_k: {"product": "reverse"},
}
"""Ways to save memory, by the name that follows `memory_ratio`: the default, a basis of twice as many vectors as
eigenvalues, and no kept graphs."""
PARTS = ("oracle", "spectrum", "gradients", "gauss_newton", "density", "cross_fit", "warm", "memory", "growth")
Results = dict[str, float]
WORST: dict[str, Callable[[list[float]], float]] = {
    "products_over_oracle_top5": max,
    "products_over_oracle_top10": max,
    "products_over_oracle_top20": max,
    "hvps_top10_1e3": max,
    "error_top10": max,
    "speedup_vs_pyhessian_top5": min,
    "speedup_vs_pyhessian_top10": min,
    "speedup_at_equal_accuracy_top10": min,
    "gauss_newton_exact_gradients": max,
    "cold_start_hvps_top1": max,
    "warm_start_hvps_top1": max,
    "cold_start_hvps_top5": max,
    "warm_start_hvps_top5": max,
    "hvp_gradients": max,
    "hvp_gradients_rebuilt": max,
    "memory_ratio": max,
}
"""Lines without a model's name: the less favorable model."""


class GaveUpError(Exception):
    """PyHessian took longer than it was given."""


@dataclass(frozen=True)
class Peer:
    """Result of PyHessian.

    Args:
        values: eigenvalues, in its order.
        seconds: seconds until each was done.
        products: products until each was done.
    """

    values: list[float]
    seconds: list[float]
    products: list[int]


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Cost of a reward model's Hessian spectrum, beside PyHessian's.")
    parser.add_argument("--pairs", help="preference pairs, HH-RLHF say; without it the synthetic world")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--num-pairs", type=int, default=64, help="pairs that the loss is averaged over")
    parser.add_argument("--max-length", type=int, default=64, help="tokens of the longest pair that is taken")
    parser.add_argument("--train-length", type=int, default=128, help="tokens of the longest pair that is trained on")
    parser.add_argument("--token-budget", type=int, default=2048, help="tokens of a measured micro-batch with padding")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size; fewer for a quick look")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300, help="training steps before the measurement")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--top-k", type=int, default=10, help="what top10 stands for; fewer for a quick look")
    parser.add_argument("--give-up", type=float, default=12, help="PyHessian's time at most, in ours")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minilm", help="folder of a pretrained encoder; then nothing else is measured")
    parser.add_argument("--callback", action="store_true", help="with --minilm: the cost of watching while training")
    parser.add_argument("--watch", action="store_true", help="with --minilm: runs with and without measurements")
    parser.add_argument(
        "--batch-size", type=int, help="with --callback and --watch: pairs a step; the preset's if unset"
    )
    parser.add_argument("--precision", default="32-true", help="with --callback and --watch: that of the steps")
    parser.add_argument("--only", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def pyhessian(
    subject: Subject, top_k: int, tol: float = 1e-3, max_iter: int = MAX_ITERATIONS, limit: float = math.inf
) -> Peer:
    """PyHessian's eigenvalues of the same loss, one after the other.

    Raises:
        GaveUpError: after so many seconds.
    """
    module = import_module("pyhessian.hessian")
    began, original = time.process_time(), module.orthnormal
    marks: list[tuple[int, float]] = []

    def watched(vector: Any, found: list[Any]) -> Any:
        marks.append((len(found), time.process_time() - began))
        if marks[-1][1] > limit:
            raise GaveUpError
        return original(vector, found)

    with measuring(subject.model, subject.batches, LossConfig()) as objective:
        problem = PyHessianProblem(objective)
        with problem.undone(0), patch.object(module, "orthnormal", watched):
            values, _ = problem.open().eigenvalues(maxIter=max_iter, tol=tol, top_n=top_k)
    marks.append((top_k, time.process_time() - began))
    ends = [next(i for i, (found, _) in enumerate(marks) if found > k) for k in range(top_k)]
    return Peer(values, [marks[end][1] for end in ends], ends)


def error(values: Sequence[float], truth: Sequence[float]) -> float:
    """Largest relative error, both lists in descending order."""
    pairs = zip(sorted(values, reverse=True), sorted(truth, reverse=True), strict=True)
    return max(abs(found - true) / abs(true) for found, true in pairs)


def measure_spectrum(args: argparse.Namespace, subject: Subject) -> Results:
    """Products, errors and speed-ups of the top 5 and the top 10."""
    k, half = args.top_k, args.top_k // 2
    precise = ours(subject, k, dtype=torch.float64, tolerance=PRECISE).eigenvalues
    truth = sorted(precise, key=abs, reverse=True)
    print(f"  truth: {', '.join(f'{value:.5g}' for value in truth)}")
    few: list[float] = []
    many: list[float] = []
    for _ in range(args.rounds):
        ours5, seconds5 = timed(partial(ours, subject, half))
        peer = pyhessian(subject, k)
        ours10, seconds10 = timed(partial(ours, subject, k))
        few.append(peer.seconds[half - 1] / seconds5)
        many.append(peer.seconds[-1] / seconds10)
        print(
            f"  ours {seconds5:.1f} s and {seconds10:.1f} s, PyHessian {peer.seconds[half - 1]:.1f} s and "
            f"{peer.seconds[-1]:.1f} s"
        )
    print(f"  PyHessian: {', '.join(f'{value:.5g}' for value in peer.values)}")
    return {
        "hvps_top5_1e3": ours5.num_products,
        "hvps_top10_1e3": ours10.num_products,
        "hvps_top5_pyhessian": peer.products[half - 1],
        "hvps_top10_pyhessian": peer.products[-1],
        "error_top5": error(ours5.eigenvalues, truth[:half]),
        "error_top10": error(ours10.eigenvalues, truth),
        "error_top5_pyhessian": error(peer.values[:half], truth[:half]),
        "error_top10_pyhessian": error(peer.values, truth),
        "seconds_top10": seconds10,
        "speedup_vs_pyhessian_top5": median(few),
        "speedup_vs_pyhessian_top10": median(many),
        **at_equal_accuracy(args, subject, peer, seconds10, truth),
    }


def at_equal_accuracy(
    args: argparse.Namespace, subject: Subject, peer: Peer, seconds: float, truth: list[float]
) -> Results:
    """PyHessian tightened until its values are as right as ours, or until it gives up."""
    gave_up, spent, limit = 0, peer.seconds[-1], args.give_up * seconds
    for tol, max_iter in TIGHTER:
        if error(peer.values, truth) <= ACCURATE:
            break
        try:
            peer = pyhessian(subject, args.top_k, tol, max_iter, limit)
            spent = peer.seconds[-1]
            print(f"  PyHessian, tol {tol:g}: {spent:.1f} s, error {error(peer.values, truth):.2g}")
        except GaveUpError:
            gave_up, spent = 1, limit
            break
    gave_up = gave_up or int(error(peer.values, truth) > ACCURATE)
    return {"speedup_at_equal_accuracy_top10": spent / seconds, "pyhessian_gave_up": gave_up}


def measure_gradients(args: argparse.Namespace, subject: Subject) -> Results:
    """Cost of a product in gradients of the same pairs, with the graph kept and in the ways that keep none."""
    ways: tuple[str, ...] = ("kept_graph", "reverse", "forward")
    with measuring(subject.model, subject.batches, LossConfig()) as objective:
        operators = {way: HessianOperator(objective, product=way) for way in ways}
        vector = torch.randn(1, objective.subset.num_parameters, generator=torch.Generator().manual_seed(0))
        seconds: dict[str, list[float]] = {name: [] for name in ("gradient", *ways)}
        for _ in range(3 + args.rounds):
            seconds["gradient"].append(timed(objective.gradient)[1])
            for way in ways:
                seconds[way].append(timed(partial(operators[way].apply, vector))[1])
        least = {name: min(taken[1:]) for name, taken in seconds.items()}
    return {
        "hvp_gradients": least["kept_graph"] / least["gradient"],
        "hvp_gradients_rebuilt": least["reverse"] / least["gradient"],
        "hvp_gradients_forward": least["forward"] / least["gradient"],
        "gradient_seconds": least["gradient"],
    }


def measure_gauss_newton(args: argparse.Namespace, subject: Subject) -> Results:
    """Cost of the whole Gauss-Newton spectrum in gradients of the same pairs."""
    with measuring(subject.model, subject.batches, LossConfig()) as objective:
        ratios = []
        for _ in range(args.rounds + 1):
            gradient = timed(objective.gradient)[1]
            spectrum, seconds = timed(partial(gauss_newton_exact, objective))
            ratios.append(seconds / gradient)
    return {"gauss_newton_exact_gradients": median(ratios[1:]), "gauss_newton_eigenvalues": len(spectrum.values)}


def measure_density(args: argparse.Namespace, subject: Subject) -> Results:
    """Time of a density's four random vectors in lockstep, in that of one after the other, where graphs are rebuilt."""
    ratios = []
    with measuring(subject.model, subject.batches, LossConfig()) as objective:
        operator = HessianOperator(objective, product="reverse")
        for _ in range(args.rounds):
            alone, lockstep = (
                timed(partial(spectral_density, operator, num_steps=DENSITY_STEPS, seed=0, at_once=at_once))[1]
                for at_once in (1, 4)
            )
            ratios.append(lockstep / alone)
    return {"density_lockstep_ratio": median(ratios)}


def measure_warm(args: argparse.Namespace, subject: Subject) -> Results:
    """Products of the top 1 and top 5 of later weights, from the vectors of these and from a random one."""
    tops, base = (1, min(5, args.top_k)), subject.step
    before = {k: ours(subject, k, which="largest") for k in tops}
    counts: dict[str, list[int]] = {}
    results: Results = {}
    for further in FURTHER_STEPS:
        subject.train(base + further)
        for k in tops:
            for kind, start in (("cold_start", None), ("warm_start", before[k])):
                found = HessianAnalyzer(subject.model).compute_spectrum(
                    subject.batches, top_k=k, options=SpectrumOptions(which="largest"), start=start
                )
                name = f"{kind}_hvps_top{k}"
                counts.setdefault(name, []).append(found.num_products)
                results[f"{name}_after_{further}"] = found.num_products
    return results | {name: fmean(values) for name, values in counts.items()}


def measure_memory(args: argparse.Namespace, subject: Subject) -> Results:
    """Growth of the peak in processes of their own: ours by default and in the ways of `LEAN`, and PyHessian."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(subject, Path(folder) / "subject.pt")
        command = [sys.executable, __file__, "--top-k", str(args.top_k), "--threads", str(args.threads), "--only"]
        grown: dict[str, float] = {}
        products: Results = {}
        for side in (*LEAN, "pyhessian"):
            done = subprocess.run([*command, side, folder], stdout=subprocess.PIPE, text=True, check=True)
            grown[side], products[side] = json.loads(done.stdout.splitlines()[-1])
    peer = grown["pyhessian"]
    return {
        **{f"memory_ratio{side and '_' + side}": grown[side] / peer for side in LEAN},
        **{f"memory_products{side and '_' + side}": products[side] for side in LEAN},
        "memory_gb_pyhessian": peer / 1e9,
    }


def memory_growth(side: str, folder: Path, top_k: int) -> tuple[float, int]:
    """Bytes that this process's peak grows by, and products; PyHessian stops after two products of each value."""
    subject = torch.load(folder / "subject.pt", weights_only=False)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    if side == "pyhessian":
        num_products = pyhessian(subject, top_k, tol=0, max_iter=2).products[-1]
    else:
        num_products = ours(subject, top_k, **LEAN[side](top_k)).num_products
    return status_bytes("VmHWM") - before, num_products


def status_bytes(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(float(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure_growth(args: argparse.Namespace, subject: Subject) -> Results:
    """Products and seconds by k, by pairs and by parameters; exponents of seconds in the last two."""
    results: Results = {}
    for k in (args.top_k // 2, args.top_k, 2 * args.top_k):
        results |= cost(f"k_{k}", subject, k)
    for count in (args.num_pairs // 4, args.num_pairs // 2):
        part = replace(subject, batches=some(subject.measured, count, args.token_budget))
        results |= cost(f"pairs_{count}", part, args.top_k)
    whole = results[f"seconds_per_product_k_{args.top_k}"]
    results["growth_exponent_pairs"] = math.log2(whole / results[f"seconds_per_product_pairs_{args.num_pairs // 2}"])
    small = prepare(args, subject.name, args.hidden // 2)
    results |= cost(f"hidden_{args.hidden // 2}", small, args.top_k)
    sizes = [sum(p.numel() for p in each.model.parameters()) for each in (subject, small)]
    ratio = whole / results[f"seconds_per_product_hidden_{args.hidden // 2}"]
    return results | {"growth_exponent_parameters": math.log(ratio) / math.log(sizes[0] / sizes[1])}


def cost(name: str, subject: Subject, top_k: int) -> Results:
    """Products and seconds of one spectrum."""
    found, seconds = timed(partial(ours, subject, top_k))
    return {f"products_{name}": found.num_products, f"seconds_per_product_{name}": seconds / found.num_products}


MEASURES: dict[str, Callable[[argparse.Namespace, Subject], Results]] = {
    "oracle": measure_oracle,
    "spectrum": measure_spectrum,
    "gradients": measure_gradients,
    "gauss_newton": measure_gauss_newton,
    "density": measure_density,
    "cross_fit": measure_cross_fit,
    "warm": measure_warm,
    "memory": measure_memory,
    "growth": measure_growth,
}
"""What `--parts` names."""


def measure(args: argparse.Namespace, name: str) -> Results:
    """All parts of one model; `warm` comes last, since it trains on."""
    subject, results = prepare(args, name), Results()
    for part in sorted(args.parts, key=lambda part: (part == "warm", PARTS.index(part))):
        began = time.perf_counter()
        found = MEASURES[part](args, subject)
        print(f"  {part}, {time.perf_counter() - began:.0f} s by the clock: {found}", flush=True)
        results |= found
    return results


def main(argv: list[str] | None = None) -> None:
    args = options(argv)
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()
    if args.only:
        print(json.dumps(memory_growth(args.only[0], Path(args.only[1]), args.top_k)))
        return
    if args.minilm:
        measured = measure_watching if args.watch else measure_callback if args.callback else measure_minilm
        rows = {"minilm": measured(args)}
    else:
        rows = {name: measure(args, name) for name in args.models}
    for name, row in rows.items():
        for key, value in row.items():
            print(f"{key}_{name}: {value:.4g}")
    for key, worst in WORST.items():
        if values := [row[key] for row in rows.values() if key in row]:
            print(f"{key}: {worst(values):.4g}")


if __name__ == "__main__":
    main()
