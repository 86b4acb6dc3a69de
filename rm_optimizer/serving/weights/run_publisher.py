"""Publisher of a training run: built from its options and checked against the server before the run starts."""

from __future__ import annotations

import os

import httpx

from rm_optimizer.errors import ConfigError, PublishFailed, RewardServerUnavailable, RMOptimizerError
from rm_optimizer.schema.checks import require_key
from rm_optimizer.schema.publish import PublishConfig
from rm_optimizer.serving.update_protocol import WeightStatus
from rm_optimizer.serving.weights.publisher import RMPublisherAdapter

STARTING_SECONDS = 3.0
"""Seconds for a server to accept connections before a run fails at its start; the server may still be starting."""


def open_publisher(config: PublishConfig) -> RMPublisherAdapter:
    """Publisher of a run's options, once the server has answered.

    Raises:
        ConfigError: if the variable of the API key is not set.
        PublishFailed: if the server does not answer, or does not accept the transport.
    """
    try:
        publisher = RMPublisherAdapter(
            str(config.url),
            mode=config.mode,
            transport=config.transport,
            api_key=_api_key(config),
            timeout_seconds=config.timeout_seconds,
            host=config.host,
        )
    except httpx.InvalidURL as error:
        raise ConfigError(f"publish.url must be like http://127.0.0.1:8000, got {config.url!r}: {error}") from error
    try:
        taken = _first_status(publisher).transports
    except RMOptimizerError:
        publisher.close()
        raise
    if publisher.transport not in taken:
        publisher.close()
        raise ConfigError(f"publish.transport must be one of {', '.join(taken)}, which the server accepts")
    return publisher


def _api_key(config: PublishConfig) -> str | None:
    if config.api_key_env is None:
        return None
    api_key = os.environ.get(config.api_key_env)
    if not api_key:
        raise ConfigError(f"publish.api_key_env names {config.api_key_env}, which is not set; export it")
    require_key(f"the key in {config.api_key_env} (publish.api_key_env)", api_key)
    return api_key


def _first_status(publisher: RMPublisherAdapter) -> WeightStatus:
    """Status of the server, after a wait if it is starting."""
    try:
        publisher.wait_reachable(min(STARTING_SECONDS, publisher.timeout_seconds))
    except RewardServerUnavailable as error:
        raise PublishFailed(
            f"publish.url: no server accepts connections at {publisher.url}; start one with rm-opt serve, or train "
            f"with publish.url=null: {error}"
        ) from error
    try:
        return publisher.status()
    except RMOptimizerError as error:
        raise PublishFailed(f"publish.url: {error}") from error
