"""Fitted readiness: a linear prediction with an interval, written and read."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.rl_coupling.readiness.fitted import (
    FitProvenance,
    FittedFeature,
    FittedOutcome,
    FittedReadiness,
)

TERMS = (FittedFeature("accuracy", 0.7, 0.1, 0.5, 0.5, 0.9), FittedFeature("probe_64", 0.8, 0.2, 1.0, 0.4, 1.0))
FIT = FittedReadiness(
    "test",
    {"rloo_kl": FittedOutcome("gold", "sd", TERMS, 1.0, 0.3, (0.5, 1.0, 1.5), Estimate(0.7, 0.05, 6))},
    FitProvenance("on synthetic worlds", (0,), (3,), 48, 48, "abc", "2026-01-01", {"numpy": np.__version__}),
)


def test_score_is_linear_with_the_errors_of_features_and_fit():
    features = {
        "accuracy": Estimate(0.8, 0.02, 40),
        "probe_64": Estimate(0.9, 0.04, 64),
        "other": Estimate(1, None, 1),
    }
    found = FIT.outcomes["rloo_kl"].score(features)
    assert found.value == pytest.approx(1.0 + 0.5 + 0.5)
    assert found.standard_error == pytest.approx(math.sqrt(0.3**2 + 0.1**2 + 0.2**2))
    assert found.high - found.low == pytest.approx(2 * 1.959964 * found.standard_error)
    assert found.num_samples == 40


def test_fit_is_read_as_it_was_written():
    assert FittedReadiness.from_json(FIT.to_json()) == FIT
