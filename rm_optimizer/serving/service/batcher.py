"""Queue of requests, shared fairly between clients, and the engine's batches."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import numpy as np

from rm_optimizer.core.tokens.prefix_trees import LEAST_SHARED, common_runs
from rm_optimizer.errors import EngineUnavailable
from rm_optimizer.serving.engine import Engine, ScoredBatch
from rm_optimizer.serving.service.api_errors import Overloaded
from rm_optimizer.serving.service.telemetry import ENTRY, OTHER_ROUTE, ServerMetrics

CLIENT = ContextVar("CLIENT", default="")
"""Address of the client whose request this task answers."""


class FairShare:
    """Capacity for open requests, of which a new request counts only what fair queuing would do before it.

    Of each open request, or of all open requests of each client together, this is at most the new request's size, where
    a client's size includes its own open requests. The smaller of both sums counts.

    Args:
        most: sum at which a new request is refused.

    Attributes:
        total: size of all open requests.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._open: dict[object, tuple[str, int]] = {}

    def excess(self, size: int) -> int:
        """The sum that leaves no room for a new request of this size; 0 if there is room."""
        if self.total < self.most:
            return 0
        by_client = Counter[str]()
        for client, each in self._open.values():
            by_client[client] += each
        own = size + by_client[CLIENT.get()]
        ahead = min(
            sum(min(each, size) for _, each in self._open.values()), sum(min(each, own) for each in by_client.values())
        )
        return ahead if ahead >= self.most else 0

    def hold(self, key: object, size: int) -> None:
        """Count an open request of this size; a further call replaces its size."""
        self.release(key)
        self._open[key] = CLIENT.get(), size
        self.total += size

    def release(self, key: object) -> None:
        """Count the request no more."""
        self.total -= self._open.pop(key, ("", 0))[1]

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Context in which a request of this size is open."""
        key = object()
        self.hold(key, size)
        try:
            yield
        finally:
            self.release(key)


LEAST_BATCH_TOKENS = 1024
"""Least number of tokens of a full batch; the engine divides it into passes."""
IN_FLIGHT = 2
"""Batches in the engine at a time for each replica, so that the next one waits in its pipe while it computes."""
MOST_ROUNDS = 10
"""Most times that a request is scored again because of weight updates."""


@dataclass(eq=False)
class _Request:
    """Sequences of one request, their rewards so far, the revision of the weights of each, and when the first began."""

    sequences: Sequence[tuple[int, ...]]
    answer: asyncio.Future[ScoredBatch]
    rewards: list[float]
    revisions: list[int | None]
    open_units: int = 0
    rounds: int = 0
    taken: float | None = None


@dataclass(eq=False)
class _Unit:
    """Sequences of one request that go to the engine together: a group with a common start, or a single one."""

    place: float
    request: _Request
    indices: list[int]
    tokens: int
    start: tuple[int, ...]


class Batcher:
    """Queue that accepts requests up to `max_queued_tokens` and passes them to the engine in batches.

    The order is start-time fair queuing (Goyal et al., 1996) over tokens. A unit's place is the place being served when
    its request arrived, plus the request's tokens before it. A small request does not wait for all of a large one.

    Args:
        engine: engine that scores the batches.
        max_queued_tokens: most tokens of one request, and most that wait or are being scored before a new one.
        metrics: counters of the server.
    """

    def __init__(self, engine: Engine, *, max_queued_tokens: int, metrics: ServerMetrics) -> None:
        self.engine = engine
        self.max_queued_tokens = max_queued_tokens
        self.metrics = metrics
        self._share = FairShare(max_queued_tokens)
        self._queue: list[_Unit] = []
        self._place = 0.0
        self._shares_prompts, self._batch_tokens = False, LEAST_BATCH_TOKENS
        self._work = asyncio.Event()
        self._tokens_per_second = math.inf  # unknown until the first batch is computed
        self._runners: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to pass batches to the engine, which has started."""
        description = self.engine.description
        self._shares_prompts = description.shares_prompts
        self._batch_tokens = max(LEAST_BATCH_TOKENS, description.token_budget)
        count = IN_FLIGHT * description.replicas
        self._runners = [asyncio.create_task(self._run(), name=f"rm-batcher-{i}") for i in range(count)]

    async def stop(self) -> None:
        """Stop, and fail the requests that still wait."""
        for runner in self._runners:
            runner.cancel()
        await asyncio.gather(*self._runners, return_exceptions=True)
        _fail_all(self._queue, EngineUnavailable("the server is stopping"))

    async def score(self, sequences: Sequence[tuple[int, ...]]) -> ScoredBatch:
        """Rewards of a request, all of one version of the weights. Cancellation removes its unscored sequences.

        Raises:
            Overloaded: if the queue has no room for it now.
            EngineUnavailable: if the engine fails.
        """
        tokens = sum(map(len, sequences))
        self.require_room(tokens)
        count = len(sequences)
        answer: asyncio.Future[ScoredBatch] = asyncio.get_running_loop().create_future()
        request = _Request(sequences, answer, [math.nan] * count, [None] * count)
        try:
            with self._share.holding(tokens):
                self.metrics.queued_tokens.set(self.queued_tokens)
                arrived = time.perf_counter()
                self._enqueue(request, range(count))
                scored = await answer
                began, ended, entry = request.taken or arrived, time.perf_counter(), ENTRY.get() or {}
                route = entry.get("path", OTHER_ROUTE)
                self.metrics.queue_seconds.labels(route).observe(began - arrived)
                self.metrics.engine_seconds.labels(route).observe(ended - began)
                entry |= {"sequences": count, "tokens": tokens}
                entry |= {"queue_seconds": round(began - arrived, 6), "engine_seconds": round(ended - began, 6)}
                return scored
        finally:
            answer.cancel()  # no effect once it is answered
            self.metrics.queued_tokens.set(self.queued_tokens)
            if request.open_units:
                self._queue = [unit for unit in self._queue if unit.request is not request]

    @property
    def queued_tokens(self) -> int:
        """Tokens of the requests that are accepted and not answered."""
        return self._share.total

    def require_room(self, tokens: int) -> None:
        """Refuse a request of that many tokens, or of at least that many if their number is unknown, for now.

        Only its fair share counts, so that neither large requests nor another client's many requests shut it out.

        Raises:
            Overloaded: if the queue has no room for it now.
        """
        if ahead := self._share.excess(tokens):
            wait = math.ceil(ahead / self._tokens_per_second / max(IN_FLIGHT, len(self._runners)))
            raise Overloaded(
                f"{ahead} tokens wait to be computed before this request, and {self.max_queued_tokens} are the most",
                min(60, max(1, wait)),
            )

    def _enqueue(self, request: _Request, indices: Sequence[int]) -> None:
        rows = [np.array(request.sequences[index], dtype=np.int32) for index in indices]
        runs = [([i], len(row)) for i, row in enumerate(rows)]
        if self._shares_prompts:
            runs = common_runs(rows, 2 * self._batch_tokens)  # so that no unit delays the others for long
        place = self._place
        for run, tokens in runs:
            part = [indices[i] for i in run]
            first = request.sequences[part[0]]
            start = first[:LEAST_SHARED] if len(first) > LEAST_SHARED else ()
            self._queue.append(_Unit(place, request, part, tokens, start))
            place += tokens
            request.open_units += 1
        self._queue.sort(key=lambda unit: unit.place)
        request.rounds += 1
        self._work.set()

    async def _run(self) -> None:
        while True:
            batch = self._next_batch()
            if batch:
                try:
                    await self._compute(batch)
                except BaseException:  # the server stops
                    _fail_all(batch, EngineUnavailable("the server is stopping"))
                    raise
            else:
                self._work.clear()
                await self._work.wait()

    def _next_batch(self) -> list[_Unit]:
        """Next units in order up to a batch's tokens, each with units of other requests that start alike and fit."""
        alike: dict[tuple[int, ...], list[_Unit]] = defaultdict(list)
        if self._shares_prompts:
            for unit in self._queue:
                alike[unit.start].append(unit)
            alike.pop((), None)
        batch, taken, room = list[_Unit](), set[_Unit](), self._batch_tokens
        for unit in self._queue:
            if room <= 0:
                break
            if unit in taken:
                continue
            self._place = unit.place
            for each in (unit, *alike.get(unit.start, ())):
                if (each is unit or each.tokens <= room) and each not in taken:
                    taken.add(each)
                    batch.append(each)
                    room -= each.tokens
        self._queue = [unit for unit in self._queue if unit not in taken]
        return batch

    async def _compute(self, batch: list[_Unit]) -> None:
        """Score a batch, and answer the requests whose last unit it holds."""
        sequences = [unit.request.sequences[index] for unit in batch for index in unit.indices]
        started = time.perf_counter()
        for unit in batch:
            unit.request.taken = unit.request.taken or started
        try:
            scored = await self.engine.score(sequences)
        except EngineUnavailable as error:
            _fail_all(batch, error)
            return
        tokens = sum(unit.tokens for unit in batch)
        speed = tokens / max(1e-6, time.perf_counter() - started)
        known = speed if math.isinf(self._tokens_per_second) else self._tokens_per_second
        self._tokens_per_second = known + 0.2 * (speed - known)
        self.metrics.sequences.inc(len(sequences))
        self.metrics.tokens.inc(sum(map(len, sequences)))
        self.metrics.unique_tokens.inc(tokens)
        self.metrics.batch_tokens.observe(tokens)
        rewards = iter(scored.rewards)
        for unit in batch:
            request = unit.request
            for index in unit.indices:
                request.rewards[index], request.revisions[index] = next(rewards), scored.revision
            request.open_units -= 1
            if request.open_units or request.answer.done():
                continue
            stale = [index for index, own in enumerate(request.revisions) if own != scored.revision]
            if not stale:
                request.answer.set_result(replace(scored, rewards=tuple(request.rewards)))
            elif request.rounds < MOST_ROUNDS:  # older weights computed a part of it
                self._enqueue(request, stale)
            else:
                reason = "new weights came faster than the request could be answered; try again"
                _fail_all([unit], EngineUnavailable(reason))


def _fail_all(units: Sequence[_Unit], error: EngineUnavailable) -> None:
    for unit in units:
        if not unit.request.answer.done():
            unit.request.answer.set_exception(error)
