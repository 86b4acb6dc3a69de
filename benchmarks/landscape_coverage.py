"""Coverage of the population's largest eigenvalue by the intervals over pairs, in simulated populations.

Each pair has a curvature `s x x^T`, with `x` normal or heavy-tailed (Student's t of 5 degrees of freedom) over `--size`
parameters of a flat, spiked or power-law spectrum. Of a Gauss-Newton matrix `s` is 1. Of a Hessian it is negative for
three of ten pairs, scaled so that the mean is 1. From `--draws` samples of each size come the shares of those whose
interval holds the population's largest eigenvalue: the spread over resampled pairs, the cross-fitted interval, and the
one given for the population.

    python benchmarks/landscape_coverage.py
    python benchmarks/landscape_coverage.py --draws 20 --pairs 32
    python benchmarks/landscape_coverage.py --pairs 256 --populations power --matrices gauss_newton
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.landscape.estimates.by_pair import weighted_means
from rm_optimizer.landscape.estimates.cross_fitting import (
    CrossFit,
    TopOfSamples,
    cross_fit_gram,
    cross_fitted,
    halves_of,
)
from rm_optimizer.landscape.operators.gauss_newton import GramSpectrum

NEGATIVE = 0.3
FREEDOM = 5
POPULATIONS, TAILS, MATRICES = ("flat", "spiked", "power"), ("normal", "heavy"), ("gauss_newton", "hessian")


@dataclass(frozen=True)
class Drawn:
    """Estimates of the largest eigenvalue from one sample."""

    value: float
    resampled: Estimate
    crossed: CrossFit


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Coverage of the population's largest eigenvalue.")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--size", type=int, default=200, help="parameters")
    parser.add_argument("--pairs", type=int, nargs="+", default=[32, 64, 256])
    parser.add_argument("--populations", nargs="+", choices=POPULATIONS, default=POPULATIONS)
    parser.add_argument("--tails", nargs="+", choices=TAILS, default=TAILS)
    parser.add_argument("--matrices", nargs="+", choices=MATRICES, default=MATRICES)
    return parser.parse_args()


def spectra(size: int) -> dict[str, np.ndarray]:
    """Populations by name, the largest eigenvalue first."""
    return {
        "flat": np.ones(size),
        "spiked": np.concatenate([[8.0], np.ones(size - 1)]),
        "power": 1 / np.arange(1.0, size + 1),
    }


def of_gauss_newton(rows: np.ndarray, seed: int) -> Drawn:
    """Estimates by the code of the Gauss-Newton matrix."""
    gram = rows @ rows.T / len(rows)
    values = np.linalg.eigvalsh(gram)[::-1]
    spectrum = GramSpectrum(gram, np.arange(len(rows)), np.ones(len(rows)), values, None, 1)  # type: ignore[arg-type]
    crossed = cross_fit_gram(spectrum, 1, clusters=range(spectrum.num_pairs), seed=seed)
    assert crossed is not None, "there are enough pairs"
    return Drawn(float(values[0]), spectrum.bootstrap(1, seed=seed)[0], crossed)


def of_hessian(rows: np.ndarray, signs: np.ndarray, seed: int) -> Drawn:
    """Estimates by the code of the Hessian, with dense eigenvectors in place of those from Lanczos."""

    def top(pairs: NDArray[np.int64]) -> tuple[float, np.ndarray]:
        some = rows[pairs]
        values, vectors = np.linalg.eigh((some.T * signs[pairs]) @ some / len(pairs))
        return float(values[-1]), vectors[:, -1]

    def along(pairs: NDArray[np.int64], vector: np.ndarray) -> np.ndarray:
        curvatures: np.ndarray = signs[pairs] * (rows[pairs] @ vector) ** 2
        return curvatures

    everything, weights = np.arange(len(rows)), np.ones(len(rows))
    value, vector = top(everything)
    resampled = weighted_means(
        along(everything, vector)[:, None], weights, clusters=None, num_bootstrap=1000, seed=seed
    )
    halves = halves_of(range(len(rows)), seed)
    columns = np.zeros((len(rows), 1))
    for fitted, held in (halves, halves[::-1]):
        columns[held, 0] = along(held, top(fitted)[1])
    whole = (TopOfSamples(len(rows), (value,)),)
    means = weighted_means(columns, weights, clusters=range(len(rows)), seed=seed)
    return Drawn(value, resampled[0], cross_fitted(means, resampled, whole))


def main() -> None:
    """Print the coverage of each population, and the smallest."""
    args = options()
    coverage: dict[str, float] = {}
    every = spectra(args.size)
    for name, tails, matrix, count in product(args.populations, args.tails, args.matrices, args.pairs):
        shares, label = covered(args, every[name], tails, matrix, count), f"{matrix}_{name}_{tails}_{count}"
        coverage[f"coverage_population_top1_{label}"] = shares[2]
        print(f"  {label}: {_described(shares)}", flush=True)
    for name, share in coverage.items():
        print(f"{name}: {share:.3f}")
    print(f"coverage_population_top1: {min(coverage.values()):.3f}")


def covered(args: argparse.Namespace, eigenvalues: np.ndarray, tails: str, matrix: str, count: int) -> np.ndarray:
    """Coverage of the three intervals, and means of value, cross-fitted value and ends, over the truth."""
    truth, rng, rows = float(eigenvalues[0]), np.random.default_rng(0), list[list[float]]()
    for seed in range(args.draws):
        drawn = rng.standard_normal((count, args.size)) * np.sqrt(eigenvalues)
        if tails == "heavy":
            drawn *= np.sqrt((FREEDOM - 2) / rng.chisquare(FREEDOM, count))[:, None]
        if matrix == "gauss_newton":
            found = of_gauss_newton(drawn, seed)
        else:
            signs = np.where(rng.random(count) < NEGATIVE, -1.0, 1.0) / (1 - 2 * NEGATIVE)
            found = of_hessian(drawn, signs, seed)
        crossed = found.crossed
        low, high = crossed.population_low or -np.inf, crossed.population_high or np.inf
        rows.append(
            [
                _holds(found.resampled, truth),
                _holds(crossed.values[0], truth),
                low <= truth <= high,
                found.value / truth,
                crossed.values[0].value / truth,
                low / truth,
                high / truth,
            ]
        )
    return np.array(rows, dtype=float).mean(axis=0)


def _described(shares: np.ndarray) -> str:
    return (
        f"held by the given {shares[2]:.3f}, resampled {shares[0]:.3f}, cross-fitted {shares[1]:.3f}; means over the "
        f"truth: sample {shares[3]:.2f}, cross-fitted {shares[4]:.2f}, ends {shares[5]:.2f} to {shares[6]:.2f}"
    )


def _holds(estimate: Estimate, truth: float) -> bool:
    return estimate.low is not None and estimate.high is not None and estimate.low <= truth <= estimate.high


if __name__ == "__main__":
    main()
