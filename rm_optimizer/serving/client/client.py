"""Blocking client of a reward server, with the scoring methods of a local model."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.pairs.pair import Prompt, Scorer
from rm_optimizer.errors import RewardServerUnavailable
from rm_optimizer.serving.client.async_client import AsyncRewardClient, ClientArguments
from rm_optimizer.serving.engine import ScoredBatch

SLACK_SECONDS = 10.0
"""Seconds to wait for a call beyond its own timeout."""
CALLS = 2
"""Most calls with a timeout of their own in one call: the handshake and the request."""
T = TypeVar("T")


class RewardClient(ClientArguments, Scorer):
    """`AsyncRewardClient` for callers without an event loop; safe to share between threads.

    The constructor connects and verifies the server's sigmoid and rendering. For its arguments see `ClientArguments`.

    Raises:
        HandshakeFailed: if the server's rewards are not raw, or it renders conversations differently.
        RewardServerUnavailable: if it does not answer in time.
    """

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[_LoopThread] = []

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self._run(lambda client: client.connect())
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> str:
        """Version of the weights that answer now, from the server."""
        return self._run(lambda client: client.version())

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Float[Tensor, " sequences"]:
        """Rewards of the responses in the order given, float32 on the CPU; see `AsyncRewardClient.score`."""
        return self._run(lambda client: client.score(prompts, responses))

    def score_pair(self, prompt: Prompt, response_a: str, response_b: str) -> float:
        """Margin: reward of `response_a` less that of `response_b`."""
        return self._run(lambda client: client.score_pair(prompt, response_a, response_b))

    def score_versioned(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        *,
        expect_version: str | None = None,
        expect_revision: int | None = None,
    ) -> ScoredBatch:
        """Rewards and the version that computed them; see `AsyncRewardClient.score_versioned`."""
        expected = {"expect_version": expect_version, "expect_revision": expect_revision}
        return self._run(lambda client: client.score_versioned(prompts, responses, **expected))  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the session; a second call does nothing, and a later request opens another session."""
        for thread in self._threads:
            thread.close()

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _run(self, work: Callable[[AsyncRewardClient], Coroutine[Any, Any, T]]) -> T:
        with self._lock:
            if not self._threads or not self._threads[-1].is_running:
                self._threads.append(_LoopThread(self))
        return self._threads[-1].run(work)


class _LoopThread:
    """Event loop in a thread of this process, with the client that runs on it."""

    def __init__(self, arguments: ClientArguments) -> None:
        self.pid = os.getpid()
        self._seconds = arguments.timeout_seconds
        self._url = arguments.url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rm-client", daemon=True)
        self._thread.start()
        self._client = AsyncRewardClient(**arguments.__getstate__())

    @property
    def is_running(self) -> bool:
        """True while the thread runs in this process: threads do not survive a fork or a close."""
        return self.pid == os.getpid() and not self._loop.is_closed()

    def run(self, work: Callable[[AsyncRewardClient], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop, waiting no longer than the calls that it makes."""
        future = asyncio.run_coroutine_threadsafe(work(self._client), self._loop)
        try:
            return future.result(CALLS * self._seconds + SLACK_SECONDS)
        except TimeoutError as error:
            raise RewardServerUnavailable(f"{self._url} gave no answer within {self._seconds:g} s") from error
        finally:
            future.cancel()  # of no effect once it is done

    def close(self) -> None:
        """Close the session and end the thread, in the process that started it."""
        if self.is_running:
            self.run(lambda client: client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
