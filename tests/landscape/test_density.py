"""A spectral density has the moments of its matrix, and what is known stands in it exactly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape import HessianAnalyzer, SpectrumOptions
from rm_optimizer.landscape.estimates.density import SpectralDensity, density_curve, spectral_density
from rm_optimizer.landscape.operators.base import MatrixOperator
from rm_optimizer.landscape.operators.products import ReverseOverReverse
from rm_optimizer.landscape.solvers.lanczos import lanczos
from tests.landscape.matrices import HARD, hard_for_intervals, operator, spectra, top
from tests.landscape.worlds import INNER, pairs, reward_model


def test_a_full_quadrature_has_the_moments_of_the_matrix():
    values = spectra()["indefinite"][:12]
    basis = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    matrix = (basis * values) @ basis.T
    density = spectral_density(MatrixOperator(matrix), num_probes=600, num_steps=4, seed=0)
    for power in (0, 1, 2, 3, 4):
        moment = density.moment(power)
        error = moment.standard_error or 1e-9
        assert abs(moment.value - float((values**power).sum())) < 4 * error + 1e-9


@pytest.mark.parametrize("at_once", [2, 3, 7])
def test_random_vectors_in_lockstep_give_the_density_of_one_after_the_other(at_once: int):
    """Of rank 3, so that each iteration ends early."""
    low_rank = MatrixOperator(torch.diag(torch.tensor([3.0, 2.0, 1.0] + [0.0] * 9, dtype=torch.float64)))
    for matrix, found in ((operator("decaying"), top("decaying")), (low_rank, None)):
        alone = spectral_density(matrix, num_probes=5, num_steps=6, seed=3, found=found)
        together = spectral_density(matrix, num_probes=5, num_steps=6, seed=3, found=found, at_once=at_once)
        assert together.num_products == alone.num_products
        for ours, expected in zip(together.nodes + together.weights, alone.nodes + alone.weights, strict=True):
            assert ours == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_random_vectors_share_the_graphs_that_products_build_as_far_as_memory_goes(
    monkeypatch: pytest.MonkeyPatch,
):
    graphs: list[object] = []
    build = ReverseOverReverse.graph
    monkeypatch.setattr(ReverseOverReverse, "graph", lambda self, batch: graphs.append(batch) or build(self, batch))
    analyzer = HessianAnalyzer(reward_model("llama"), params=INNER, dtype=torch.float64)
    options = SpectrumOptions(which="largest", product="reverse", num_probes=3, probe_steps=8)
    found = analyzer.compute_spectrum(pairs()[:2], top_k=1, options=options, with_density=True)
    vector = 8 * found.num_parameters
    densities, counts = [found.density], [len(graphs)]
    for num_bases in (2, 1):
        graphs.clear()
        little = replace(options, memory_gib=(1 + 9 * num_bases) * vector / 2**30)
        densities.append(analyzer.compute_spectrum(pairs()[:2], top_k=1, options=little, with_density=True).density)
        counts.append(len(graphs))
    assert np.diff(counts).tolist() == [8, 8]
    shared, *others = (np.array(density.nodes) for density in densities if density is not None)
    for nodes in others:  # not equal to the bit: on some processors rounding depends on where in memory vectors lie
        np.testing.assert_allclose(nodes, shared, rtol=1e-10)


def test_a_density_of_which_every_eigenvalue_is_known_has_no_random_part():
    values = spectra()["indefinite"][:6]
    known = lanczos(MatrixOperator(torch.diag(values)), 6, tolerance=1e-10)
    density = spectral_density(MatrixOperator(torch.diag(values)), num_probes=5, seed=0, found=known)
    assert (density.nodes, density.num_products) == ((), 0)
    assert density.exact == tuple(known.values.tolist())
    for power in (1, 2):
        moment = density.moment(power)
        assert (moment.value, moment.standard_error) == (pytest.approx(float((values**power).sum())), 0)
    absolute = density.statistic(lambda v: np.abs(v)[None], lambda totals: totals[0])
    assert (absolute.value, absolute.standard_error) == (pytest.approx(float(values.abs().sum())), 0)
    curve = density_curve(density)
    assert float(np.trapezoid(curve.density, curve.grid)) == pytest.approx(1, abs=1e-3)
    assert not curve.standard_error.any()
    assert SpectralDensity.from_json(density.to_json()) == density


def test_a_moment_beyond_the_degree_of_the_rules_has_an_error_bar_of_its_own():
    truth = float((spectra()["decaying"] ** 6).sum())
    moments = [
        spectral_density(operator("decaying"), num_probes=10, num_steps=3, seed=seed).moment(6) for seed in range(50)
    ]
    held = [moment.low <= truth <= moment.high for moment in moments]  # type: ignore[operator]
    assert np.mean(held) >= 0.90
    longer, shorter = (spectral_density(operator("decaying"), num_probes=10, num_steps=n, seed=0) for n in (3, 2))
    for power in (5, 6):  # three nodes are exact up to the fifth
        forms, less, squares = (
            np.array([np.array(w) @ np.array(n) ** degree for n, w in zip(each.nodes, each.weights, strict=True)])
            for each, degree in ((longer, power), (shorter, power), (longer, 2 * power))
        )
        variance = max(forms.var(ddof=1), 2 * (squares.mean() - forms.mean() ** 2 / longer.num_parameters)) / 10
        change = forms.mean() - less.mean() if power == 6 else 0.0
        assert longer.moment(power).standard_error == pytest.approx(np.hypot(np.sqrt(variance), change), rel=1e-4)


@pytest.mark.parametrize(
    "num_probes", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", HARD)
def test_intervals_of_moments_hold_where_forms_are_skewed_or_equal(name: str, num_probes: int):
    """The spread of the forms alone held the trace in 0.49 to 0.91, and two equal forms had no width."""
    matrix, held = hard_for_intervals(name), np.zeros(2)
    truths = [float(matrix.matrix.trace()), float(matrix.matrix.square().sum())]
    for seed in range(200):
        density = spectral_density(matrix, num_probes=num_probes, num_steps=4, seed=seed)
        moments = [density.moment(1), density.moment(2)]
        held += [m.low - 1e-9 <= t <= m.high + 1e-9 for m, t in zip(moments, truths, strict=True)]  # type: ignore[operator]
    assert (held >= 0.92 * 200).all(), held


def test_one_node_is_exact_where_no_second_step_is_possible():
    density = spectral_density(MatrixOperator(3 * torch.eye(10, dtype=torch.float64)), num_probes=4, seed=0)
    root = density.statistic(lambda v: np.sqrt(np.abs(v))[None], lambda totals: totals[0])
    assert root.value == pytest.approx(10 * 3**0.5)
    assert root.standard_error == pytest.approx(0, abs=1e-9)


def test_a_density_of_one_step_is_refused():
    with pytest.raises(ConfigError, match="at least 1 probe of 2 steps, got 5 of 1"):
        spectral_density(operator("flat"), num_probes=5, num_steps=1, seed=0)


def test_the_density_on_a_grid_integrates_to_one_and_survives_json():
    density = spectral_density(operator("decaying"), num_probes=3, num_steps=5, seed=0, found=top("decaying"))
    grid = np.linspace(-5, 15, 4001)
    assert float(np.trapezoid(density.on_grid(grid, width=0.2), grid)) == pytest.approx(1, abs=1e-6)
    assert SpectralDensity.from_json(density.to_json()) == density


def test_the_curve_has_no_gaps_between_the_nodes_of_a_rule():
    density = spectral_density(operator("flat"), num_probes=2, num_steps=6, seed=0)
    curve = density_curve(density)
    inside = (curve.grid > 1.1) & (curve.grid < 1.9)  # the eigenvalues lie evenly between 1 and 2
    assert float(curve.density[inside].min()) > 0.2
    assert float(np.trapezoid(curve.density, curve.grid)) == pytest.approx(1, abs=1e-2)
