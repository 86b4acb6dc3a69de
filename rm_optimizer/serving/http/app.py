"""HTTP application around a `RewardService`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response
from fastapi.security import HTTPBearer

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
        dependencies=[]
        if api_key is None
        else [Depends(HTTPBearer(scheme_name="key", auto_error=False))],  # documented
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
    return app


def show_server_log() -> None:
    """Write the package's log from level INFO, which includes weight updates; a second call does nothing."""
    log = logging.getLogger("rm_optimizer")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s rm-opt serve: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
