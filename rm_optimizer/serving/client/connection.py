"""HTTP connection of a client: retried requests within a deadline, and scoring requests of one version."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import httpx

from rm_optimizer.errors import DataError, RewardServerRefused, WrongAnswer
from rm_optimizer.serving.client.requests import Form, finite_numbers
from rm_optimizer.serving.client.retries import Deadline, bearer, is_loopback
from rm_optimizer.serving.engine import ScoredBatch
from rm_optimizer.serving.protocol import REVISION_HEADER, VERSION_HEADER


@dataclass(frozen=True, eq=False)
class _Session:
    """Open connections of one process and one event loop."""

    http: httpx.AsyncClient
    slots: asyncio.Semaphore
    connecting: asyncio.Lock


@dataclass(eq=False, repr=False)
class PickledByArguments:
    """Client of a server that is pickled by its arguments alone; the copy opens its own connections.

    Args:
        url: address of the server, `http://host:port`.
    """

    url: str

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        self._prepare()

    def _prepare(self) -> None:
        """Make what the arguments describe, without a connection."""

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, arguments: dict[str, Any]) -> None:
        vars(self).update(arguments)
        self._prepare()


@dataclass(eq=False, repr=False)
class Connection:
    """Requests to one server.

    Args:
        url: address of the server, `http://host:port`.
        api_key: bearer token; None sends none.
        concurrency: largest number of requests open at once.
        transport: replacement of the network; None uses the network.
    """

    url: str
    _: KW_ONLY
    api_key: str | None
    concurrency: int
    transport: httpx.AsyncBaseTransport | None

    def __post_init__(self) -> None:
        self._sessions: dict[tuple[int, asyncio.AbstractEventLoop], _Session] = {}

    def _opened(self) -> _Session:
        http = httpx.AsyncClient(
            headers=bearer(self.api_key),
            limits=httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency),
            transport=self.transport,
            trust_env=not is_loopback(self.url),
        )
        return _Session(http, asyncio.Semaphore(self.concurrency), asyncio.Lock())

    def _session(self) -> _Session:
        """Open session of this process and its running loop; sessions of a parent before a fork stay untouched."""
        here = os.getpid(), asyncio.get_running_loop()
        if here not in self._sessions or self._sessions[here].http.is_closed:
            open_ones = {where: one for where, one in list(self._sessions.items()) if not where[1].is_closed()}
            self._sessions = open_ones | {here: self._opened()}
        return self._sessions[here]

    def opening(self) -> asyncio.Lock:
        """Lock of this process and loop, held while the server is verified."""
        return self._session().connecting

    async def close(self) -> None:
        """Close the session; a later request opens another."""
        if self._sessions:
            await self._session().http.aclose()

    async def ask(
        self, form: Form, rows: Sequence[Any], model: str, deadline: Deadline, *, use_activation: bool = False
    ) -> ScoredBatch:
        """Rewards of one request; a request that is too large for the server is sent in halves.

        Args:
            form: form of the request and of its answer.
            rows: rows to score, of the form's type.
            model: name of the served model.
            deadline: time limit of the call.
            use_activation: ask for sigmoids.

        Raises:
            DataError: if a text cannot be sent.
        """
        body = {**form.body(rows, use_activation), "model": model}
        try:
            response = await self.request("POST", form.path, deadline, json=body)
            answer = response.json()
        except RewardServerRefused as error:
            if error.status != 413 or len(rows) < 2:
                raise
            return await self._ask_halves(form, rows, model, deadline, use_activation)
        except UnicodeEncodeError as error:
            raise DataError("a text holds half of a UTF-16 surrogate pair, not a character; remove it") from error
        except ValueError as error:
            raise WrongAnswer(f"{self.url}{form.path} did not answer with JSON") from error
        numbers = finite_numbers(form, answer, len(rows))
        version = response.headers.get(VERSION_HEADER) or answer.get("rm_version") or answer.get("model")
        revision = response.headers.get(REVISION_HEADER)
        return ScoredBatch(tuple(numbers), str(version), None if revision is None else int(revision))

    async def _ask_halves(
        self, form: Form, rows: Sequence[Any], model: str, deadline: Deadline, use_activation: bool
    ) -> ScoredBatch:
        middle = len(rows) // 2
        while True:
            first, second = [
                await self.ask(form, half, model, deadline, use_activation=use_activation)
                for half in (rows[:middle], rows[middle:])
            ]
            if first.weights == second.weights:
                return ScoredBatch(first.rewards + second.rewards, *first.weights)
            deadline.pause("the weights changed between two halves of a request")

    async def request(self, method: str, path: str, deadline: Deadline, **content: Any) -> httpx.Response:
        """First successful answer, with as many attempts as the deadline allows.

        Raises:
            RewardServerUnavailable: if there is none in time.
            RewardServerRefused: if the server refuses.
        """
        while True:
            session = self._session()
            got: httpx.Response | httpx.HTTPError
            try:
                async with session.slots:
                    got = await session.http.request(method, self.url + path, timeout=deadline.timeout(), **content)
            except httpx.HTTPError as error:
                got = error
            judged = deadline.judge(got, self.url + path)
            if isinstance(judged, httpx.Response):
                return judged
            await asyncio.sleep(judged)
