"""A reward server as an asynchronous scorer: retried, split, bounded, in order, and of one version a call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx
import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.pairs.pair import Prompt
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.serving.client.connection import Connection
from rm_optimizer.serving.client.handshake import ServerIdentity, shake_hands
from rm_optimizer.serving.client.requests import ConversationForm, Form, TokenForm, pieces
from rm_optimizer.serving.client.retries import Deadline, WrongVersion
from rm_optimizer.serving.engine import ScoredBatch


@dataclass(frozen=True)
class ClientArguments:
    """What a client is made of, by which a copy in another process is made.

    Args:
        url: of the server.
        renderer: of the model that is served.
        api_key: sent as a bearer token.
        timeout_seconds: of a whole call.
        concurrency: requests open at once.
        transport: replaces the network.
    """

    url: str
    renderer: ConversationRenderer | None
    api_key: str | None
    timeout_seconds: float
    concurrency: int
    transport: httpx.AsyncBaseTransport | None


def _remade(kind: type[Any], arguments: ClientArguments) -> Any:
    """The client of these arguments, in the process that unpickles it."""
    return kind(**vars(arguments))


class AsyncRewardClient:
    """Scores through a server: ours, with any engine, or a plain vLLM.

    Conversations are rendered and tokenized here where a renderer is at hand, else by the server. Every reward is raw.
    On connecting, the server's sigmoid and rendering are put to the proof; see `handshake`.

    Args:
        url: of the server, `http://host:port`.
        renderer: of the model that is served; a plain vLLM needs one.
        api_key: sent as a bearer token.
        timeout_seconds: of a whole call, retries included.
        concurrency: requests open at once.
        transport: replaces the network, in tests say.
    """

    def __init__(
        self,
        url: str,
        *,
        renderer: ConversationRenderer | None = None,
        api_key: str | None = None,
        timeout_seconds: float = 60.0,
        concurrency: int = 8,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._arguments = ClientArguments(url, renderer, api_key, timeout_seconds, concurrency, transport)
        self._connection = Connection(url, api_key=api_key, concurrency=concurrency, transport=transport)
        self.url = self._connection.url
        self.renderer = renderer
        self.timeout_seconds = timeout_seconds
        self._form: Form = TokenForm() if renderer is not None else ConversationForm()
        self._identity: ServerIdentity | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments; the copy connects by itself."""
        return _remade, (type(self), self._arguments)

    async def __aenter__(self) -> AsyncRewardClient:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the session; a later call opens another."""
        await self._connection.close()

    async def connect(self) -> ServerIdentity:
        """Verify the server, once; every other call does it first.

        Raises:
            HandshakeFailed: if its rewards are not raw, or it reads conversations otherwise.
            RewardServerUnavailable: if it does not answer in time.
        """
        async with self._connection.opening():
            if self._identity is None:
                deadline = Deadline(self.url, self.timeout_seconds)
                self._identity = await shake_hands(self._connection, self.renderer, deadline)
            return self._identity

    async def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Float[Tensor, " sequences"]:
        """Rewards of the responses, float32 on the CPU, in the order given, all of one version of the weights.

        Args:
            prompts: text or messages.
            responses: one for each prompt.

        Raises:
            ValueError: if there are not as many prompts as responses.
            RewardServerUnavailable: if the server does not answer in time.
            RewardServerRefused: if it refuses the request.
        """
        return torch.tensor((await self.score_versioned(prompts, responses)).rewards, dtype=torch.float32)

    async def score_pair(self, prompt: Prompt, response_a: str, response_b: str) -> float:
        """Margin: reward of `response_a` less that of `response_b`."""
        first, second = (await self.score_versioned([prompt, prompt], [response_a, response_b])).rewards
        return first - second

    async def score_versioned(
        self, prompts: Sequence[Prompt], responses: Sequence[str], *, expect_version: str | None = None
    ) -> ScoredBatch:
        """Rewards as `score` gives them, and the version of the weights that computed every one of them.

        A call that needs several requests asks those again that were answered before new weights came.

        Args:
            prompts: text or messages.
            responses: one for each prompt.
            expect_version: the weights that must answer; None takes any.

        Raises:
            WrongVersion: if other weights answered, as those of a server that was started again.
        """
        scored = await self._score(prompts, responses)
        if expect_version not in (None, scored.version):
            raise WrongVersion(f"expected rewards of weights {expect_version} from {self.url}, got {scored.version}")
        return scored

    async def _score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> ScoredBatch:
        if len(prompts) != len(responses):
            raise ValueError(
                f"expected one response for each prompt, got {len(prompts)} prompts and {len(responses)} responses"
            )
        identity = await self.connect()
        deadline = Deadline(self.url, self.timeout_seconds)
        rows: list[Any] = list(zip(prompts, responses, strict=True))
        if self.renderer is not None:
            rows = [encoding.ids for encoding in self.renderer.encode_batch(prompts, responses)]
        parts = list(pieces(rows, self._form.size, identity.limits))
        answers: dict[int, ScoredBatch] = {}
        while outdated := [i for i in range(len(parts)) if i not in answers]:
            asked = [[rows[k] for k in parts[i]] for i in outdated]
            answers |= dict(zip(outdated, await self._ask_all(asked, identity.model, deadline), strict=True))
            newest = answers[outdated[-1]].weights
            answers = {i: answer for i, answer in answers.items() if answer.weights == newest}
        rewards = tuple(reward for i in range(len(parts)) for reward in answers[i].rewards)
        if not answers:
            return ScoredBatch(rewards, await self.version(), None)
        return ScoredBatch(rewards, *answers[0].weights)

    async def version(self) -> str:
        """Version of the weights that answer now; a plain vLLM has no other than its model's name."""
        identity = await self.connect()
        if not identity.is_ours:
            return identity.model
        answer = await self._connection.request("GET", "/rm/version", Deadline(self.url, self.timeout_seconds))
        return str(answer.json()["version"])

    async def _ask_all(self, asked: list[list[Any]], model: str, deadline: Deadline) -> list[ScoredBatch]:
        """All requests at once, as far as there are slots; the first failure ends the others."""
        tasks = [asyncio.ensure_future(self._connection.ask(self._form, rows, model, deadline)) for rows in asked]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
