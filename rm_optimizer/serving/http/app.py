"""HTTP application around a `RewardService`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import rm_optimizer
from rm_optimizer.serving.http.admission import AdmissionControl
from rm_optimizer.serving.http.api_page import add_api_page
from rm_optimizer.serving.http.body_timeout import BODY_SECONDS, BodyTimeout
from rm_optimizer.serving.http.error_answers import install_error_answers
from rm_optimizer.serving.http.head_checks import Guard, bearer_check, header_size_check, local_host_check
from rm_optimizer.serving.http.routes import ClientLeft, router
from rm_optimizer.serving.service.metrics import OTHER_ROUTE, ServerMetrics
from rm_optimizer.serving.service.service import RewardService

CLIENT_CLOSED = 499
"""nginx's status for a client that disconnected; only the metrics use it."""


def create_app(
    service: RewardService,
    *,
    api_key: str | None = None,
    update_key: str | None = None,
    local_only: bool = False,
    routers: Sequence[APIRouter] = (),
    body_seconds: float = BODY_SECONDS,
) -> FastAPI:
    """Create the application. Its caller starts the service, and the application's shutdown stops it.

    Args:
        service: the served model, available as `app.state.service`.
        api_key: key that every request must carry; None requires no key.
        update_key: key for weight updates in its place; None requires the `api_key` there too.
        local_only: refuse requests whose `Host` is not this machine.
        routers: further routes, for example those of weight updates.
        body_seconds: longest pause in a body, in seconds.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.stop()

    app = FastAPI(
        title="RM-Optimizer reward server",
        version=rm_optimizer.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    add_api_page(app)
    for routes in (router, *routers):
        app.include_router(routes)
    install_error_answers(app)
    app.add_exception_handler(ClientLeft, _client_left)
    app.add_middleware(AdmissionControl)
    app.add_middleware(BodyTimeout, seconds=body_seconds)
    app.add_middleware(Guard, check=bearer_check(api_key, update_key))
    if local_only:
        app.add_middleware(Guard, check=local_host_check)
    app.add_middleware(Guard, check=header_size_check)
    app.add_middleware(RequestMetrics, metrics=service.metrics)  # added last, hence outermost
    app.openapi = _documented(app, api_key)  # type: ignore[method-assign]
    return app


def _documented(app: FastAPI, api_key: str | None) -> Callable[[], dict[str, Any]]:
    """OpenAPI document with the key's scheme and without FastAPI's 422: invalid requests get 400 and a typed body."""
    original = app.openapi

    def document() -> dict[str, Any]:
        described = original()
        for path in described["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        if api_key is not None:
            schemes = described.setdefault("components", {}).setdefault("securitySchemes", {})
            schemes["key"] = {"type": "http", "scheme": "bearer"}
            described["security"] = [{"key": []}]
        return described

    return document


def _client_left(request: Request, error: Exception) -> Response:
    service: RewardService = request.app.state.service
    service.metrics.disconnected.inc()
    return Response(status_code=CLIENT_CLOSED)


@dataclass(eq=False)
class RequestMetrics:
    """Middleware that counts requests by route and status, and measures their durations; HEAD is handled as GET.

    Args:
        app: application behind this middleware.
        metrics: counters of the server.
    """

    app: ASGIApp
    metrics: ServerMetrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and count its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # uvicorn keeps its own scope, by which it omits the body
            scope = {**scope, "method": "GET"}
        status, started = 500, time.perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", OTHER_ROUTE)
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - started)
