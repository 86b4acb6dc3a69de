"""RM-Optimizer: train, measure and serve Bradley-Terry reward models. Names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rm_optimizer.lazy import export_lazily

if TYPE_CHECKING:
    from rm_optimizer.compare import OptimizerComparison as OptimizerComparison
    from rm_optimizer.core.base import BaseRewardModel as BaseRewardModel
    from rm_optimizer.core.base import Scorer as Scorer
    from rm_optimizer.core.classifier.pooling import register_pooling_head as register_pooling_head
    from rm_optimizer.core.data_loader import PairOrder as PairOrder
    from rm_optimizer.core.data_loader import PreferenceDataset as PreferenceDataset
    from rm_optimizer.core.data_loader import PreferenceWorld as PreferenceWorld
    from rm_optimizer.core.data_loader import RayPreferenceDataset as RayPreferenceDataset
    from rm_optimizer.core.data_loader import TrainVal as TrainVal
    from rm_optimizer.core.data_loader import create_dataloader as create_dataloader
    from rm_optimizer.core.importing.exporting import ExportedModel as ExportedModel
    from rm_optimizer.core.importing.exporting import export_reward_model as export_reward_model
    from rm_optimizer.core.importing.importing import ImportedModel as ImportedModel
    from rm_optimizer.core.importing.importing import import_reward_model as import_reward_model
    from rm_optimizer.core.model.losses import register_loss as register_loss
    from rm_optimizer.core.model.reward_model import BradleyTerryRM as BradleyTerryRM
    from rm_optimizer.core.pairs.pair import Message as Message
    from rm_optimizer.core.pairs.pair import PreferencePair as PreferencePair
    from rm_optimizer.core.pairs.source_pairs import register_layout as register_layout
    from rm_optimizer.data_efficiency import AcquisitionFunction as AcquisitionFunction
    from rm_optimizer.data_efficiency import ActiveLearner as ActiveLearner
    from rm_optimizer.data_efficiency import CurriculumSampler as CurriculumSampler
    from rm_optimizer.data_efficiency import UncertaintySampling as UncertaintySampling
    from rm_optimizer.doctor.diagnosis import Check as Check
    from rm_optimizer.doctor.diagnosis import Diagnosis as Diagnosis
    from rm_optimizer.doctor.doctor import diagnose as diagnose
    from rm_optimizer.doctor.doctor import register_check as register_check
    from rm_optimizer.errors import CheckpointError as CheckpointError
    from rm_optimizer.errors import ConfigError as ConfigError
    from rm_optimizer.errors import ConversationRefused as ConversationRefused
    from rm_optimizer.errors import DataError as DataError
    from rm_optimizer.errors import DataStalled as DataStalled
    from rm_optimizer.errors import DiskError as DiskError
    from rm_optimizer.errors import EngineFailed as EngineFailed
    from rm_optimizer.errors import EngineUnavailable as EngineUnavailable
    from rm_optimizer.errors import HandshakeFailed as HandshakeFailed
    from rm_optimizer.errors import Interrupted as Interrupted
    from rm_optimizer.errors import MissingExtra as MissingExtra
    from rm_optimizer.errors import NeedsImport as NeedsImport
    from rm_optimizer.errors import OutOfMemory as OutOfMemory
    from rm_optimizer.errors import PublishFailed as PublishFailed
    from rm_optimizer.errors import RewardServerRefused as RewardServerRefused
    from rm_optimizer.errors import RewardServerUnavailable as RewardServerUnavailable
    from rm_optimizer.errors import RMOptimizerError as RMOptimizerError
    from rm_optimizer.errors import TrainingDiverged as TrainingDiverged
    from rm_optimizer.errors import TransferFailed as TransferFailed
    from rm_optimizer.errors import WeightsRefused as WeightsRefused
    from rm_optimizer.errors import WrongAnswer as WrongAnswer
    from rm_optimizer.errors import WrongVersion as WrongVersion
    from rm_optimizer.evaluation.saved_model import Evaluation as Evaluation
    from rm_optimizer.evaluation.saved_model import evaluate_checkpoint as evaluate_checkpoint
    from rm_optimizer.evaluation.saved_model import evaluate_model as evaluate_model
    from rm_optimizer.experiments.compared_runs import read_runs as read_runs
    from rm_optimizer.experiments.run_comparison import RunComparison as RunComparison
    from rm_optimizer.experiments.run_comparison import compare_runs as compare_runs
    from rm_optimizer.explanation.explain import explain_difference as explain_difference
    from rm_optimizer.explanation.findings import Explanation as Explanation
    from rm_optimizer.landscape import HessianAnalyzer as HessianAnalyzer
    from rm_optimizer.landscape import HessianSpectrum as HessianSpectrum
    from rm_optimizer.landscape import SpectrumOptions as SpectrumOptions
    from rm_optimizer.rl_coupling import BestOfNCurve as BestOfNCurve
    from rm_optimizer.rl_coupling import BestOfNSampler as BestOfNSampler
    from rm_optimizer.rl_coupling import EnsemblePrediction as EnsemblePrediction
    from rm_optimizer.rl_coupling import MahalanobisDetector as MahalanobisDetector
    from rm_optimizer.rl_coupling import OveroptimizationCurve as OveroptimizationCurve
    from rm_optimizer.rl_coupling import RewardModelCreditAssigner as RewardModelCreditAssigner
    from rm_optimizer.rl_coupling import RewardModelEnsemble as RewardModelEnsemble
    from rm_optimizer.rl_coupling import RewardModelScorer as RewardModelScorer
    from rm_optimizer.rl_coupling import RLReadinessReport as RLReadinessReport
    from rm_optimizer.rl_coupling import RLReadinessScorer as RLReadinessScorer
    from rm_optimizer.rl_coupling import measure_readiness as measure_readiness
    from rm_optimizer.schema import TrainConfig as TrainConfig
    from rm_optimizer.schema import compose as compose
    from rm_optimizer.schema import typed as typed
    from rm_optimizer.serving import AsyncRewardClient as AsyncRewardClient
    from rm_optimizer.serving import RewardClient as RewardClient
    from rm_optimizer.serving import RewardModelTrainingMode as RewardModelTrainingMode
    from rm_optimizer.serving import RMPublisherAdapter as RMPublisherAdapter
    from rm_optimizer.serving import create_rm_publisher as create_rm_publisher
    from rm_optimizer.serving import trl_reward as trl_reward
    from rm_optimizer.training import RewardModelLightning as RewardModelLightning
    from rm_optimizer.training import RunCallback as RunCallback
    from rm_optimizer.training import RunResult as RunResult
    from rm_optimizer.training import train_reward_model as train_reward_model

__version__ = "0.2.0"
PUBLIC_MODULES = (
    "rm_optimizer",
    "rm_optimizer.core",
    "rm_optimizer.core.data_loader",
    "rm_optimizer.data_efficiency",
    "rm_optimizer.landscape",
    "rm_optimizer.optim",
    "rm_optimizer.rl_coupling",
    "rm_optimizer.schema",
    "rm_optimizer.serving",
    "rm_optimizer.training",
)
"""Modules whose `__all__` is the public interface; every other module is internal and may change in any release."""

export_lazily(globals())
