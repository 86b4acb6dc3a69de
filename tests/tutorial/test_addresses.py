"""Modules that the documents name hold the classes that stand in them there."""

from __future__ import annotations

from importlib import import_module

import pytest

import rm_optimizer

ADDRESSES = {
    "core.base": "PreferencePair BaseRewardModel",
    "core.reward_model": "BradleyTerryRM",
    "core.data_loader": "PreferenceDataset create_dataloader RayPreferenceDataset",
    "core": "BradleyTerryRM",
    "landscape.hessian": "HessianAnalyzer HessianSpectrum",
    "landscape.optimizer_comparison": "OptimizerComparison",
    "landscape.visualization": "",
    "landscape": "HessianAnalyzer OptimizerComparison",
    "rl_coupling.ensemble": "RewardModelEnsemble EnsemblePrediction",
    "rl_coupling.policy_simulation": "BestOfNSampler",
    "rl_coupling.rl_readiness": "RLReadinessScorer RLReadinessReport",
    "rl_coupling": "RLReadinessScorer",
    "data_efficiency.active_learning": "AcquisitionFunction UncertaintySampling ActiveLearner",
    "data_efficiency.margin_analysis": "CurriculumSampler",
    "training.lightning_module": "RewardModelLightning",
    "training.callbacks": "",
    "training": "train_reward_model",
    "interfaces.cli": "app",
}
"""Names of each module."""


@pytest.mark.parametrize("module", ADDRESSES)
def test_the_documents_modules_hold_the_packages_names(module):
    found = import_module(f"rm_optimizer.{module}")
    for name in ADDRESSES[module].split():
        assert hasattr(found, name)
        assert name == "app" or getattr(rm_optimizer, name, None) in (None, getattr(found, name))
