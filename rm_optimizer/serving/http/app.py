"""HTTP application around a `RewardService`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response

import rm_optimizer
from rm_optimizer.serving.http.gate import BODY_SECONDS, Gate, bearer_check, header_size_check, local_host_check
from rm_optimizer.serving.http.routes import ClientLeft, router
from rm_optimizer.serving.service.api_errors import install_error_answers
from rm_optimizer.serving.service.service import RewardService

_OFFLINE = (
    "<p>This page takes its scripts from cdn.jsdelivr.net. Where it stays empty, read "
    '<a href="/openapi.json">/openapi.json</a>, which needs no internet.</p>'
)
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
        routers: further routes, for example for weight updates.
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
    page = get_swagger_ui_html(openapi_url="/openapi.json", title=app.title).body
    place = b'<div id="swagger-ui">'
    assert place in page, "Swagger's page has the place that its script fills"
    html = bytes(page).replace(place, place + _OFFLINE.encode())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(html)

    for routes in (router, *routers):
        app.include_router(routes)
    install_error_answers(app)

    @app.exception_handler(ClientLeft)
    async def client_left(request: Request, error: ClientLeft) -> Response:
        service.metrics.disconnected.inc()
        return Response(status_code=CLIENT_CLOSED)

    checks = [header_size_check, *([local_host_check] if local_only else []), bearer_check(api_key, update_key)]
    app.add_middleware(Gate, metrics=service.metrics, checks=checks, seconds=body_seconds)
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


def show_server_log() -> None:
    """Write the package's log from level INFO, which includes weight updates; a second call does nothing."""
    log = logging.getLogger("rm_optimizer")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s rm-opt serve: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
