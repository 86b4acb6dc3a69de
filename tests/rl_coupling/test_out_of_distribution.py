"""The distance from the reference finds what is far, and the threshold keeps its false-positive rate."""

from __future__ import annotations

import numpy as np
import pytest

from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.rl_coupling import MahalanobisDetector
from rm_optimizer.rl_coupling.out_of_distribution import conformal_threshold


def test_the_threshold_keeps_its_rate_on_new_rows():
    rng = np.random.default_rng(0)
    rates = []
    for seed in range(200):
        rows = rng.standard_t(4, size=(260, 8))
        rates.append(
            np.mean(MahalanobisDetector(rows[:60], false_positive_rate=0.1, seed=seed).detect(rows[60:]).is_ood)
        )
    expected = 1 - np.ceil(31 * 0.9) / 31
    assert np.mean(rates) == pytest.approx(expected, abs=4 * np.std(rates) / np.sqrt(200))
    assert expected <= 0.1


def test_shifted_rows_are_found_in_the_direction_of_little_variance():
    rng = np.random.default_rng(1)
    scales = np.array([10.0, 10.0, 0.1])
    detector = MahalanobisDetector(rng.normal(size=(400, 3)) * scales)
    far = detector.distances(np.array([[0.0, 0.0, 1.0]]))
    near = detector.distances(np.array([[10.0, 0.0, 0.0]]))
    assert far > detector.threshold > near


def test_distances_do_not_depend_on_a_common_shift():
    rows = np.random.default_rng(2).normal(size=(60, 4))
    first, second = MahalanobisDetector(rows), MahalanobisDetector(rows + 1e3)
    assert first.distances(rows) == pytest.approx(second.distances(rows + 1e3), rel=1e-6)


def test_wrong_references_are_refused():
    rows = np.random.default_rng(3).normal(size=(60, 4))
    broken = rows.copy()
    broken[7, 1] = np.nan
    with pytest.raises(DataError, match="response 8, feature 2"):
        MahalanobisDetector(broken)
    with pytest.raises(DataError, match="equal features"):
        MahalanobisDetector(np.ones((60, 4)))
    with pytest.raises(DataError, match="needs at least 38 reference responses"):
        MahalanobisDetector(rows[:20])
    with pytest.raises(DataError, match="at least 4 reference responses, got 2"):
        MahalanobisDetector(rows[:2])
    with pytest.raises(ConfigError, match="false_positive_rate"):
        conformal_threshold(rows[:, 0], 0.0)
