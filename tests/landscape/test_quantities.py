"""Derived numbers equal their definitions where they can be known, and are None with a reason where not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rm_optimizer.core.estimate import Estimate
from rm_optimizer.landscape.density import spectral_density
from rm_optimizer.landscape.lanczos import lanczos
from rm_optimizer.landscape.operators import MatrixOperator
from rm_optimizer.landscape.quantities import (
    SUMMARY,
    condition_number,
    effective_parameters,
    entropy_rank,
    flatness,
    intrinsic_dimension,
    negative_share,
    num_above,
    participation_rank,
    sharpness_score,
    stable_rank,
    summarise,
    top_ratio,
)
from rm_optimizer.landscape.spectrum import HessianSpectrum

VALUES = (8.0, 4.0, 2.0, 1.0, 0.5, 1e-9, -2.0)


def spectrum(values: tuple[float, ...] = VALUES, *, is_exhaustive: bool = True) -> HessianSpectrum:
    bounds = (1e-6,) * len(values)
    trace = Estimate(sum(values), 0.0, 64) if is_exhaustive else None
    return HessianSpectrum(
        eigenvalues=values,
        residuals=bounds,
        error_bounds=bounds,
        converged=(True,) * len(values),
        num_top=len(values),
        num_bottom=len(values),
        is_exhaustive=is_exhaustive,
        trace=trace,
        density=None,
        sampling=(),
        matrix="hessian",
        method="full" if is_exhaustive else "lanczos",
        params="trainable",
        num_parameters=100,
        num_pairs=64,
        loss=0.7,
        num_products=100,
        product="reverse",
        gradients_per_product=3.1,
        wall_seconds=1.0,
        dtype="float32",
        seed=0,
    )


def test_quantities_of_a_known_spectrum() -> None:
    whole = spectrum()
    size = np.abs(VALUES)
    share = size / size.sum()
    expected = {
        condition_number: 8 / 0.5,  # 1e-9 is not resolved
        top_ratio: 16.0,
        flatness: 1 / 8,
        sharpness_score: 8 / sum(VALUES),
        entropy_rank: np.exp(-(share * np.log(share)).sum()),
        participation_rank: size.sum() ** 2 / (size**2).sum(),
        stable_rank: (size**2).sum() / 64,
        intrinsic_dimension: size.sum() / 8,
        negative_share: 2 / size.sum(),
    }
    assert set(expected) == set(SUMMARY.values())
    for quantity, value in expected.items():
        assert quantity(whole).value == pytest.approx(value), quantity
    assert num_above(whole, 1.5).value == 3
    assert effective_parameters(whole, 1.0).value == pytest.approx((size / (size + 1)).sum())


def test_equal_eigenvalues_have_every_rank_equal_to_their_number() -> None:
    whole = spectrum((3.0,) * 7)
    for rank in (entropy_rank, participation_rank, stable_rank, intrinsic_dimension):
        assert rank(whole).value == pytest.approx(7)


def test_what_cannot_be_known_says_why() -> None:
    part = spectrum((8.0, 4.0, -2.0), is_exhaustive=False)
    reasons = {name: quantity.reason for name, quantity in summarise(part).items() if quantity.value is None}
    assert "raise top_k" in reasons["top_ratio"]  # type: ignore[operator]
    assert "no trace was estimated" in reasons["sharpness_score"]  # type: ignore[operator]
    for name in ("entropy_rank", "participation_rank", "stable_rank", "intrinsic_dimension", "negative_share"):
        assert "needs all eigenvalues or a density" in reasons[name]  # type: ignore[operator]
    assert "do not reach below 1" in num_above(part, 1.0).reason  # type: ignore[operator]
    noisy = replace(part, trace=Estimate(1.0, 2.0, 10))
    assert "not positive beyond twice its standard error" in sharpness_score(noisy).reason  # type: ignore[operator]
    flat = spectrum((-1.0, -2.0), is_exhaustive=False)
    assert "not positive" in flatness(flat).reason  # type: ignore[operator]
    assert "fewer than two" in condition_number(spectrum((1.0, 0.0))).reason  # type: ignore[operator]
    assert "every eigenvalue is 0" in entropy_rank(spectrum((0.0, 0.0))).reason  # type: ignore[operator]


def test_a_density_gives_ranks_with_error_bars() -> None:
    values = 10.0 / torch.arange(1, 151, dtype=torch.float64)
    values[1::3] *= -1
    basis = torch.linalg.qr(torch.randn(150, 150, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    operator = MatrixOperator((basis * values) @ basis.T)
    found = lanczos(operator, 10, which="both", tolerance=1e-5)
    density = spectral_density(operator, num_probes=20, num_steps=5, seed=0, found=found)
    part = replace(spectrum(tuple(found.values.tolist()), is_exhaustive=False), density=density)
    whole = spectrum(tuple(values.sort(descending=True).values.tolist()))
    for quantity in (entropy_rank, participation_rank, stable_rank, intrinsic_dimension, negative_share):
        estimate = quantity(part).estimate
        assert estimate is not None
        assert estimate.value == pytest.approx(quantity(whole).value, rel=0.1)
        assert estimate.standard_error > 0  # type: ignore[operator]
