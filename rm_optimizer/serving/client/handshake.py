"""Handshake with a server: verification that its rewards are raw and that it tokenizes conversations as the client.

A server that applies a sigmoid, or renders conversations with another template, answers every request without an error.
A policy trained on such rewards is worthless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rm_optimizer.core.storage.certificate import DEFAULT_PROBE
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.errors import HandshakeFailed, RewardServerRefused
from rm_optimizer.serving.client.connection import Connection
from rm_optimizer.serving.client.requests import ConversationForm, Form, Limits, TokenForm
from rm_optimizer.serving.client.retries import Deadline
from rm_optimizer.serving.engine import ScoredBatch
from rm_optimizer.serving.protocol import PROTOCOL_VERSION, InfoResponse, sigmoid

PLAIN_LIMITS = Limits(tokens=65_536, items=64)
"""Limits assumed for servers that announce none."""
TOLERANCE = 1e-3
"""Largest difference of two answers of one server, in units of max(1, |reward|): half types round by batch."""
ROUNDS = 5
"""Most repetitions of a probe after a weight update between its two requests."""


@dataclass(frozen=True)
class ServerIdentity:
    """Properties of a server, found by the handshake.

    Args:
        is_ours: True for a server with `/rm/info`, which announces versions and limits.
        model: model name for requests.
        limits: limits of one request.
        template_hash: hash of its rendering; None for a plain vLLM, which receives token ids.
    """

    is_ours: bool
    model: str
    limits: Limits
    template_hash: str | None


async def shake_hands(
    connection: Connection, renderer: ConversationRenderer | None, deadline: Deadline
) -> ServerIdentity:
    """Identify the server, and verify its sigmoid and its rendering.

    Raises:
        HandshakeFailed: if the verification fails.
        RewardServerUnavailable: if the server does not answer in time.
    """
    try:
        info = (await connection.request("GET", "/rm/info", deadline)).json()
    except RewardServerRefused as error:
        if error.status != 404:
            raise
        return await _plain_server(connection, renderer, deadline)
    try:
        return await _our_server(connection, renderer, InfoResponse.model_validate(info), deadline)
    except ValidationError as error:
        raise HandshakeFailed(
            f"{connection.url}/rm/info has not the form of one: {error.errors()[0]['msg']}"
        ) from error


async def _our_server(
    connection: Connection, renderer: ConversationRenderer | None, info: InfoResponse, deadline: Deadline
) -> ServerIdentity:
    if info.protocol != PROTOCOL_VERSION:
        raise HandshakeFailed(
            f"{connection.url} speaks protocol {info.protocol} where {PROTOCOL_VERSION} was expected; "
            "use one release of rm-optimizer on both sides"
        )
    identity = ServerIdentity(
        True, info.model, Limits(info.max_request_tokens, info.max_request_items), info.rendering.template_hash
    )
    conversations: list[Any] = list(DEFAULT_PROBE[:2])
    if renderer is not None:
        _require_rendering(connection.url, renderer, info)
    raw = await _verify_sigmoid(
        connection, ConversationForm(), conversations, info.model, deadline, may_be_identity=False
    )
    if renderer is not None:
        await _verify_tokens(connection, renderer, conversations, raw, info.model, deadline)
    return identity


def _require_rendering(url: str, renderer: ConversationRenderer, info: InfoResponse) -> None:
    if renderer.template_hash != info.rendering.template_hash:
        raise HandshakeFailed(
            f"{url} renders conversations by template {info.rendering.template_hash}, this client by "
            f"{renderer.template_hash}: {info.rendering.rendering!r} is not {renderer.probe_rendering!r}; "
            "take the tokenizer of the served checkpoint"
        )
    if renderer.max_length > info.max_length:
        raise HandshakeFailed(
            f"the renderer keeps {renderer.max_length} tokens, the server at {url} reads {info.max_length}; "
            "make them the same"
        )


async def _verify_tokens(
    connection: Connection,
    renderer: ConversationRenderer,
    conversations: Sequence[Any],
    raw: ScoredBatch,
    model: str,
    deadline: Deadline,
) -> None:
    """Verify that the client's token ids score as the server's own of the same conversations."""
    rows = _token_rows(renderer, conversations)
    for _ in range(ROUNDS):
        ours = await connection.ask(TokenForm(), rows, model, deadline)
        if ours.weights == raw.weights:
            break
        raw = await connection.ask(ConversationForm(), conversations, model, deadline)
    if not _close(ours.rewards, raw.rewards):
        raise HandshakeFailed(
            f"{connection.url} scores conversations as {raw.rewards}, but this client's tokens of them as "
            f"{ours.rewards}; take the tokenizer of the served checkpoint"
        )


async def _plain_server(
    connection: Connection, renderer: ConversationRenderer | None, deadline: Deadline
) -> ServerIdentity:
    """Identity of a vLLM without the plugin: it receives token ids, and must tokenize as this client does."""
    if renderer is None:
        raise HandshakeFailed(
            f"{connection.url} has no /rm/score; pass the served model's renderer, or serve with rm-opt"
        )
    try:
        model = str((await connection.request("GET", "/v1/models", deadline)).json()["data"][0]["id"])
        text = renderer.text(*DEFAULT_PROBE[4])
        asked = {"model": model, "prompt": text, "add_special_tokens": False}
        tokens = (await connection.request("POST", "/tokenize", deadline, json=asked)).json()["tokens"]
    except (RewardServerRefused, ValueError, KeyError, IndexError, TypeError) as error:
        raise HandshakeFailed(f"{connection.url} is neither our server nor vLLM's: {error}") from error
    own = renderer.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if list(tokens) != list(own):
        raise HandshakeFailed(
            f"{connection.url} tokenizes other than this client; take the tokenizer of the served model"
        )
    rows = _token_rows(renderer, DEFAULT_PROBE)
    await _verify_sigmoid(connection, TokenForm(), rows, model, deadline, may_be_identity=True)
    return ServerIdentity(False, model, PLAIN_LIMITS, None)


async def _verify_sigmoid(
    connection: Connection, form: Form, rows: Sequence[Any], model: str, deadline: Deadline, *, may_be_identity: bool
) -> ScoredBatch:
    """Verify that `use_activation` returns the sigmoid of the raw reward, or the raw reward (a vLLM for regression)."""
    for _ in range(ROUNDS):
        raw = await connection.ask(form, rows, model, deadline, use_activation=False)
        squashed = await connection.ask(form, rows, model, deadline, use_activation=True)
        if raw.weights == squashed.weights:
            break
    is_sigmoid = _close(squashed.rewards, tuple(map(sigmoid, raw.rewards)))
    if not (is_sigmoid or (may_be_identity and _close(squashed.rewards, raw.rewards))):
        raise HandshakeFailed(
            f"{connection.url} answers {squashed.rewards} with use_activation=true where one sigmoid of its raw "
            f"rewards {raw.rewards} was expected; it squashes twice, or not as it says"
        )
    if may_be_identity and all(0.0 < reward < 1.0 for reward in raw.rewards):
        raise HandshakeFailed(
            f"{connection.url} answers {len(raw.rewards)} unlike conversations with numbers between 0 and 1 "
            "(use_activation=false), as a server does that ignores the field; serve the model with rm-opt"
        )
    return raw


def _token_rows(renderer: ConversationRenderer, conversations: Sequence[Any]) -> list[tuple[int, ...]]:
    prompts, responses = zip(*conversations, strict=True)
    return [encoding.ids for encoding in renderer.encode_batch(prompts, responses)]


def _close(first: Sequence[float], second: Sequence[float]) -> bool:
    return all(abs(a - b) <= TOLERANCE * max(1.0, abs(b)) for a, b in zip(first, second, strict=True))
