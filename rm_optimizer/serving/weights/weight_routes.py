"""Routes of weight updates, and the application with all routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, FastAPI, Path, Request, Response

from rm_optimizer.schema.publish import Transport
from rm_optimizer.serving.engine import Engine
from rm_optimizer.serving.http.app import create_app
from rm_optimizer.serving.http.gate import JsonRoute
from rm_optimizer.serving.options import ServeOptions
from rm_optimizer.serving.protocol import REVISION_HEADER, VERSION_HEADER
from rm_optimizer.serving.service.api_errors import error_responses
from rm_optimizer.serving.service.service import RewardService
from rm_optimizer.serving.update_protocol import (
    Abort,
    Begin,
    Commit,
    Outcome,
    OutcomeStatus,
    Ready,
    Received,
    WeightStatus,
)
from rm_optimizer.serving.weights.receiver import WeightReceiver

_FAILURES = error_responses(400, 401, 404, 408, 409, 503)
_BINARY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def create_server(engine: Engine, options: ServeOptions) -> tuple[FastAPI, WeightReceiver]:
    """Create the application of a server with these options, and its receiver, which the caller closes.

    Args:
        engine: not yet started.
        options: options of the server.
    """
    service = RewardService(engine, model_name=options.model_name, max_queued_tokens=options.max_queued_tokens)
    transports = frozenset(map(Transport, options.transport_names))
    receiver = WeightReceiver(service, root=options.weights_root, transports=transports, state=options.state)
    app = create_app(
        service,
        api_key=options.api_key,
        update_key=options.update_key,
        local_only=options.checks_host,
        routers=[weight_router(receiver)] if options.takes_updates else [],
        access_log=options.access_log,
    )
    return app, receiver


def weight_router(receiver: WeightReceiver) -> APIRouter:
    """Router of `/rm/weights`; the application authenticates.

    Args:
        receiver: receiver of the updates, to close when the application ends.
    """
    router = APIRouter(prefix="/rm/weights", tags=["weight updates"], route_class=JsonRoute)

    @router.post("/begin", responses=_FAILURES)
    async def begin(body: Begin) -> Ready:
        """Announce an update; the answer confirms that its receiving end is ready."""
        return await receiver.begin(body)

    @router.put("/upload/{batch_id}", responses=_FAILURES, openapi_extra=_BINARY)
    async def upload(batch_id: Annotated[str, Path(max_length=128)], request: Request) -> Received:
        """The safetensors body of an inline update."""
        return await receiver.upload(batch_id, request.stream())

    @router.post("/commit", responses={**_FAILURES, 400: {"model": Outcome}})
    async def commit(body: Commit, response: Response) -> Outcome:
        """Check the tensors, then swap; 400 with the reason if the old weights stay."""
        outcome = await receiver.commit(body)
        response.headers[VERSION_HEADER] = outcome.version
        response.headers[REVISION_HEADER] = str(outcome.revision)
        if outcome.status not in (OutcomeStatus.prepared, OutcomeStatus.committed):
            response.status_code = 409 if outcome.error is None else outcome.error.code
        return outcome

    @router.post("/abort", responses=_FAILURES)
    async def abort(body: Abort) -> Outcome:
        """Abort an update."""
        return await receiver.abort(body)

    @router.get("/status", responses=error_responses(401, 503))
    async def status(batch_id: str | None = None) -> WeightStatus:
        """Served weights, update in progress and outcome of an update."""
        return receiver.status(batch_id)

    return router
