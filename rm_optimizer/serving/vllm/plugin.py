"""vLLM plugin that replaces the server's HTTP application: vLLM starts and schedules, this application answers.

Two entry points load it (`vllm.general_plugins`, `vllm.endpoint_plugins`), the second only if `VLLM_PLUGINS` names it.
vLLM's own routes are removed: they would bypass the API key and omit the version of the weights.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from argparse import Namespace
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.datastructures import State
from starlette.types import ASGIApp, Receive, Scope, Send

from rm_optimizer.errors import CheckpointError, HandshakeFailed, RMOptimizerError
from rm_optimizer.serving.child_process import end_with_parent
from rm_optimizer.serving.http.app import show_server_log
from rm_optimizer.serving.http.gate import most_connections
from rm_optimizer.serving.service.api_errors import NotReady, error_answer
from rm_optimizer.serving.vllm.engine import vllm_engine
from rm_optimizer.serving.vllm.supervisor import FAILED_FILE, SETTINGS_VARIABLE, VllmSettings
from rm_optimizer.serving.weights.weight_routes import create_server

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

NAME = "rm_optimizer"
"""Name of both entry points, hence in `VLLM_PLUGINS`."""
DRAIN_SECONDS = 20.0
"""Seconds to answer accepted requests when the server stops."""


def register() -> None:
    """Let each process of a server of `rm-opt serve` end with its parent.

    vLLM calls this in the processes of every server; servers that `rm-opt serve` did not start stay unchanged.
    """
    if SETTINGS_VARIABLE in os.environ:
        end_with_parent()


class RewardEndpoint:
    """vLLM's endpoint plugin, which starts the service on its engine."""

    name = NAME
    required_tasks = ("classify",)

    def attach_router(self, app: FastAPI) -> None:
        """Remove all of vLLM's routes; `RewardApplication` answers every path."""
        app.router.routes.clear()

    async def init_state(self, engine_client: EngineClient, state: State, args: Namespace) -> None:
        """Compare the loaded model with its certificate, and restore its earlier updates.

        Raises:
            RMOptimizerError: if the checkpoint was replaced, conversations would be rendered differently, or an update
                cannot be loaded again.
        """
        settings = VllmSettings.read()
        engine = vllm_engine(engine_client, settings)
        show_server_log()
        state.reward_app, receiver = create_server(engine, settings.options)
        service = receiver.service
        options, check = settings.options, None
        if options.check is not None and not settings.num_restarts:
            from rm_optimizer.explanation.explain import require_rewards

            check = partial(require_rewards, options)
        try:
            await service.start(check)
        except HandshakeFailed as error:
            settings.started_file.with_name(FAILED_FILE).write_text(str(error), encoding="utf-8")
            raise
        except CheckpointError:
            settings.started_file.unlink(missing_ok=True)  # no further server can answer, so the supervisor ends too
            raise
        if service.obstacle is not None:
            raise RMOptimizerError(f"{settings.model.folder} cannot be served: {service.obstacle}")
        settings.started_file.touch()
        description, url = engine.description, settings.options.url
        shown = (
            "no certificate to compare with"
            if service.parity is None
            else f"parity {service.parity.max_difference:.2g}"
        )
        print(
            f"rm-opt serve: ready: {url} serves '{service.model_name}' ({description.architecture}, "
            f"{description.dtype}, vLLM, version {engine.version}; {shown}); API at {url}/docs",
            flush=True,
        )


class RewardApplication:
    """vLLM's outermost middleware (`--middleware`), whose application answers every request.

    vLLM's server has no option for the number of connections, so their limit is set here before it listens. SIGTERM is
    handled here too: accepted requests are answered before vLLM receives it. vLLM's own drain fails on a pooling engine
    that receives another sequence meanwhile (`assert req_state.detokenizer is not None`, vLLM 0.32).

    Args:
        app: vLLM's application, which keeps its startup and shutdown.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._num_open = 0
        self._ending: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the service's application, unless the server is stopping."""
        if scope["type"] == "lifespan":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop)
            scope["app"].state.server.config.limit_concurrency = most_connections()  # read for each connection
            await self.app(scope, receive, send)
            return
        if self._ending is not None and scope["type"] == "http":
            await error_answer(NotReady("the server is stopping"))(scope, receive, send)
            return
        self._num_open += 1
        try:
            await scope["app"].state.reward_app(scope, receive, send)
        finally:
            self._num_open -= 1

    def _stop(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        """Wait for open requests, then pass the signal on to vLLM."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)
