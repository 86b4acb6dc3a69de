"""Reward model serving: wire types, engines, the server, its client and live weight updates.

Modules are imported by name; the server's need the extra `serve`. The public names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rm_optimizer.lazy import export_lazily

if TYPE_CHECKING:
    from rm_optimizer.schema.publish import RewardModelTrainingMode as RewardModelTrainingMode
    from rm_optimizer.serving.client.client import AsyncRewardClient as AsyncRewardClient
    from rm_optimizer.serving.client.client import RewardClient as RewardClient
    from rm_optimizer.serving.client.reward_function import trl_reward as trl_reward
    from rm_optimizer.serving.protocol import ScoringRequest as ScoringRequest
    from rm_optimizer.serving.protocol import ScoringResponse as ScoringResponse
    from rm_optimizer.serving.weights.publisher import RMPublisherAdapter as RMPublisherAdapter
    from rm_optimizer.serving.weights.publisher import create_rm_publisher as create_rm_publisher

export_lazily(globals())
