"""An estimate reads as its value and interval, and survives being written."""

from __future__ import annotations

import math

import pytest

from rm_optimizer.core.metrics.estimate import Estimate


def test_estimate_reads_as_value_and_interval():
    assert str(Estimate(0.731, 0.01, 9, low=0.712, high=0.749)) == "0.731 [0.712, 0.749]"
    assert str(Estimate(0.731, 0.01, 9)) == "0.731 ± 0.010"
    assert str(Estimate(0.731, None, 1)) == "0.731"
    assert str(Estimate(math.nan, None, 0)) == "n/a"
    assert f"{Estimate(12.3456, 0.5, 9):.1f}" == "12.3 ± 0.5"


@pytest.mark.parametrize("estimate", [Estimate(0.7, 0.01, 9, 0.6, 0.8), Estimate(1.0, None, 1)])
def test_estimate_survives_json(estimate: Estimate):
    assert Estimate.from_json(estimate.to_json()) == estimate


def test_nan_is_null_in_json():
    text = Estimate(math.nan, None, 0).to_json()
    assert "NaN" not in text
    assert math.isnan(Estimate.from_json(text).value)
