"""Reward models that steer a policy: ensembles, best-of-n, over-optimization, and the trainers people use.

Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rm_optimizer.lazy import export_lazily

if TYPE_CHECKING:
    from rm_optimizer.rl_coupling.best_of_n_curve import BestOfNCurve as BestOfNCurve
    from rm_optimizer.rl_coupling.ensemble import EnsembleMargin as EnsembleMargin
    from rm_optimizer.rl_coupling.ensemble import EnsemblePrediction as EnsemblePrediction
    from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble as RewardModelEnsemble
    from rm_optimizer.rl_coupling.ensemble_folder import load_ensemble as load_ensemble
    from rm_optimizer.rl_coupling.out_of_distribution import MahalanobisDetector as MahalanobisDetector
    from rm_optimizer.rl_coupling.out_of_distribution import OODDetection as OODDetection

export_lazily(globals())
