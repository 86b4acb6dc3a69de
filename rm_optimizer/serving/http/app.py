"""HTTP application around a `RewardService`, with the routes of scoring, health and information."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from fastapi.security import HTTPBearer

import rm_optimizer
from rm_optimizer.serving import protocol
from rm_optimizer.serving.http import gate
from rm_optimizer.serving.http.documents import api_page
from rm_optimizer.serving.service.api_errors import NotReady, error_responses, install_error_answers
from rm_optimizer.serving.service.inputs import TokenSequence, refuse_cuts
from rm_optimizer.serving.service.service import RewardService

router = APIRouter(route_class=gate.JsonRoute)
_SCORING = error_responses(400, 401, 404, 408, 413, 500, 503)
_READING = error_responses(401, 503)
T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed its connection before the answer."""


async def _service(request: Request) -> RewardService:  # FastAPI calls plain functions in a thread
    service: RewardService = request.app.state.service
    return service


Service = Annotated[RewardService, Depends(_service)]


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work, cancelling it as soon as the client disconnects.

    Raises:
        ClientLeft: if the client disconnects.
    """
    # The body was read, so the next message is the disconnection.
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _scored(
    service: RewardService,
    request: Request,
    sequences: list[TokenSequence],
    out: Response,
    use_activation: bool | None = None,
) -> tuple[list[float], dict[str, Any]]:
    """Rewards, or the sigmoid of each, and the fields that answers share; the headers name the weights too."""
    scored = await while_connected(request, service.score(sequences))
    out.headers[protocol.VERSION_HEADER] = scored.version
    out.headers[protocol.REVISION_HEADER] = str(scored.revision)
    numbers = [protocol.sigmoid(reward) if use_activation else reward for reward in scored.rewards]
    tokens = sum(map(len, sequences))
    usage = protocol.Usage(prompt_tokens=tokens, total_tokens=tokens)
    weights = {"rm_version": scored.version, "rm_revision": scored.revision}
    return numbers, {"model": service.model_name, "usage": usage, **weights}


@router.post("/classify", responses=_SCORING, tags=["rewards"])
async def classify(
    body: protocol.ClassifyRequest, request: Request, response: Response, service: Service
) -> protocol.ClassifyResponse:
    """Rewards of texts, token ids or one conversation, in vLLM's form."""
    reader, value = service.reader(body.model), body.input
    if body.messages is not None:
        sequences = await service.read(partial(reader.conversation, values=body.values()), body.messages)
    elif isinstance(value, str) or (value and isinstance(value[0], str)):
        texts: Any = value
        sequences = await service.read(partial(reader.texts, add_special_tokens=body.add_special_tokens), texts)
    else:  # only text waits for a tokenizer
        ids: Any = value
        sequences = reader.token_ids(ids)
    refuse_cuts(sequences, body.truncate_prompt_tokens)
    numbers, shared = await _scored(service, request, sequences, response, body.use_activation)
    data = [protocol.ClassifyDatum(index=index, probs=[number]) for index, number in enumerate(numbers)]
    return protocol.ClassifyResponse(id=f"classify-{uuid.uuid4().hex}", created=int(time.time()), data=data, **shared)


@router.post("/rm/score", responses=_SCORING, tags=["rewards"])
async def score(
    body: protocol.ScoringRequest, request: Request, response: Response, service: Service
) -> protocol.ScoringResponse:
    """Rewards of responses to prompts, rendered as in training."""
    sequences = await service.read(service.reader(body.model).items, body.items)
    numbers, shared = await _scored(service, request, sequences, response, body.use_activation)
    left = iter(numbers)
    return protocol.ScoringResponse(rewards=[[next(left) for _ in item.responses] for item in body.items], **shared)


@router.post("/get_reward", responses=_SCORING, tags=["rewards"])
async def get_reward(
    body: protocol.OpenRLHFRequest, request: Request, response: Response, service: Service
) -> protocol.OpenRLHFResponse:
    """Rewards in OpenRLHF's form (`--remote_rm_url http://host:port/get_reward`).

    Texts that are too long lose tokens from their left, as in training; `extra_logs.truncated` marks them with 1.0.
    """
    reader = service.reader()
    if not body.query:
        return protocol.OpenRLHFResponse(rewards=[], scores=[], extra_logs={"rm_reward": [], "truncated": []})
    encodings = await service.read(partial(reader.rendered, prompts=body.prompts), body.query)
    rewards, _ = await _scored(service, request, [encoding.ids for encoding in encodings], response)
    truncated = [float(encoding.prompt_cut > 0) for encoding in encodings]
    if any(truncated):
        service.count("truncated", int(sum(truncated)))
    return protocol.OpenRLHFResponse(
        rewards=rewards, scores=rewards, extra_logs={"rm_reward": rewards, "truncated": truncated}
    )


@router.get("/ping", responses=_READING, tags=["operation"])
@router.get("/health", responses=_READING, tags=["operation"])
async def health(service: Service) -> dict[str, str]:
    """200 while the server runs, also while it loads; `/ready` reports if it can answer."""
    engine = service.engine
    return {"status": "alive", "version": engine.version, "revision": str(engine.revision)}


@router.get("/ready", responses=_READING, tags=["operation"])
async def ready(service: Service) -> dict[str, str]:
    """200 once the weights are loaded and the parity probe has passed."""
    if service.obstacle is not None:
        raise NotReady(service.obstacle)
    return {"status": "ready", "version": service.engine.version, "revision": str(service.engine.revision)}


@router.get("/version", responses=_READING, tags=["operation"])
@router.get("/rm/version", responses=_READING, tags=["operation"])
async def version(response: Response, service: Service) -> protocol.VersionResponse:
    """The weights that answer now."""
    service.require_loaded()
    engine = service.engine
    answer = protocol.VersionResponse(
        version=engine.version,
        revision=engine.revision,
        engine=engine.description.engine,
        package=rm_optimizer.__version__,
    )
    response.headers[protocol.VERSION_HEADER] = answer.version
    response.headers[protocol.REVISION_HEADER] = str(answer.revision)
    return answer


@router.get("/v1/models", responses=_READING, tags=["operation"])
async def models(service: Service) -> protocol.ModelList:
    """The served model in OpenAI's form."""
    card = protocol.ModelCard(
        id=service.model_name, created=service.created, max_model_len=service.require_loaded().max_length
    )
    return protocol.ModelList(data=[card])


@router.get("/rm/info", responses=_READING, tags=["operation"])
async def info(service: Service) -> protocol.InfoResponse:
    """Properties of the server that a client verifies."""
    reader, engine, description = service.require_loaded(), service.engine, service.engine.description
    identity = reader.renderer.identity()
    return protocol.InfoResponse(
        engine=description.engine,
        model=service.model_name,
        version=engine.version,
        revision=engine.revision,
        architecture=description.architecture,
        dtype=description.dtype,
        rendering=protocol.RenderingInfo(**{key: identity[key] for key in protocol.RenderingInfo.model_fields}),
        max_length=description.max_length,
        vocab_size=description.vocab_size,
        pad_token_id=description.pad_token_id,
        eos_token_id=reader.renderer.tokenizer.eos_token_id,
        token_budget=description.token_budget,
        max_request_tokens=service.batcher.max_queued_tokens,
        max_request_items=protocol.MAX_ITEMS,
        shares_prompts=description.shares_prompts,
        parity=None if service.parity is None else service.parity.entries(),
        reward_statistics=description.export.get("reward_statistics"),
    )


@router.get("/metrics", responses=_READING, tags=["operation"], response_class=PlainTextResponse)
async def metrics(service: Service) -> Response:
    """Counts for Prometheus."""
    return Response(service.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")


CLIENT_CLOSED = 499
"""nginx's status for a client that disconnected; only the metrics use it."""


def create_app(
    service: RewardService,
    *,
    api_key: str | None = None,
    update_key: str | None = None,
    local_only: bool = False,
    routers: Sequence[APIRouter] = (),
    body_seconds: float = gate.BODY_SECONDS,
    access_log: str = "off",
) -> FastAPI:
    """Create the application. Its caller starts the service, and the application's shutdown stops it.

    Args:
        service: the served model, available as `app.state.service`.
        api_key: key that every request must carry; None requires no key.
        update_key: key for weight updates in its place; None requires the `api_key` there too.
        local_only: refuse requests whose `Host` is not this machine.
        routers: further routes, for example for weight updates.
        body_seconds: longest pause in a body, in seconds.
        access_log: `text` or `json` for a line about each request, `off` for none.
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

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(api_page(app.openapi()))

    for routes in (router, *routers):
        app.include_router(routes)
    install_error_answers(app)

    @app.exception_handler(ClientLeft)
    async def client_left(request: Request, error: ClientLeft) -> Response:
        service.metrics.disconnected.inc()
        return Response(status_code=CLIENT_CLOSED)

    checks = [gate.header_size_check, gate.bearer_check(api_key, update_key)]
    if local_only:
        checks.insert(1, gate.local_host_check)
    app.add_middleware(gate.Gate, metrics=service.metrics, checks=checks, seconds=body_seconds, access_log=access_log)
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
        access, lines = logging.getLogger("rm_optimizer.access"), logging.StreamHandler(sys.stdout)
        access.addHandler(lines)  # whole lines, which a collector of logs reads
        access.propagate = False
