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
from rm_optimizer.serving.service.api_errors import InvalidRequest, NotReady, error_responses
from rm_optimizer.serving.service.inputs import TokenSequence, num_characters, refuse_cuts
from rm_optimizer.serving.service.service import RewardService


class JsonRoute(APIRoute):
    """Route whose JSON bodies have each key once; Python's parser would keep the last of two values."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Handler that reads such bodies."""
        handle = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return read_strictly


class _JsonRequest(Request):
    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=_distinct)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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


def _service(request: Request) -> RewardService:
    service: RewardService = request.app.state.service
    return service


Service = Annotated[RewardService, Depends(_service)]


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work, cancelling it as soon as the client disconnects.

    Raises:
        ClientLeft: if the client disconnects.
    """

    async def disconnection() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnection())
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
    service.check_model(body.model)
    reader, value = service.reader, body.input
    if (messages := body.messages) is not None:
        sequences = await service.read(num_characters(messages), lambda: reader.conversation(messages))
    elif isinstance(value, str) or (value and isinstance(value[0], str)):
        texts: Any = value
        size = len(texts) if isinstance(texts, str) else sum(map(len, texts))
        read = partial(reader.texts, texts, add_special_tokens=body.add_special_tokens)
        sequences = await service.read(size, read)
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
    service.check_model(body.model)
    reader = service.reader
    size = sum(num_characters(item.prompt) + sum(map(len, item.responses)) for item in body.items)
    sequences = await service.read(size, lambda: reader.items(body.items))
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
    reader = service.reader
    if not body.query:
        return OpenRLHFResponse(rewards=[], scores=[], extra_logs={"rm_reward": [], "truncated": []})
    size = sum(map(len, body.query))
    encodings = await service.read(size, lambda: reader.rendered(body.query, body.prompts))
    rewards = list((await _scored(service, request, [encoding.ids for encoding in encodings], response)).rewards)
    truncated = [float(encoding.prompt_cut > 0) for encoding in encodings]
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
