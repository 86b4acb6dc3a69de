"""The gate before the application: checks of a request's head, limits on its body in bytes and time, and counts.

Bodies are counted and limited before any is parsed. The rule of time is Apache's (`mod_reqtimeout`, `RequestReadTimeout
body=20,MinRate=…`): a body has some seconds, and more for every byte received. Only time spent waiting for the client
counts, so that a busy server ends no request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rm_optimizer.serving.http.connections import ConnectionLimits
from rm_optimizer.serving.http.error_answers import error_answer
from rm_optimizer.serving.http.head_checks import Check
from rm_optimizer.serving.service.api_errors import ApiError, Overloaded, TooLarge
from rm_optimizer.serving.service.fair_share import CLIENT, FairShare
from rm_optimizer.serving.service.metrics import OTHER_ROUTE, ServerMetrics

MAX_OPEN_BYTES = 64 * 2**20
"""Bytes of the bodies of open requests before a new one; requests of falling sizes hold some times as many."""
MAX_BODY_BYTES = 8 * 2**20
"""Bytes of one body."""
MAX_CONTAINERS = 2**16
"""JSON lists and objects in one body; each costs Python's parser as much as a hundred numbers."""
MAX_STRINGS = 2**19
"""JSON strings in one body, more than any request of `MAX_CONTAINERS` objects needs."""
MAX_VALUES = 2**20
"""Commas outside of strings in one body."""
MAX_KEYS = 2**18
"""Colons outside of strings in one body."""
BODY_SECONDS = 20.0
"""Longest pause in a body, and the time of a body beyond what its bytes earn, in seconds."""
LEAST_BYTES_PER_SECOND = 128 * 2**10
"""Least rate of a body; each byte extends its time by the reciprocal in seconds."""


class SlowBody(ApiError):
    """The client stopped before the end of its body, or sends it too slowly."""

    status, kind = 408, "SlowBody"
    headers: Mapping[str, str] = {"Connection": "close"}
    """The rest of the body is not read."""


def _fair_requests() -> FairShare:
    return FairShare(ConnectionLimits.of_process().open // 2)  # the other half answers probes and refusals


@dataclass(eq=False)
class Gate:
    """Outermost middleware.

    Args:
        app: application behind it.
        metrics: counters of the server; None counts nothing.
        checks: checks of a request's head, before its body is read, the first one first.
        seconds: longest pause in a body, in seconds.
        least_rate: bytes that earn a body one more second in all.
    """

    app: ASGIApp
    metrics: ServerMetrics | None = None
    checks: Sequence[Check] = ()
    seconds: float = BODY_SECONDS
    least_rate: float = LEAST_BYTES_PER_SECOND
    requests: FairShare = field(default_factory=_fair_requests, init=False)
    bytes: FairShare = field(default_factory=lambda: FairShare(MAX_OPEN_BYTES), init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with the reason to refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refusal = next((found for check in self.checks if (found := check(scope)) is not None), None)
        if scope["type"] == "http":
            await self._counted(scope, receive, send, refusal)
        elif refusal is None:
            await self.app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _counted(self, scope: Scope, receive: Receive, send: Send, refusal: ApiError | None) -> None:
        """Answer, and count the answer by route and status; HEAD is handled as GET."""
        is_post = scope["method"] == "POST"
        if scope["method"] == "HEAD":  # uvicorn keeps its own scope, by which it omits the body
            scope = {**scope, "method": "GET"}
        status, started = 500, time.perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if refusal is not None:
                raise refusal
            timed = _TimedReceive(receive, self.seconds, self.least_rate)
            await (self._admitted if is_post else self.app)(scope, timed, noting)
        except ApiError as error:  # nothing has been sent: an answer begins once the body is read
            await error_answer(error)(scope, receive, noting)
        finally:
            if self.metrics is not None:
                route = getattr(scope.get("route"), "path", OTHER_ROUTE)
                self.metrics.requests.labels(route, str(status)).inc()
                self.metrics.seconds.labels(route).observe(time.perf_counter() - started)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then pass the request on; a request opens once its body is read."""
        CLIENT.set((scope.get("client") or [""])[0])
        chunks = list[bytes]()  # counted as they arrive, also those of a body that never ends
        try:
            if count := self.requests.excess(1):
                raise Overloaded(f"{count} requests are open, which is the most")
            announced = Headers(scope=scope).get("content-length", "0")
            if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
                raise _too_large()
            size = 0
            message: Message = {"more_body": True}
            while message.get("more_body", False):
                message = await receive()
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                self.bytes.hold(id(chunks), size)
                if size > MAX_BODY_BYTES:
                    raise _too_large()
                if open_bytes := self.bytes.excess(size):
                    raise Overloaded(f"the bodies of open requests hold {open_bytes} bytes")
            chunks[:] = [b"".join(chunks)]
            if (too_complex := _too_complex(chunks[0])) is not None:
                raise too_complex
            given = iter([{"type": "http.request", "body": chunks[0], "more_body": False}])

            async def replay() -> Message:
                return next(given, None) or await receive()

            with self.requests.holding(1):
                await self.app(scope, replay, send)
        finally:
            self.bytes.release(id(chunks))


def _too_large() -> TooLarge:
    return TooLarge(f"expected a body of at most {MAX_BODY_BYTES} bytes; split the request")


@dataclass(eq=False)
class _TimedReceive:
    """`receive` with a time limit on the body; it waits without one for the disconnection that follows."""

    receive: Receive
    seconds: float
    least_rate: float
    waited: float = 0.0
    size: int = 0
    is_whole: bool = False

    async def __call__(self) -> Message:
        if self.is_whole:
            return await self.receive()
        left = self.seconds + self.size / self.least_rate - self.waited
        started = time.monotonic()
        try:
            message = await asyncio.wait_for(self.receive(), min(self.seconds, left))
        except TimeoutError as error:
            raise SlowBody(
                f"{self.size} bytes of the body came in {self.waited + time.monotonic() - started:.1f} s; expected the "
                f"next within {self.seconds:g} s and {self.least_rate:g} bytes a second; send the body at once"
            ) from error
        self.waited += time.monotonic() - started
        self.size += len(message.get("body", b""))
        self.is_whole = not message.get("more_body", False)
        return message


def _too_complex(body: bytes) -> TooLarge | None:
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
