"""Coverage of the trace's intervals, on matrices that are hard for them.

Each matrix has `--size` rows and known eigenvalues. From `--seeds` seeds come the shares of estimates whose 95 %
interval holds the trace, by method and number of products; `deflated` is Hutchinson's method once the three largest
eigenvalues by magnitude are found and taken out. Matrices without negative eigenvalues are estimated as such.

    python benchmarks/landscape_trace.py
    python benchmarks/landscape_trace.py --seeds 50
"""

from __future__ import annotations

import argparse

import torch

from rm_optimizer.landscape.estimates.trace import estimate_trace
from rm_optimizer.landscape.operators.base import MatrixOperator
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs, lanczos

PRODUCTS = {"hutchinson": (6, 12, 30), "hutchpp": (6, 12, 30), "xtrace": (6, 12, 30), "deflated": (2, 6, 20)}
FOUND = 3


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Coverage of the trace's intervals.")
    parser.add_argument("--size", type=int, default=240, help="rows of each matrix")
    parser.add_argument("--seeds", type=int, default=300)
    return parser.parse_args()


def matrices(size: int) -> dict[str, torch.Tensor]:
    """Matrices by name."""
    draws = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(size, size, generator=draws, dtype=torch.float64))[0]
    bulk = torch.rand(size, generator=draws, dtype=torch.float64)
    half = 10.0 / torch.arange(1, size // 2 + 1, dtype=torch.float64)
    spectra = {
        "outlier": torch.cat([torch.tensor([1e4], dtype=torch.float64), bulk[1:]]),
        "rank_1": _padded([5.0], size),
        "rank_3_mixed": _padded([5.0, -3.0, 1.0], size),
        "mirrored": torch.cat([half, -half]),
        "clusters": _padded([10.0] * 5 + [5.0] * 5, size),
    }
    found = {name: (basis * values) @ basis.T for name, values in spectra.items()}
    rows = torch.randn(10, size, generator=draws, dtype=torch.float64)
    found["gauss_newton_rank_10"] = rows.T @ rows / 10
    pairs = torch.randn(size // 3, 3, 3, generator=draws, dtype=torch.float64)
    found["on_3_coordinates"] = torch.block_diag(*(pairs + pairs.transpose(1, 2)))
    return found


def _padded(values: list[float], size: int) -> torch.Tensor:
    return torch.tensor(values + [0.0] * (size - len(values)), dtype=torch.float64)


def covered(matrix: torch.Tensor, found: Eigenpairs, method: str, products: int, seeds: int) -> float:
    """Share of seeds whose interval holds the trace, but for rounding."""
    operator, truth = MatrixOperator(matrix), float(matrix.trace())
    operator.is_semidefinite = bool(torch.linalg.eigvalsh(matrix)[0] > -1e-9)
    slack, held = 1e-9 * float(matrix.norm()), 0
    for seed in range(seeds):
        known = found if method == "deflated" else None
        estimate = estimate_trace(operator, method, products, seed=seed + 1, found=known)
        low, high = estimate.low, estimate.high
        held += low is not None and high is not None and low - slack <= truth <= high + slack
    return held / seeds


def main() -> None:
    """Print the coverage of each matrix and method, and the smallest."""
    args, results = options(), dict[str, float]()
    for name, matrix in matrices(args.size).items():
        found = lanczos(MatrixOperator(matrix), FOUND, which="magnitude", tolerance=1e-6)
        for method, counts in PRODUCTS.items():
            shares = [covered(matrix, found, method, count, args.seeds) for count in counts]
            numbers = ", ".join(f"{count}: {share:.3f}" for count, share in zip(counts, shares, strict=True))
            print(f"  {name}, {method}, by products {numbers}", flush=True)
            results[f"coverage_trace_{name}_{method}"] = min(shares)
    for name, share in results.items():
        print(f"{name}: {share:.3f}")
    print(f"coverage_trace: {min(results.values()):.3f}")


if __name__ == "__main__":
    main()
