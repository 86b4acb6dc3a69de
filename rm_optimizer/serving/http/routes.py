"""Routes of scoring, health and information."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute

import rm_optimizer
from rm_optimizer.serving.engine import ScoredBatch
from rm_optimizer.serving.protocol import (
    MAX_ITEMS,
    REVISION_HEADER,
    VERSION_HEADER,
    ClassifyDatum,
    ClassifyRequest,
    ClassifyResponse,
    InfoResponse,
    ModelCard,
    ModelList,
    OpenRLHFRequest,
    OpenRLHFResponse,
    RenderingInfo,
    ScoringRequest,
    ScoringResponse,
    Usage,
    VersionResponse,
    sigmoid,
)
from rm_optimizer.serving.service.api_errors import InvalidRequest, NotReady, TooLarge, error_responses
from rm_optimizer.serving.service.inputs import TokenSequence, refuse_cuts
from rm_optimizer.serving.service.service import RewardService

MAX_CONTAINERS = 2**16
"""JSON lists and objects in one body; each costs Python's parser as much as a hundred numbers."""
MAX_STRINGS = 2**19
"""JSON strings in one body, more than any request of `MAX_CONTAINERS` objects needs."""
MAX_VALUES = 2**20
"""Commas outside of strings in one body."""
MAX_KEYS = 2**18
"""Colons outside of strings in one body."""


class JsonRoute(APIRoute):
    """Route whose JSON bodies are not too complex to parse and have each key once."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Handler that reads such bodies."""
        handle = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return read_strictly


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if refusal := too_complex(body):
            raise refusal
        return json.loads(body, object_pairs_hook=_distinct)


def too_complex(body: bytes) -> TooLarge | None:
    """Refuse a body that would take long to parse; only the structure outside of strings counts.

    The parser holds the interpreter's lock, so another thread would not keep the event loop free. Every count is one
    pass in C. JSON has a backslash only inside of strings, and the parser stops at another one.
    """
    if not _excess(body):
        return None
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 2 * MAX_STRINGS:
        return TooLarge(f"expected at most {MAX_STRINGS} strings in a body; split the request")
    excess = _excess(b"".join(plain.split(b'"')[::2]))
    return TooLarge(f"expected at most {excess} in a body; split the request") if excess else None


def _excess(body: bytes) -> str:
    """Limit that the structure of a body without strings exceeds, in words; empty if none."""
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        return f"{MAX_CONTAINERS} lists and objects"
    if body.count(b":") > MAX_KEYS:
        return f"{MAX_KEYS} keys"
    return f"{MAX_VALUES} values" if body.count(b",") > MAX_VALUES else ""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Object of these entries; Python's parser would keep the last of two values of a key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, count), *_ = Counter(key for key, _ in pairs).most_common(1)
        name = key[:64].encode("utf-8", "replace").decode()
        raise InvalidRequest(f"expected each key of an object once, got {name!r} {count} times", name)
    return found


router = APIRouter(route_class=JsonRoute)
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


def _numbers(rewards: Sequence[float], use_activation: bool | None) -> list[float]:
    """Rewards, or the sigmoid of each if the request asks for it."""
    return [sigmoid(reward) for reward in rewards] if use_activation else list(rewards)


def _usage(sequences: Sequence[TokenSequence]) -> Usage:
    tokens = sum(map(len, sequences))
    return Usage(prompt_tokens=tokens, total_tokens=tokens)


async def _scored(
    service: RewardService, request: Request, sequences: list[TokenSequence], out: Response
) -> ScoredBatch:
    scored = await while_connected(request, service.score(sequences))
    out.headers[VERSION_HEADER] = scored.version
    out.headers[REVISION_HEADER] = str(scored.revision)
    return scored


@router.post("/classify", responses=_SCORING)
async def classify(body: ClassifyRequest, request: Request, response: Response, service: Service) -> ClassifyResponse:
    """Rewards of texts, token ids or one conversation, in vLLM's form."""
    reader, value = service.reader(body.model), body.input
    if body.messages is not None:
        sequences = await service.read(reader.conversation, body.messages)
    elif isinstance(value, str) or (value and isinstance(value[0], str)):
        texts: Any = value
        sequences = await service.read(partial(reader.texts, add_special_tokens=body.add_special_tokens), texts)
    else:  # only text waits for a tokenizer
        ids: Any = value
        sequences = reader.token_ids(ids)
    refuse_cuts(sequences, body.truncate_prompt_tokens)
    scored = await _scored(service, request, sequences, response)
    numbers = _numbers(scored.rewards, body.use_activation)
    return ClassifyResponse(
        id=f"classify-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=service.model_name,
        data=[ClassifyDatum(index=index, probs=[number]) for index, number in enumerate(numbers)],
        usage=_usage(sequences),
        rm_version=scored.version,
        rm_revision=scored.revision,
    )


@router.post("/rm/score", responses=_SCORING)
async def score(body: ScoringRequest, request: Request, response: Response, service: Service) -> ScoringResponse:
    """Rewards of responses to prompts, rendered as in training."""
    sequences = await service.read(service.reader(body.model).items, body.items)
    scored = await _scored(service, request, sequences, response)
    numbers = iter(_numbers(scored.rewards, body.use_activation))
    return ScoringResponse(
        model=service.model_name,
        rewards=[[next(numbers) for _ in item.responses] for item in body.items],
        usage=_usage(sequences),
        rm_version=scored.version,
        rm_revision=scored.revision,
    )


@router.post("/get_reward", responses=_SCORING)
async def get_reward(body: OpenRLHFRequest, request: Request, response: Response, service: Service) -> OpenRLHFResponse:
    """Rewards in OpenRLHF's form (`--remote_rm_url http://host:port/get_reward`).

    Texts that are too long lose tokens from their left, as in training; `extra_logs.truncated` marks them with 1.0.
    """
    reader = service.reader()
    if not body.query:
        return OpenRLHFResponse(rewards=[], scores=[], extra_logs={"rm_reward": [], "truncated": []})
    encodings = await service.read(partial(reader.rendered, prompts=body.prompts), body.query)
    rewards = list((await _scored(service, request, [encoding.ids for encoding in encodings], response)).rewards)
    truncated = [float(encoding.prompt_cut > 0) for encoding in encodings]
    if any(truncated):
        service.count("truncated", int(sum(truncated)))
    return OpenRLHFResponse(rewards=rewards, scores=rewards, extra_logs={"rm_reward": rewards, "truncated": truncated})


@router.get("/ping", responses=_READING)
@router.get("/health", responses=_READING)
async def health(service: Service) -> dict[str, str]:
    """200 while the server runs, also while it loads; `/ready` reports if it can answer."""
    engine = service.engine
    return {"status": "alive", "version": engine.version, "revision": str(engine.revision)}


@router.get("/ready", responses=_READING)
async def ready(service: Service) -> dict[str, str]:
    """200 once the weights are loaded and the parity probe has passed."""
    if service.obstacle is not None:
        raise NotReady(service.obstacle)
    return {"status": "ready", "version": service.engine.version, "revision": str(service.engine.revision)}


@router.get("/version", responses=_READING)
@router.get("/rm/version", responses=_READING)
async def version(response: Response, service: Service) -> VersionResponse:
    """The weights that answer now."""
    service.require_loaded()
    engine = service.engine
    answer = VersionResponse(
        version=engine.version,
        revision=engine.revision,
        engine=engine.description.engine,
        package=rm_optimizer.__version__,
    )
    response.headers[VERSION_HEADER] = answer.version
    response.headers[REVISION_HEADER] = str(answer.revision)
    return answer


@router.get("/v1/models", responses=_READING)
async def models(service: Service) -> ModelList:
    """The served model in OpenAI's form."""
    card = ModelCard(id=service.model_name, created=service.created, max_model_len=service.require_loaded().max_length)
    return ModelList(data=[card])


@router.get("/rm/info", responses=_READING)
async def info(service: Service) -> InfoResponse:
    """Properties of the server that a client verifies."""
    reader, engine, description = service.require_loaded(), service.engine, service.engine.description
    identity = reader.renderer.identity()
    return InfoResponse(
        engine=description.engine,
        model=service.model_name,
        version=engine.version,
        revision=engine.revision,
        architecture=description.architecture,
        dtype=description.dtype,
        rendering=RenderingInfo(**{key: identity[key] for key in RenderingInfo.model_fields}),
        max_length=description.max_length,
        vocab_size=description.vocab_size,
        pad_token_id=description.pad_token_id,
        eos_token_id=reader.tokenizer.eos_token_id,
        token_budget=description.token_budget,
        max_request_tokens=service.batcher.max_queued_tokens,
        max_request_items=MAX_ITEMS,
        shares_prompts=description.shares_prompts,
        parity=None if service.parity is None else service.parity.entries(),
        reward_statistics=description.export.get("reward_statistics"),
    )


@router.get("/metrics", responses=_READING, response_class=PlainTextResponse)
async def metrics(service: Service) -> Response:
    """Counts for Prometheus."""
    return Response(service.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")
