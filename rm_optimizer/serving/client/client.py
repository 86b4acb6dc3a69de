"""A reward server as a scorer: what takes a local model takes this in its place."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.pairs.pair import Prompt
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.serving.client.async_client import AsyncRewardClient, ClientArguments
from rm_optimizer.serving.client.retries import RewardServerUnavailable
from rm_optimizer.serving.engine import ScoredBatch

SLACK_SECONDS = 10.0
"""Time past its own that a call is waited for."""
CALLS = 2
"""Calls with a time of their own that one call makes at most: the handshake, and what was asked."""
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
        self._arguments = ClientArguments(url, renderer, api_key, timeout_seconds, concurrency, transport)
        self._lock = threading.Lock()
        self._threads: list[_LoopThread] = []
        try:
            self._run(lambda client: client.connect())
        except BaseException:
            self.close()
            raise

    def __getstate__(self) -> ClientArguments:
        """Pickle the arguments; the copy connects when it is first used."""
        return self._arguments

    def __setstate__(self, arguments: ClientArguments) -> None:
        """Take the arguments of another process' client."""
        self._arguments, self._lock, self._threads = arguments, threading.Lock(), []

    @property
    def version(self) -> str:
        """Of the weights that answer now, asked of the server."""
        return self._run(lambda client: client.version())

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
        return self._run(lambda client: client.score(prompts, responses))

    def score_pair(self, prompt: Prompt, response_a: str, response_b: str) -> float:
        """Margin: reward of `response_a` less that of `response_b`."""
        return self._run(lambda client: client.score_pair(prompt, response_a, response_b))

    def score_versioned(
        self, prompts: Sequence[Prompt], responses: Sequence[str], *, expect_version: str | None = None
    ) -> ScoredBatch:
        """Rewards as `score` gives them, and the version of the weights that computed every one of them.

        Args:
            prompts: text or messages.
            responses: one for each prompt.
            expect_version: the weights that must answer; None takes any.

        Raises:
            WrongVersion: if other weights answered.
        """
        return self._run(lambda client: client.score_versioned(prompts, responses, expect_version=expect_version))

    def close(self) -> None:
        """Close the session; a second call does nothing, and a later question opens another."""
        for thread in self._threads:
            thread.close()

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Callable[[AsyncRewardClient], Coroutine[Any, Any, T]]) -> T:
        with self._lock:
            if not self._threads or not self._threads[-1].is_running:
                self._threads.append(_LoopThread(self._arguments))
        return self._threads[-1].run(work)


class _LoopThread:
    """An event loop in a thread of this process, and the client that lives on it."""

    def __init__(self, arguments: ClientArguments) -> None:
        self.pid = os.getpid()
        self._seconds = arguments.timeout_seconds
        self._url = arguments.url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rm-client", daemon=True)
        self._thread.start()
        self._client = AsyncRewardClient(**vars(arguments))

    @property
    def is_running(self) -> bool:
        """Whether it is this process's, as threads do not survive a fork, and was not closed."""
        return self.pid == os.getpid() and not self._loop.is_closed()

    def run(self, work: Callable[[AsyncRewardClient], Coroutine[Any, Any, T]]) -> T:
        """Do it on the loop, and wait no longer than the calls that it makes."""
        future = asyncio.run_coroutine_threadsafe(work(self._client), self._loop)
        try:
            return future.result(CALLS * self._seconds + SLACK_SECONDS)
        except TimeoutError as error:
            raise RewardServerUnavailable(f"{self._url} gave no answer within {self._seconds:g} s") from error
        finally:
            future.cancel()  # of no effect once it is done

    def close(self) -> None:
        """Close the session and end the thread, in the process that has it."""
        if self.is_running:
            self.run(lambda client: client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
