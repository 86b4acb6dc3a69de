"""Derived numbers equal their definitions where they can be known, and are None with a reason where not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from rm_optimizer.core.metrics.estimate import Estimate, IntervalKind
from rm_optimizer.landscape.estimates.density import spectral_density
from rm_optimizer.landscape.estimates.quantities import LocalGeometry, divided
from rm_optimizer.landscape.operators.base import MatrixOperator
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs, lanczos
from rm_optimizer.landscape.spectrum import (
    SUMMARY,
    HessianSpectrum,
    Quantity,
    condition_number,
    entropy_rank,
    flatness,
    frobenius_norm,
    intrinsic_dimension,
    negative_share,
    participation_rank,
    sharpness_score,
    stable_rank,
    summarize,
    top_ratio,
)
from tests.landscape.worlds import dense

VALUES = (8.0, 4.0, 2.0, 1.0, 0.5, 1e-9, -2.0)


def spectrum(
    values: tuple[float, ...] = VALUES, *, is_exhaustive: bool = True, ends: tuple[int, int] | None = None
) -> HessianSpectrum:
    bounds = (1e-6,) * len(values)
    num_top, num_bottom = ends or (len(values), len(values))
    trace = Estimate(sum(values), 0.0, 64, sum(values), sum(values), IntervalKind.exact) if is_exhaustive else None
    return HessianSpectrum(
        eigenvalues=values,
        residuals=bounds,
        error_bounds=bounds,
        converged=(True,) * len(values),
        num_top=num_top,
        num_bottom=num_bottom,
        num_overlooked=None,
        is_exhaustive=is_exhaustive,
        trace=trace,
        density=None,
        sampling=(),
        cross_fit=None,
        geometry=None,
        matrix="hessian",
        method="full" if is_exhaustive else "lanczos",
        params="trainable",
        num_parameters=100,
        num_pairs=64,
        loss=0.7,
        num_products=100,
        product="reverse",
        product_reason="asked for",
        gradients_per_product=3.1,
        wall_seconds=1.0,
        dtype="float32",
        seed=0,
    )


def test_a_spectrum_without_a_gradient_is_json():
    nan = float("nan")
    geometry = LocalGeometry(0.7, 0.0, nan, 0.05, nan, nan, 64)
    text = replace(spectrum(), geometry=geometry, trace=Estimate(nan, None, 4), error_bounds=(nan,) * 7).to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again = HessianSpectrum.from_json(text)
    assert again.geometry is not None
    assert again.trace is not None
    assert all(map(math.isnan, (again.geometry.sam_sharpness, again.trace.value, again.error_bounds[0])))
    assert again.to_json() == text


def test_quantities_of_a_known_spectrum():
    whole = spectrum()
    size = np.abs(VALUES)
    share = size / size.sum()
    expected = {
        condition_number: (8 - 1e-6) / (1e-9 + 1e-6),  # 1e-9 is not resolved: a limit
        top_ratio: 16.0,
        flatness: 1 / 8,
        sharpness_score: 8 / sum(VALUES),
        entropy_rank: np.exp(-(share * np.log(share)).sum()),
        frobenius_norm: np.sqrt((size**2).sum()),
        participation_rank: size.sum() ** 2 / (size**2).sum(),
        stable_rank: (size**2).sum() / 64,
        intrinsic_dimension: size.sum() / 8,
        negative_share: 2 / size.sum(),
    }
    assert set(expected) == set(SUMMARY.values())
    for quantity, value in expected.items():
        assert quantity(whole).value == pytest.approx(value), quantity


def test_equal_eigenvalues_have_every_rank_equal_to_their_number():
    whole = spectrum((3.0,) * 7)
    for rank in (entropy_rank, participation_rank, stable_rank, intrinsic_dimension):
        assert rank(whole).value == pytest.approx(7)


def test_what_cannot_be_known_says_why():
    part = spectrum((8.0, 4.0, -2.0), is_exhaustive=False, ends=(2, 1))
    reasons = {name: quantity.reason for name, quantity in summarize(part).items() if quantity.value is None}
    assert "raise top_k" in reasons["top_ratio"]  # type: ignore[operator]
    assert "no trace was estimated" in reasons["sharpness_score"]  # type: ignore[operator]
    for name in ("entropy_rank", "participation_rank", "stable_rank", "intrinsic_dimension", "negative_share"):
        assert "needs all eigenvalues or a density" in reasons[name]  # type: ignore[operator]
    noisy = replace(part, trace=Estimate(1.0, 2.0, 10, -3.0, 5.0, IntervalKind.student))
    assert "the interval of the trace is not positive" in sharpness_score(noisy).reason  # type: ignore[operator]
    alone = replace(part, trace=Estimate(1.0, None, 1))
    assert "the trace has no interval" in sharpness_score(alone).reason  # type: ignore[operator]
    flat = spectrum((-1.0, -2.0), is_exhaustive=False, ends=(1, 1))
    assert "not positive" in flatness(flat).reason  # type: ignore[operator]
    assert "every eigenvalue is 0" in entropy_rank(spectrum((0.0, 0.0))).reason  # type: ignore[operator]


def test_a_condition_number_names_its_rank_or_its_limit():
    both = spectrum((8.0, 4.0, 2.0, -0.5, -3.0), is_exhaustive=False, ends=(3, 2))
    assert condition_number(both).note == "|lambda|_1 / |lambda|_k, k = 4"  # -0.5 may be followed by others up to 2
    assert condition_number(both).value == pytest.approx(4.0)
    limit = condition_number(spectrum((8.0, 0.0)))
    assert limit.estimate is not None
    assert (limit.estimate.low, limit.estimate.high) == (pytest.approx(8e6), None)
    assert limit.note == "|lambda|_1 / |lambda|_k, k = 2, limit of float32"
    assert "needs two eigenvalues" in condition_number(spectrum((8.0,))).reason  # type: ignore[operator]


def test_a_rank_that_its_density_does_not_resolve_is_not_given():
    rough = estimated("decaying", num_probes=2, num_steps=2, seed=0)
    density = replace(rough.density, exact=(), nodes=((0.1, 5.0), (0.1, 9.0)), weights=((149.0, 1.0), (60.0, 90.0)))  # type: ignore[type-var]
    reason = entropy_rank(replace(rough, density=density)).reason
    assert reason is not None
    assert reason.startswith("not resolved, ")
    assert "raise num_probes and probe_steps" in reason
    for kind, quantity in (("bounds", condition_number), ("student", frobenius_norm)):
        estimate = quantity(estimated("decaying", num_probes=4, num_steps=20, seed=0)).estimate
        assert estimate is not None
        assert estimate.kind == kind


def test_what_rests_on_an_end_that_was_not_computed_is_not_known():
    density = spectral_density(MatrixOperator(torch.diag(torch.tensor([5.0, 4.0, -9.0]))), num_probes=2, seed=0)
    top = replace(spectrum((5.0, 4.0), is_exhaustive=False, ends=(2, 0)), density=density, trace=Estimate(9.0, 0.1, 9))
    for quantity in (condition_number, stable_rank, intrinsic_dimension):
        assert "only its top was computed; use which=both" in quantity(top).reason  # type: ignore[operator]
    assert flatness(top).value == pytest.approx(0.2)
    bottom = replace(top, eigenvalues=(4.0, -9.0), num_top=0, num_bottom=2)
    for quantity in (flatness, sharpness_score):
        assert "the largest eigenvalue was not computed" in quantity(bottom).reason  # type: ignore[operator]
    assert "only its bottom was computed" in stable_rank(bottom).reason  # type: ignore[operator]


def test_the_top_of_a_semidefinite_matrix_or_a_list_by_magnitude_has_the_largest_magnitude():
    top = spectrum((5.0, 4.0), is_exhaustive=False, ends=(2, 0))
    for known in (replace(top, matrix="gauss_newton"), replace(top, method="power_iteration")):
        assert condition_number(known).value == pytest.approx(1.25)


def test_values_from_the_bottom_are_not_taken_for_those_that_follow_the_top():
    both = replace(spectrum((8.0, 4.0, 2.0, 0.3, 0.2, 0.1), is_exhaustive=False, ends=(3, 3)), matrix="gauss_newton")
    assert "and 3 were computed; raise top_k" in top_ratio(both).reason  # type: ignore[operator]


def test_error_bounds_of_eigenvalues_bound_what_is_made_of_them():
    rough = replace(spectrum((8.0, 4.0, 2.0, 1.0, -2.0), is_exhaustive=True), error_bounds=(0.1, 0.05, 0.02, 0.2, 0.1))
    rough = replace(rough, trace=None)
    quantities: list[Callable[[HessianSpectrum], Quantity]] = [
        *(quantity for quantity in SUMMARY.values() if quantity not in (sharpness_score, top_ratio)),
    ]
    for quantity in quantities:
        estimate = quantity(rough).estimate
        assert estimate is not None
        assert estimate.standard_error is None
        moved = []
        for signs in product((-1, 0, 1), repeat=5):
            shifts = (sign * bound for sign, bound in zip(signs, rough.error_bounds, strict=True))
            values = tuple(value + shift for value, shift in zip(rough.eigenvalues, shifts, strict=True))
            moved.append(quantity(replace(rough, eigenvalues=values, error_bounds=(0.0,) * 5)).value)
        low, high = min(moved), max(moved)  # type: ignore[type-var]
        half = (high - low) / 2  # type: ignore[operator]
        assert estimate.low <= low + 0.2 * half  # type: ignore[operator]  # to first order in the bounds
        assert estimate.high >= high - 0.2 * half  # type: ignore[operator]


@cache
def world(name: str) -> tuple[MatrixOperator, Eigenpairs, HessianSpectrum]:
    """A matrix, its first eigenpairs, and its whole spectrum."""
    if name in ("bert", "llama"):
        matrix = dense(name).hessian
        values = torch.linalg.eigvalsh(matrix)
    else:
        values = 10.0 / torch.arange(1, 151, dtype=torch.float64)
        values[1::3] *= -1 if name == "indefinite" else 1
        drawn = torch.randn(150, 150, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        basis: Tensor = torch.linalg.qr(drawn)[0]
        matrix = (basis * values) @ basis.T
    operator = MatrixOperator(matrix)
    found = lanczos(operator, 10, which="both", tolerance=1e-5)
    return operator, found, spectrum(tuple(values.sort(descending=True).values.tolist()))


def estimated(name: str, *, num_probes: int, num_steps: int, seed: int) -> HessianSpectrum:
    operator, found, _ = world(name)
    density = spectral_density(operator, num_probes=num_probes, num_steps=num_steps, seed=seed, found=found)
    return replace(spectrum(tuple(found.values.tolist()), is_exhaustive=False, ends=(10, 10)), density=density)


def test_a_density_gives_ranks_with_error_bars():
    part, (_, _, whole) = estimated("indefinite", num_probes=20, num_steps=5, seed=0), world("indefinite")
    for quantity in (entropy_rank, participation_rank, stable_rank, intrinsic_dimension, negative_share):
        estimate = quantity(part).estimate
        assert estimate is not None
        assert estimate.value == pytest.approx(quantity(whole).value, rel=0.1)
        assert estimate.standard_error > 0  # type: ignore[operator]


@pytest.mark.parametrize("num_steps", [4, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        "decaying",
        "indefinite",
        pytest.param("bert", marks=pytest.mark.slow),
        pytest.param("llama", marks=pytest.mark.slow),
    ],
)
def test_error_bars_from_a_density_hold_the_truth(name: str, num_steps: int):
    """Also of what is no polynomial, which a quadrature rule misses whatever the random vectors."""
    whole, seeds, num_probes = world(name)[2], 40, 10
    parts = [estimated(name, num_probes=num_probes, num_steps=num_steps, seed=seed) for seed in range(seeds)]
    for quantity in (
        entropy_rank,
        participation_rank,
        stable_rank,
        intrinsic_dimension,
        negative_share,
    ):
        truth, estimates = quantity(whole).value, [quantity(part).estimate for part in parts]
        held = [each.low - 1e-9 <= truth <= each.high + 1e-9 for each in estimates if each]  # type: ignore
        assert not held or np.mean(held) >= 0.85  # 0.95 less three standard errors of 40 repetitions


def test_ranks_of_a_list_of_all_eigenvalues_need_no_density():
    part = replace(spectrum((3.0, 2.0, 1.0), is_exhaustive=False, ends=(2, 1)), num_parameters=3)
    assert intrinsic_dimension(part).value == pytest.approx(2)


def test_a_quotient_has_the_errors_of_both_parts():
    number = Estimate(12.0, 0.6, 5, 11.0, 13.0, IntervalKind.student)
    found = divided(number, 2.0, 0.1, power=2)
    assert found == Estimate(3.0, pytest.approx(0.6 / 4 + 2 * 3 * 0.1 / 2), 5, 11 / 2.1**2, 13 / 1.9**2, number.kind)  # type: ignore[arg-type]
