"""Pictures of policies show the numbers of their curves."""

from __future__ import annotations

import numpy as np

from rm_optimizer.reporting.policy_plots import plot_best_of_n
from rm_optimizer.rl_coupling import BestOfNCurve

PROXY, GOLD = np.random.default_rng(0).normal(size=(2, 20, 8))


def test_best_of_n_shows_every_point_with_its_interval() -> None:
    curve = BestOfNCurve.measure(PROXY, GOLD, num_bootstrap=50)
    upper, lower = plot_best_of_n(curve).axes
    for axes, rewards in ((upper, [p.proxy for p in curve.points]), (lower, [p.gold for p in curve.points])):
        (bars,) = axes.containers
        assert bars[0].get_xdata().tolist() == [1, 2, 4, 8]
        assert bars[0].get_ydata().tolist() == [reward.value for reward in rewards]
        ends = [segment[:, 1].tolist() for segment in bars[2][0].get_segments()]
        assert np.allclose(ends, [[reward.low, reward.high] for reward in rewards])
    assert "20 prompts, 8 responses each" in upper.texts[0].get_text()


def test_best_of_n_without_gold_has_one_panel() -> None:
    assert len(plot_best_of_n(BestOfNCurve.measure(PROXY, num_bootstrap=0)).axes) == 1
