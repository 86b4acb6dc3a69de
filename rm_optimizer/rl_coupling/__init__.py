"""Reward models that steer a policy: ensembles, best-of-n, over-optimization, and adapters for RL trainers.

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
    from rm_optimizer.rl_coupling.language_policies import TransformersPolicy as TransformersPolicy
    from rm_optimizer.rl_coupling.language_policies import VLLMPolicy as VLLMPolicy
    from rm_optimizer.rl_coupling.out_of_distribution import MahalanobisDetector as MahalanobisDetector
    from rm_optimizer.rl_coupling.out_of_distribution import OODDetection as OODDetection
    from rm_optimizer.rl_coupling.overoptimization import OveroptimizationCurve as OveroptimizationCurve
    from rm_optimizer.rl_coupling.policy_simulation import BestOfNSampler as BestOfNSampler
    from rm_optimizer.rl_coupling.policy_simulation import RankedResponses as RankedResponses
    from rm_optimizer.rl_coupling.readiness.measurement import ReadinessOptions as ReadinessOptions
    from rm_optimizer.rl_coupling.readiness.measurement import measure_readiness as measure_readiness
    from rm_optimizer.rl_coupling.readiness.probe import ScorerOracle as ScorerOracle
    from rm_optimizer.rl_coupling.readiness.report import RLReadinessReport as RLReadinessReport
    from rm_optimizer.rl_coupling.rl_readiness import RLReadinessScorer as RLReadinessScorer
    from rm_optimizer.rl_coupling.rlhf import RLHFResult as RLHFResult
    from rm_optimizer.rl_coupling.rlhf import optimize_policy as optimize_policy
    from rm_optimizer.rl_coupling.rollouts import RewardModelCreditAssigner as RewardModelCreditAssigner
    from rm_optimizer.rl_coupling.rollouts import RewardModelScorer as RewardModelScorer
    from rm_optimizer.rl_coupling.trainer_rewards import ScaledScorer as ScaledScorer
    from rm_optimizer.rl_coupling.trainer_rewards import openrlhf_reward_func as openrlhf_reward_func
    from rm_optimizer.rl_coupling.trainer_rewards import trl_reward_async as trl_reward_async
    from rm_optimizer.rl_coupling.trainer_rewards import verl_compute_score as verl_compute_score
    from rm_optimizer.rl_coupling.trainer_rewards import verl_compute_score_async as verl_compute_score_async
    from rm_optimizer.rl_coupling.trainer_rewards import verl_compute_scores as verl_compute_scores
    from rm_optimizer.rl_coupling.world_policy import WorldGold as WorldGold
    from rm_optimizer.rl_coupling.world_policy import WorldPolicy as WorldPolicy
    from rm_optimizer.rl_coupling.world_policy import save_world_policy as save_world_policy

export_lazily(globals())
