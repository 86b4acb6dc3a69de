"""Handshake with a server: verification that its rewards are raw and that it tokenizes as the client does.

A server that applies a sigmoid, or renders conversations with another template, answers every request without an error.
A policy trained on such rewards is worthless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rm_optimizer.core.storage.certificate import DEFAULT_PROBE
from rm_optimizer.errors import HandshakeFailed, RewardServerRefused, RewardServerUnavailable
from rm_optimizer.serving.client.connection import CONVERSATION_FORM, TOKEN_FORM, Connection, Deadline, Form, Limits
from rm_optimizer.serving.engine import ScoredBatch
from rm_optimizer.serving.protocol import PROTOCOL_VERSION, InfoResponse, sigmoid

PLAIN_LIMITS = Limits(tokens=65_536, items=64)
"""Limits assumed for servers that announce none."""
TOLERANCE = 1e-3
"""Largest difference of two answers of one server, in units of max(1, |reward|): half types round by batch."""
PAUSE_SECONDS = 0.05
"""Seconds before a probe is repeated."""


@dataclass(frozen=True)
class ServerIdentity:
    """Properties of a server, found by the handshake.

    Args:
        is_rm_opt: True for a server of this package, whose `/rm/info` announces versions and limits.
        model: model name for requests.
        limits: limits of one request.
        template_hash: hash of its rendering; None for a plain vLLM, which receives token ids.
    """

    is_rm_opt: bool
    model: str
    limits: Limits
    template_hash: str | None


async def shake_hands(connection: Connection, deadline: Deadline) -> ServerIdentity:
    """Identify the server, and verify its sigmoid and its rendering.

    Raises:
        HandshakeFailed: if the verification fails.
        RewardServerUnavailable: if the server does not answer in time.
    """
    handshake = _Handshake(connection, deadline)
    try:
        info = (await connection.request("GET", "/rm/info", deadline)).json()
    except RewardServerRefused as error:
        if error.status != 404:
            raise
        return await handshake.with_plain_vllm()
    try:
        return await handshake.with_rm_opt(InfoResponse.model_validate(info))
    except ValidationError as error:
        raise HandshakeFailed(
            f"expected an answer of rm-opt's server from {connection.url}/rm/info, got another form "
            f"({error.errors()[0]['msg']}); check the address"
        ) from error


@dataclass(frozen=True)
class _Handshake:
    """Verification of the server at the other end of a connection, within a deadline."""

    connection: Connection
    deadline: Deadline

    async def with_rm_opt(self, info: InfoResponse) -> ServerIdentity:
        url, renderer = self.connection.url, self.connection.renderer
        if info.protocol != PROTOCOL_VERSION:
            raise HandshakeFailed(
                f"{url} speaks protocol {info.protocol} where {PROTOCOL_VERSION} was expected; use one release of "
                "rm-optimizer on both sides"
            )
        if renderer is not None and renderer.template_hash != info.rendering.template_hash:
            raise HandshakeFailed(
                f"{url} renders conversations by template {info.rendering.template_hash}, this client by "
                f"{renderer.template_hash}: {info.rendering.rendering!r} is not {renderer.probe_rendering!r}; take the "
                "tokenizer of the served checkpoint"
            )
        if renderer is not None and renderer.max_length > info.max_length:
            raise HandshakeFailed(
                f"the renderer keeps {renderer.max_length} tokens, the server at {url} reads {info.max_length}; make "
                "them the same"
            )
        conversations: list[Any] = list(DEFAULT_PROBE[:2])
        raw = await self._verify_sigmoid(CONVERSATION_FORM, conversations, info.model, may_be_identity=False)
        if renderer is not None:
            ask, rows = self.connection.ask, renderer.ids_of(conversations)
            while (ours := await ask(TOKEN_FORM, rows, info.model, self.deadline)).weights != raw.weights:
                await self._other_weights()
                raw = await ask(CONVERSATION_FORM, conversations, info.model, self.deadline)
            if not _close(ours.rewards, raw.rewards):
                raise HandshakeFailed(
                    f"expected the rewards {raw.rewards} of {url} for conversations, got {ours.rewards} for this "
                    "client's tokens of them; take the tokenizer of the served checkpoint"
                )
        limits = Limits(info.max_request_tokens, info.max_request_items)
        return ServerIdentity(True, info.model, limits, info.rendering.template_hash)

    async def with_plain_vllm(self) -> ServerIdentity:
        """Identity of a vLLM without the plugin: it receives token ids, and must tokenize as this client does."""
        url, renderer = self.connection.url, self.connection.renderer
        if renderer is None:
            raise HandshakeFailed(f"{url} has no /rm/score; pass the served model's renderer, or serve with rm-opt")
        try:
            models = await self.connection.request("GET", "/v1/models", self.deadline)
            model, text = str(models.json()["data"][0]["id"]), renderer.text(*DEFAULT_PROBE[4])
            asked = {"model": model, "prompt": text, "add_special_tokens": False}
            tokens = (await self.connection.request("POST", "/tokenize", self.deadline, json=asked)).json()["tokens"]
        except (RewardServerRefused, ValueError, KeyError, IndexError, TypeError) as error:
            raise HandshakeFailed(f"{url} is a server of neither rm-opt nor vLLM: {error}") from error
        own = renderer.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if list(tokens) != list(own):
            raise HandshakeFailed(f"{url} tokenizes unlike this client; take the tokenizer of the served model")
        await self._verify_sigmoid(TOKEN_FORM, renderer.ids_of(DEFAULT_PROBE), model, may_be_identity=True)
        return ServerIdentity(False, model, PLAIN_LIMITS, None)

    async def _verify_sigmoid(
        self, form: Form, rows: Sequence[Any], model: str, *, may_be_identity: bool
    ) -> ScoredBatch:
        """Verify that `use_activation` gives the raw reward's sigmoid; a vLLM for regression may give the raw one."""
        ask = self.connection.ask
        while True:
            raw = await ask(form, rows, model, self.deadline)
            squashed = await ask(form, rows, model, self.deadline, use_activation=True)
            if squashed.weights == raw.weights:
                break
            await self._other_weights()
        is_sigmoid = _close(squashed.rewards, tuple(map(sigmoid, raw.rewards)))
        if not (is_sigmoid or (may_be_identity and _close(squashed.rewards, raw.rewards))):
            raise HandshakeFailed(
                f"expected the sigmoid of the raw rewards {raw.rewards} from {self.connection.url} with "
                f"use_activation=true, got {squashed.rewards}; serve the model with rm-opt"
            )
        if may_be_identity and all(0.0 < reward < 1.0 for reward in raw.rewards):
            raise HandshakeFailed(
                f"expected raw rewards from {self.connection.url} with use_activation=false, got numbers between 0 and "
                f"1 for {len(raw.rewards)} different conversations; it seems to ignore the field, so serve the model "
                "with rm-opt"
            )
        return raw

    async def _other_weights(self) -> None:
        """Wait a moment before a probe is repeated, because the weights changed between its two requests."""
        if self.deadline.left <= PAUSE_SECONDS:
            raise RewardServerUnavailable(
                f"the weights of {self.connection.url} changed between the two requests of every probe for "
                f"{self.deadline.seconds:g} s; connect while they are updated less often"
            )
        await asyncio.sleep(PAUSE_SECONDS)


def _close(first: Sequence[float], second: Sequence[float]) -> bool:
    return all(abs(a - b) <= TOLERANCE * max(1.0, abs(b)) for a, b in zip(first, second, strict=True))
