"""Pictures of policies show the numbers of their curves."""

from __future__ import annotations

import numpy as np

from rm_optimizer.reporting.results import plot_best_of_n, plot_overoptimization
from rm_optimizer.rl_coupling import BestOfNCurve, OveroptimizationCurve

PROXY, GOLD = np.random.default_rng(0).normal(size=(2, 20, 8))


def test_best_of_n_shows_every_point_with_its_interval():
    curve = BestOfNCurve.measure(PROXY, GOLD, num_bootstrap=50)
    upper, lower = plot_best_of_n(curve).axes
    for axes, rewards in ((upper, [p.proxy for p in curve.points]), (lower, [p.gold for p in curve.points])):
        (bars,) = axes.containers
        assert bars[0].get_xdata().tolist() == [1, 2, 4, 8]
        assert bars[0].get_ydata().tolist() == [reward.value for reward in rewards]
        ends = [segment[:, 1].tolist() for segment in bars[2][0].get_segments()]
        assert np.allclose(ends, [[reward.low, reward.high] for reward in rewards])
    assert "20 prompts, 8 responses each" in upper.texts[0].get_text()


def test_best_of_n_without_gold_has_one_panel():
    assert len(plot_best_of_n(BestOfNCurve.measure(PROXY, num_bootstrap=0)).axes) == 1


def test_over_optimization_shows_gains_fits_and_the_peak():
    rng = np.random.default_rng(1)
    proxy, noise = rng.normal(size=(2, 40, 64))
    curve = OveroptimizationCurve.of_best_of_n(proxy, proxy - 0.4 * proxy**2 + noise, num_bootstrap=50)
    (axes,) = plot_overoptimization(curve).axes
    shown = {bars.get_label(): bars[0].get_ydata().tolist() for bars in axes.containers}
    assert shown["gold reward"] == [point.gold.value for point in curve.points]
    assert shown["proxy reward, which is optimized"] == [point.proxy.value for point in curve.points]
    (peak,) = [line for line in axes.get_lines() if str(line.get_label()).startswith("peak of the fit")]
    assert set(peak.get_xdata()) == {curve.peak_distance.value}
    assert "gold falls by" in axes.texts[0].get_text()
