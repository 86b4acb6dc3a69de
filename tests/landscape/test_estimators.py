"""Estimates come near the truth at their rate, and their intervals hold it as often as they say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rm_optimizer.core.metrics.estimate import Estimate, IntervalKind
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.estimates import by_pair
from rm_optimizer.landscape.estimates.by_pair import pair_curvatures, weighted_means
from rm_optimizer.landscape.estimates.density import spectral_density
from rm_optimizer.landscape.estimates.trace import (
    TRACE_ESTIMATORS,
    estimate_trace,
    hutchinson_trace,
    xtrace,
)
from rm_optimizer.landscape.operators.base import HessianOperator, MatrixOperator
from rm_optimizer.landscape.operators.gauss_newton import GramSpectrum
from rm_optimizer.landscape.operators.objective import measuring
from rm_optimizer.landscape.operators.vectors import RandomVectors
from rm_optimizer.landscape.solvers.lanczos import lanczos
from rm_optimizer.schema.landscape import TraceMethod
from tests.landscape.matrices import SIZE, operator, spectra, top
from tests.landscape.worlds import EVERYTHING, INNER, dense, micro_batches, pairs, reward_model

SEEDS = 200
COVERAGE = (0.90, 0.99)
Make = Callable[[int], Estimate]


def coverage(make: Make, truth: float) -> float:
    estimates = [make(seed) for seed in range(SEEDS)]
    return float(np.mean([estimate.low <= truth <= estimate.high for estimate in estimates]))  # type: ignore[operator]


@pytest.mark.parametrize(
    "name",
    [pytest.param("decaying", marks=pytest.mark.slow), "indefinite", pytest.param("flat", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("method", TRACE_ESTIMATORS)
def test_trace_intervals_hold_the_trace_as_often_as_they_say(name: str, method: str):
    truth = float(spectra()[name].sum())
    for products in (12, 42):
        share = coverage(lambda seed, m=products: TRACE_ESTIMATORS[method](operator(name), m, seed=seed), truth)
        assert COVERAGE[0] <= share, (products, share)
        assert share <= COVERAGE[1] or method == "xtrace", (products, share)  # whose jackknife errs on the wide side


@pytest.mark.parametrize("name", [pytest.param("decaying", marks=pytest.mark.slow), "indefinite"])
def test_intervals_of_deflated_estimates_hold_the_truth(name: str):
    values, found = spectra()[name], top(name)
    truths_and_estimates: dict[str, tuple[float, Make]] = {
        "trace": (float(values.sum()), lambda seed: hutchinson_trace(operator(name), 10, found=found, seed=seed)),
        "density's trace": (
            float(values.sum()),
            lambda seed: spectral_density(operator(name), num_probes=10, num_steps=2, seed=seed, found=found).moment(1),
        ),
    }
    for what, (truth, make) in truths_and_estimates.items():
        share = coverage(make, truth)
        assert COVERAGE[0] <= share <= COVERAGE[1], (what, share)


def test_the_bound_from_one_vector_holds_at_least_as_often():
    for name in ("decaying", "indefinite"):
        truth, found = float(spectra()[name].sum()), top(name)
        assert (
            coverage(lambda seed, n=name, f=found: hutchinson_trace(operator(n), 1, found=f, seed=seed), truth)
            >= COVERAGE[0]
        )


@pytest.mark.parametrize(
    ("values", "method", "products"),
    [
        ([5.0, -3.0, 1.0], "hutchpp", 6),
        ([5.0, -3.0, 1.0], "hutchpp", 8),
        ([5.0, -4.0, 3.0, -2.0, 1.0], "hutchpp", 12),
        ([5.0, -4.0, 3.0, -1.0], "deflated", 2),
        ([5.0, -4.0, 3.0, -1.0], "deflated", 6),
        ([-5.0], "hutchinson", 1),
        ([-5.0], "hutchinson", 6),
    ],
)
def test_intervals_hold_the_trace_where_what_is_left_has_rank_1(values: list[float], method: str, products: int):
    """Student's interval from the forms alone held it in 0.75 to 0.86, since few chi-squared ones are often alike."""
    basis = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(3)).double())[0]
    matrix = MatrixOperator((basis[:, : len(values)] * torch.tensor(values).double()) @ basis[:, : len(values)].T)
    found = lanczos(matrix, 3, which="magnitude", tolerance=1e-6) if method == "deflated" else None
    share = coverage(lambda seed: estimate_trace(matrix, method, products, seed=seed, found=found), sum(values))
    assert share >= COVERAGE[0], share


@pytest.mark.parametrize("count", [2, 7])
def test_the_variance_of_a_trace_is_that_of_signs_and_not_its_bound(count: int):
    matrix = torch.diag(torch.linspace(-3, 4, SIZE, dtype=torch.float64)) + 0.1 * operator("indefinite").matrix
    truth = 2 * float((matrix - torch.diag(matrix.diagonal())).square().sum()) / count
    errors = [hutchinson_trace(MatrixOperator(matrix), count, seed=seed).standard_error for seed in range(100)]
    found = np.square(np.array(errors, dtype=float))
    assert abs(found.mean() - truth) < 3.5 * found.std() / 10
    assert truth < 0.2 * 2 * float(matrix.square().sum()) / count


def test_intervals_hold_the_trace_of_a_models_hessian():
    known = dense("llama")
    matrix = MatrixOperator(known.hessian)
    truth = float(known.hessian.trace())
    for method in ("hutchinson", "xtrace"):
        share = coverage(lambda seed, name=method: TRACE_ESTIMATORS[name](matrix, 30, seed=seed), truth)
        assert COVERAGE[0] <= share, (method, share)


@pytest.mark.parametrize(("rank", "products"), [(5, 8), (10, 12), (10, 16), (10, 20), (20, 30)])
def test_intervals_of_xtrace_hold_while_its_vectors_near_the_rank(rank: int, products: int):
    """The estimates of fewer vectors than the rank are correlated: their spread held the trace in 0.59 to 0.90."""
    drawn = torch.randn(SIZE, rank, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    matrix = MatrixOperator(drawn @ drawn.T)
    truth = float(drawn.square().sum())
    matrix.is_semidefinite = True
    found = [xtrace(matrix, products, seed=seed) for seed in range(100)]
    assert np.mean([one.low <= truth * (1 + 1e-9) and truth * (1 - 1e-9) <= one.high for one in found]) >= COVERAGE[0]
    spread = np.sqrt(np.mean([(one.value - truth) ** 2 for one in found]))
    assert np.sqrt(np.mean([one.standard_error**2 for one in found])) <= 4 * spread


def root_mean_square_error(make: Make, truth: float) -> float:
    return float(np.sqrt(np.mean([(make(seed).value - truth) ** 2 for seed in range(100)])))


@pytest.mark.slow
def test_hutchinsons_error_falls_with_the_root_of_its_products():
    truth = float(spectra()["indefinite"].sum())
    errors = [
        root_mean_square_error(lambda seed, m=m: hutchinson_trace(operator("indefinite"), m, seed=seed), truth)
        for m in (10, 160)
    ]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.35)  # 100 repetitions know a ratio of errors to about 10 %


def test_xtraces_error_falls_faster_where_eigenvalues_decay():
    truth = float(spectra()["decaying"].sum())
    errors = [
        root_mean_square_error(lambda seed, m=m: xtrace(operator("decaying"), m, seed=seed), truth) for m in (12, 48)
    ]
    assert errors[0] / errors[1] > 4  # in proportion to the products, where Hutchinson's falls by 2


def test_xtrace_is_exact_for_a_matrix_of_low_rank():
    values = torch.zeros(60, dtype=torch.float64)
    values[:4] = torch.tensor([5.0, 3.0, -2.0, 1.0])
    basis = torch.linalg.qr(torch.randn(60, 60, generator=torch.Generator().manual_seed(2), dtype=torch.float64))[0]
    found = xtrace(MatrixOperator((basis * values) @ basis.T), 16, seed=0)
    assert found.value == pytest.approx(7.0, abs=1e-8)


def test_xtrace_equals_leaving_each_vector_out():
    matrix = operator("indefinite").matrix
    probes = RandomVectors(operator("indefinite"), 3).signs(6)
    samples = []
    for index in range(6):
        others = torch.cat([probes[:index], probes[index + 1 :]])
        basis = torch.linalg.qr((others @ matrix).T)[0]
        rest = probes[index] - basis @ (basis.T @ probes[index])
        samples.append(float((basis.T @ matrix @ basis).trace() + rest @ matrix @ rest))
    assert xtrace(operator("indefinite"), 12, seed=3).value == pytest.approx(float(np.mean(samples)), rel=1e-10)


def test_taking_out_eigenpairs_makes_the_trace_surer():
    truth = float(spectra()["decaying"].sum())
    plain = root_mean_square_error(lambda seed: hutchinson_trace(operator("decaying"), 10, seed=seed), truth)
    deflated = root_mean_square_error(
        lambda seed: hutchinson_trace(operator("decaying"), 10, found=top("decaying"), seed=seed), truth
    )
    assert deflated < plain / 2


@pytest.mark.parametrize("dimension", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_xtrace_is_unbiased_where_random_vectors_repeat(dimension: int):
    """Two of three vectors of signs are often the same line there, and the third then stands alone."""
    matrix = torch.diag(torch.arange(1, dimension + 1, dtype=torch.float64))
    matrix = matrix + 0.3 * (torch.ones_like(matrix) - torch.eye(dimension, dtype=torch.float64))
    values = [xtrace(MatrixOperator(matrix), 6, seed=seed).value for seed in range(1000)]
    error = float(np.std(values)) / len(values) ** 0.5
    assert abs(np.mean(values) - float(matrix.trace())) < 3.5 * error


@pytest.mark.parametrize("method", TraceMethod)
def test_every_trace_estimator_is_found_by_its_name(method: str):
    found, truth = top("decaying"), float(spectra()["decaying"].sum())
    estimate = estimate_trace(operator("decaying"), method, 12, seed=0, found=found)
    assert abs(estimate.value - truth) < 4 * estimate.standard_error  # type: ignore[operator]
    others = {name: estimate_trace(operator("decaying"), name, 12, seed=0, found=found) for name in TraceMethod}
    assert [name for name, other in others.items() if other == estimate] == [method]


def test_an_unknown_trace_estimator_is_refused():
    with pytest.raises(ConfigError, match="unknown trace_method 'xtrase'; did you mean 'xtrace'"):
        estimate_trace(operator("flat"), "xtrase", 12, seed=0, found=None)


def test_vectors_are_the_same_however_many_are_multiplied_at_once():
    matrix = operator("indefinite").matrix
    probes = RandomVectors(operator("indefinite"), 5).signs(11)
    terms = (probes @ matrix) * probes
    found = hutchinson_trace(operator("indefinite"), 11, seed=5)
    assert found.value == pytest.approx(float(terms.sum(dim=1).mean()), rel=1e-12)
    assert found.standard_error == pytest.approx(float(2 * terms.var(dim=0).sum() / 11) ** 0.5, rel=1e-12)


def test_no_more_vectors_are_held_than_are_multiplied_at_once(monkeypatch: pytest.MonkeyPatch):
    rows: list[int] = []
    matrix = operator("decaying")
    monkeypatch.setattr(matrix, "apply", lambda vectors: (rows.append(len(vectors)), vectors @ matrix.matrix)[1])
    hutchinson_trace(matrix, 10, found=top("decaying"), seed=0)
    assert rows == [4, 4, 2]


def test_too_few_products_are_refused():
    with pytest.raises(ConfigError, match="the xtrace estimator needs at least 6 products, got 4"):
        xtrace(operator("flat"), 4, seed=0)


@pytest.mark.parametrize("num_steps", [2, 5])
def test_a_rule_of_one_step_less_is_the_one_that_fewer_steps_give(num_steps: int):
    longer = spectral_density(operator("indefinite"), num_probes=3, num_steps=num_steps + 1, seed=0)
    shorter = spectral_density(operator("indefinite"), num_probes=3, num_steps=num_steps, seed=0)
    found = longer._one_step_less()
    np.testing.assert_allclose(found.nodes, shorter.nodes, rtol=1e-9)
    np.testing.assert_allclose(found.weights, shorter.weights, rtol=1e-9)


def test_pair_curvatures_add_up_to_the_rayleigh_quotient():
    model = reward_model("llama")
    with measuring(model, micro_batches(model, 120), EVERYTHING, params=INNER, dtype=torch.float64) as objective:
        operator_ = HessianOperator(objective, product="reverse")
        vectors = torch.linalg.qr(
            torch.randn(operator_.dimension, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        )[0].T
        quotients = (vectors * operator_.apply(vectors)).sum(dim=1)
        curvatures = pair_curvatures(objective, vectors)
        estimates = weighted_means(curvatures.numpy(), objective.pair_weights)
        over_prompts = weighted_means(curvatures.numpy(), objective.pair_weights, clusters=[0, 0, 1, 1, 2, 2, 3, 3])
        with pytest.raises(ConfigError, match="clusters must have one number for each of the 8 pairs, got 3"):
            weighted_means(curvatures.numpy(), objective.pair_weights, clusters=[0, 1, 2])
        weights = torch.cat([batch.weight for batch in objective.batches])
    averaged = (curvatures * weights[:, None]).sum(dim=0) / weights.sum()
    torch.testing.assert_close(averaged, quotients, rtol=1e-5, atol=1e-8)  # differences over steps of 1e-4
    for estimate, quotient in zip(estimates, quotients, strict=True):
        assert estimate.value == pytest.approx(float(quotient), rel=1e-5)
        assert estimate.num_samples == len(pairs())
        assert estimate.standard_error > 0  # type: ignore[operator]
    assert [estimate.value for estimate in over_prompts] == pytest.approx([estimate.value for estimate in estimates])
    assert {estimate.num_samples for estimate in over_prompts} == {4}


def test_lack_of_memory_is_not_taken_for_a_lack_of_derivatives(monkeypatch: pytest.MonkeyPatch):
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(by_pair, "jvp", exhausted)
    model = reward_model("llama")
    with (
        measuring(model, micro_batches(model), EVERYTHING, params=INNER, dtype=torch.float64) as objective,
        pytest.raises(torch.OutOfMemoryError, match="no memory left"),
    ):
        pair_curvatures(objective, torch.ones(1, objective.subset.num_parameters, dtype=torch.float64))


PROMPTS, COPIES = 32, 2
OF_PROMPTS = tuple(np.repeat(np.arange(PROMPTS), COPIES).tolist())


@pytest.mark.parametrize("copies", [1, 4])
def test_intervals_over_prompts_hold_a_mean_of_pairs(copies: int):
    clusters = np.repeat(np.arange(48), copies).tolist()

    def drawn(seed: int, clusters: list[int] | None) -> Estimate:
        rng = np.random.default_rng(seed)
        values = np.repeat(rng.normal(size=(48, 1)), copies, axis=0) + 0.5 * rng.normal(size=(48 * copies, 1))
        weights = rng.integers(1, 4, size=len(values)).astype(float)
        return weighted_means(values, weights, clusters=clusters, num_bootstrap=400, seed=seed)[0]

    assert COVERAGE[0] <= coverage(lambda seed: drawn(seed, clusters), 0.0) <= COVERAGE[1]
    if copies > 1:
        assert coverage(lambda seed: drawn(seed, None), 0.0) < 0.8


def gram_of_draw(seed: int) -> GramSpectrum:
    """Of gradients along 40 directions alike, those of one prompt nearly the same; the population's trace is 40."""
    rng = np.random.default_rng(seed)
    shared, own = rng.normal(size=(PROMPTS, 1, 40)), rng.normal(size=(PROMPTS, COPIES, 40))
    rows = (0.95**0.5 * shared + 0.05**0.5 * own).reshape(-1, 40)
    gram = rows @ rows.T / len(rows)
    values = np.linalg.eigvalsh(gram)[::-1].copy()
    return GramSpectrum(gram, np.arange(len(rows)), np.ones(len(rows)), values, torch.empty(0, 40), 1)


def test_gram_intervals_over_prompts_hold_the_trace():
    found = [
        gram_of_draw(seed).bootstrap(0, clusters=OF_PROMPTS, num_bootstrap=100, seed=seed)[-1] for seed in range(60)
    ]
    held = [estimate.low <= 40 <= estimate.high for estimate in found]  # type: ignore[operator]
    assert np.mean(held) >= 0.87  # 0.95 less three standard errors of 60 repetitions
    over_pairs = gram_of_draw(0).bootstrap(0, num_bootstrap=100)[-1]
    assert found[0].value == over_pairs.value
    assert (found[0].num_samples, over_pairs.num_samples) == (PROMPTS, PROMPTS * COPIES)
    assert found[0].standard_error > 1.2 * over_pairs.standard_error  # type: ignore[operator]


def test_gram_intervals_of_equal_eigenvalues_hold_the_estimate():
    gram = GramSpectrum(np.eye(64) / 64, np.arange(64), np.ones(64), np.full(64, 1 / 64), torch.empty(0, 64), 1)
    estimate = gram.bootstrap(1)[0]
    assert estimate.low <= estimate.value <= estimate.high  # type: ignore[operator]


@pytest.mark.parametrize(("rank", "products"), [(1, 4), (1, 12), (3, 6), (10, 6)])
def test_trace_intervals_of_semidefinite_matrices_of_low_rank_hold_the_trace(rank: int, products: int):
    values = torch.cat([5.0 / torch.arange(1, rank + 1, dtype=torch.float64), torch.zeros(SIZE - rank)])
    basis = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(2)).double())[0]
    matrix = MatrixOperator((basis * values) @ basis.T)
    truth = float(values.sum())
    matrix.is_semidefinite = True
    assert coverage(lambda seed: hutchinson_trace(matrix, products, seed=seed), truth) >= 0.9
    assert hutchinson_trace(matrix, products, seed=0).kind == IntervalKind.chi_squared
