"""HTTP application around a `RewardService`: routes of scoring, information and weight updates, and their page."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from html import escape
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Path, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from fastapi.security import HTTPBearer

import rm_optimizer
from rm_optimizer.serving import protocol, update_protocol
from rm_optimizer.serving.http import gate
from rm_optimizer.serving.options import ServeOptions
from rm_optimizer.serving.service.api_errors import NotReady, error_responses, install_error_answers
from rm_optimizer.serving.service.inputs import TokenSequence, refuse_cuts
from rm_optimizer.serving.service.service import RewardService
from rm_optimizer.serving.weights.receiver import WeightReceiver

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


def _name_weights(out: Response, version: str, revision: int | None) -> None:
    """Name the weights of an answer in its headers."""
    out.headers[protocol.VERSION_HEADER], out.headers[protocol.REVISION_HEADER] = version, str(revision)


async def _scored(
    service: RewardService,
    request: Request,
    sequences: list[TokenSequence],
    out: Response,
    use_activation: bool | None = None,
) -> tuple[list[float], dict[str, Any]]:
    """Rewards, or the sigmoid of each, and the fields that answers share; the headers name the weights too."""
    scored = await while_connected(request, service.score(sequences))
    _name_weights(out, scored.version, scored.revision)
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
    _name_weights(response, answer.version, answer.revision)
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
    identity, fields = reader.renderer.identity(), protocol.InfoResponse.model_fields
    described = {name: value for name, value in vars(description).items() if name in fields}
    return protocol.InfoResponse(
        **described | {"version": engine.version},
        revision=engine.revision,
        model=service.model_name,
        rendering=protocol.RenderingInfo(**{key: identity[key] for key in protocol.RenderingInfo.model_fields}),
        eos_token_id=reader.renderer.tokenizer.eos_token_id,
        max_request_tokens=service.batcher.max_queued_tokens,
        max_request_items=protocol.MAX_ITEMS,
        parity=None if service.parity is None else service.parity.entries(),
        reward_statistics=description.export.get("reward_statistics"),
    )


@router.get("/metrics", responses=_READING, tags=["operation"], response_class=PlainTextResponse)
async def metrics(service: Service) -> Response:
    """Counts for Prometheus."""
    return Response(service.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")


_UPDATING = error_responses(400, 401, 404, 408, 409, 503)
_BINARY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def weight_router(receiver: WeightReceiver) -> APIRouter:
    """Router of `/rm/weights`; the application authenticates.

    Args:
        receiver: receiver of the updates, to close when the application ends.
    """
    router = APIRouter(prefix="/rm/weights", tags=["weight updates"], route_class=gate.JsonRoute)

    @router.post("/begin", responses=_UPDATING)
    async def begin(body: update_protocol.Begin) -> update_protocol.Ready:
        """Announce an update; the answer confirms that its receiving end is ready."""
        return await receiver.begin(body)

    @router.put("/upload/{batch_id}", responses=_UPDATING, openapi_extra=_BINARY)
    async def upload(batch_id: Annotated[str, Path(max_length=128)], request: Request) -> update_protocol.Received:
        """The safetensors body of an inline update."""
        return await receiver.upload(batch_id, request.stream())

    @router.post("/commit", responses={**_UPDATING, 400: {"model": update_protocol.Outcome}})
    async def commit(body: update_protocol.Commit, response: Response) -> update_protocol.Outcome:
        """Check the tensors, then swap; 400 with the reason if the old weights stay."""
        outcome = await receiver.commit(body)
        _name_weights(response, outcome.version, outcome.revision)
        if outcome.status not in (update_protocol.OutcomeStatus.prepared, update_protocol.OutcomeStatus.committed):
            response.status_code = 409 if outcome.error is None else outcome.error.code
        return outcome

    @router.post("/abort", responses=_UPDATING)
    async def abort(body: update_protocol.Abort) -> update_protocol.Outcome:
        """Abort an update."""
        return await receiver.abort(body)

    @router.get("/status", responses=error_responses(401, 503))
    async def status(batch_id: str | None = None) -> update_protocol.WeightStatus:
        """Served weights, update in progress and outcome of an update."""
        return receiver.status(batch_id)

    return router


_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}pre{background:#f4f4f4;padding:.8em;"
    "overflow:auto}code{font-size:.95em}h3{border-top:1px solid #ddd;padding-top:.8em}"
)


def api_page(document: Mapping[str, Any]) -> str:
    """Page in HTML with the operations of an OpenAPI document by their tags, an example of each and all schemas.

    It needs no script and no internet.
    """
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            shown = "".join(_operation(f"{method.upper()} {path}", operation, document))
            by_tag.setdefault((operation.get("tags") or ["other"])[0], []).append(shown)
    parts = [f"<h2>{escape(tag)}</h2>{''.join(shown)}" for tag, shown in by_tag.items()]
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    schemas = escape(json.dumps(document.get("components", {}).get("schemas", {}), indent=2, ensure_ascii=False))
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'</head><body><h1>{title}</h1><p>The same as <a href="/openapi.json">/openapi.json</a>, which tools read.</p>'
        f"{''.join(parts)}<h2>schemas</h2><details><summary>All types in JSON Schema</summary><pre>{schemas}</pre>"
        "</details></body></html>"
    )


def _operation(name: str, operation: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    """Parts of the page about an operation: its description, its request with an example, and its answers."""
    yield f"<h3><code>{escape(name)}</code></h3><p>{escape(operation.get('description', ''))}</p>"
    content = operation.get("requestBody", {}).get("content", {})
    kind = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
    if kind:
        schema = document["components"]["schemas"][kind]
        yield f"<p>Body: <code>{escape(kind)}</code>. {escape(schema.get('description', ''))}</p>"
        for example in schema.get("examples", ()):
            yield f"<pre>{escape(json.dumps(example, indent=2, ensure_ascii=False))}</pre>"
    yield f"<p>Answers: {escape(', '.join(operation.get('responses', {})))}</p>"


CLIENT_CLOSED = 499
"""nginx's status for a client that disconnected; only the metrics use it."""


def create_app(service: RewardService, options: ServeOptions, receiver: WeightReceiver | None = None) -> FastAPI:
    """Create the application. Its caller starts the service, and the application's shutdown stops it.

    Args:
        service: the served model, available as `app.state.service`.
        options: options of the server.
        receiver: receiver of weight updates, which the caller closes; None offers no updates.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.stop()

    documented = [] if options.api_key is None else [Depends(HTTPBearer(scheme_name="key", auto_error=False))]
    app = FastAPI(
        title="RM-Optimizer reward server",
        version=rm_optimizer.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        dependencies=documented,
    )
    app.state.service = service

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(api_page(app.openapi()))

    app.include_router(router)
    if receiver is not None:
        app.include_router(weight_router(receiver))
    install_error_answers(app)

    @app.exception_handler(ClientLeft)
    async def client_left(request: Request, error: ClientLeft) -> Response:
        service.metrics.disconnected.inc()
        return Response(status_code=CLIENT_CLOSED)

    app.add_middleware(gate.Gate, metrics=service.metrics, options=options)
    return app
