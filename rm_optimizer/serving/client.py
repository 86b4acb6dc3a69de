"""A reward server as a scorer: what takes a local model takes this in its place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.base import Prompt
from rm_optimizer.core.chat import ConversationRenderer
from rm_optimizer.serving.async_client import AsyncRewardClient
from rm_optimizer.serving.engine import ScoredBatch

T = TypeVar("T")


class RewardClient:
    """`AsyncRewardClient` for callers without an event loop; threads may share one.

    Connects when it is made, and verifies the server's sigmoid and rendering then.

    Args:
        url: of the server, `http://host:port`.
        renderer: of the model that is served; None lets the server render.
        api_key: sent as a bearer token.
        timeout_seconds: of a whole call, retries included.
        concurrency: requests open at once.
        transport: replaces the network, in tests say.

    Raises:
        HandshakeFailed: if the server's rewards are not raw, or it reads conversations otherwise.
        RewardServerUnavailable: if it does not answer in time.
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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rm-client", daemon=True)
        self._thread.start()
        self._client = AsyncRewardClient(
            url,
            renderer=renderer,
            api_key=api_key,
            timeout_seconds=timeout_seconds,
            concurrency=concurrency,
            transport=transport,
        )
        try:
            self._run(self._client.connect())
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> str:
        """Of the weights that answer now, asked of the server."""
        return self._run(self._client.version())

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Float[Tensor, " sequences"]:
        """Rewards of the responses, float32 on the CPU, in the order given, all of one version of the weights.

        Args:
            prompts: text or messages.
            responses: one for each prompt.

        Raises:
            ValueError: if there are not as many prompts as responses.
            RewardServerUnavailable: if the server does not answer in time.
            RewardServerRefused: if it refuses the request.
        """
        return self._run(self._client.score(prompts, responses))

    def score_pair(self, prompt: Prompt, response_a: str, response_b: str) -> float:
        """Margin: reward of `response_a` less that of `response_b`."""
        return self._run(self._client.score_pair(prompt, response_a, response_b))

    def score_versioned(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> ScoredBatch:
        """Rewards as `score` gives them, and the version of the weights that computed every one of them."""
        return self._run(self._client.score_versioned(prompts, responses))

    def close(self) -> None:
        """Close the session; a second call does nothing."""
        if not self._loop.is_closed():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
