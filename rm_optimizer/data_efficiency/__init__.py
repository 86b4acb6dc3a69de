"""Fewer and cleaner labels: choice of pairs to label, order of training, and wrong labels.

Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rm_optimizer.lazy import export_lazily

if TYPE_CHECKING:
    from rm_optimizer.data_efficiency.acquisition import AcquisitionFunction as AcquisitionFunction
    from rm_optimizer.data_efficiency.acquisition import UncertaintySampling as UncertaintySampling
    from rm_optimizer.data_efficiency.active_learning import ActiveLearner as ActiveLearner
    from rm_optimizer.data_efficiency.feature_rules import acquisition_function as acquisition_function
    from rm_optimizer.data_efficiency.margin_analysis import Cartography as Cartography
    from rm_optimizer.data_efficiency.margin_analysis import held_out_chances as held_out_chances
    from rm_optimizer.data_efficiency.margin_analysis import suspected_labels as suspected_labels
    from rm_optimizer.data_efficiency.pool import Pool as Pool
    from rm_optimizer.data_efficiency.pool import read_pool as read_pool
    from rm_optimizer.data_efficiency.votes import noise_ceiling as noise_ceiling
    from rm_optimizer.training.data.curriculum import CurriculumSampler as CurriculumSampler

export_lazily(globals())
