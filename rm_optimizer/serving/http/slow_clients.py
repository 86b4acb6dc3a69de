"""Limits on slow clients and on connections, of which uvicorn has none: headers, bodies and open files.

A client that stops or trickles gets 408 and its connection is closed, as by Apache's `mod_reqtimeout`
(`RequestReadTimeout header=20 body=20,MinRate=…`): a body has some seconds, and more for every byte received. Only time
spent waiting for the client counts, so that a busy server ends no request.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Receive

from rm_optimizer.serving.service.api_errors import (
    MAX_HEADER_BYTES,
    ApiError,
    HeadersTooLarge,
    InvalidRequest,
    Overloaded,
    error_answer,
)
from rm_optimizer.serving.service.metrics import ServerMetrics

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as HttpProtocol

MAX_CONNECTIONS = 2048
"""Most open connections, if the limit of open files allows as many."""
MAX_BACKLOG = 128
"""Most connections that wait to be accepted, in addition to the open ones."""
RESERVED_FILES = 64
"""Files for everything but connections."""
REPORT_SECONDS = 60.0
"""Least time between two reports that there are no more files."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Most connections of a server.

    Args:
        open: connections that are served; a further one gets 503 and is closed.
        backlog: connections that wait to be accepted.
    """

    open: int
    backlog: int

    @classmethod
    def of_process(cls) -> ConnectionLimits:
        """Limits for this process's open files, after raising their limit as far as the system allows."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                soft = hard
            except (ValueError, OSError):  # macOS: more than the kernel has
                pass
        return cls.of_files(soft if soft != resource.RLIM_INFINITY else 2**20)

    @classmethod
    def of_files(cls, files: int) -> ConnectionLimits:
        """Limits for this number of open files.

        Example:
            >>> ConnectionLimits.of_files(1024)
            ConnectionLimits(open=832, backlog=128)
        """
        backlog = max(8, min(MAX_BACKLOG, files // 8))
        return cls(max(16, min(MAX_CONNECTIONS, files - RESERVED_FILES - backlog)), backlog)


def report_lack_of_files_once(loop: asyncio.AbstractEventLoop) -> None:
    """Log `accept() out of system resource` once a minute; asyncio logs it for each connection that waits."""
    last = -REPORT_SECONDS

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        if "out of system resource" in str(context.get("message")):
            if time.monotonic() - last < REPORT_SECONDS:
                return
            last = time.monotonic()
        loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


BODY_SECONDS = 20.0
"""Longest pause in a body, and the time of a body beyond what its bytes earn, in seconds."""
LEAST_BYTES_PER_SECOND = 128 * 2**10
"""Least rate of a body; each byte extends its time by the reciprocal in seconds."""


class SlowBody(ApiError):
    """The client stopped before the end of its body, or sends it too slowly."""

    status, kind = 408, "SlowBody"
    headers: Mapping[str, str] = {"Connection": "close"}
    """The rest of the body is not read."""


@dataclass(eq=False)
class TimedReceive:
    """`receive` with a time limit on the body; it waits without one for the disconnection that follows."""

    receive: Receive
    seconds: float
    least_rate: float
    waited: float = 0.0
    size: int = 0
    is_whole: bool = False

    async def __call__(self) -> Message:
        """Next message, or `SlowBody` if it does not come in time."""
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


class SlowHeaders(ApiError):
    """The client stopped before the end of its headers, or sends them too slowly."""

    status, kind = 408, "SlowHeaders"


class BoundedHeaders(HttpProtocol):
    """uvicorn's protocol of the installed parser with limits on headers, for `uvicorn.Config(http=…)`."""

    # `cycle`, `flow.read_paused`, `connections`, `transport` and `send_400_response` are private members of uvicorn.
    # They were read in uvicorn 0.54.0, in h11_impl.py and httptools_impl.py alike; read them again before an upgrade.

    seconds = 20.0
    """Seconds to the last header, from the connection or from the first byte of a later request on it."""
    least_idle_seconds = 1.0
    """Seconds that a client may owe its next bytes before its connection gives way to a new one."""
    max_connections = MAX_CONNECTIONS
    metrics: ServerMetrics | None = None

    @classmethod
    def limited(cls, max_connections: int, metrics: ServerMetrics) -> type[BoundedHeaders]:
        """The protocol of one server with these counters, which keeps at most this many connections open."""
        return type("LimitedHeaders", (cls,), {"max_connections": max_connections, "metrics": metrics})

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._last = self.cycle  # the request before the one whose headers are counted
        self._num_bytes = 0
        self._owing_since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request's headers, unless too many connections are open and none of them is idle."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections and not self._replace_idle():
            self._refuse(Overloaded(f"{self.max_connections} connections are open, which is the most"))
        else:
            self._begin_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for headers."""
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Let uvicorn parse the bytes, and count incomplete headers against the limits."""
        last, now = self.cycle, self.loop.time()
        if self._deadline is None and (last is None or last.response_complete):  # the first byte of a request
            self._owing_since = now
        self._owing_since = min(now, self._owing_since + len(data) / LEAST_BYTES_PER_SECOND)
        if last is not self._last:
            self._last, self._num_bytes = last, 0
        if last is None or not last.more_body:  # the rest of a body that was answered early does not count
            self._num_bytes += len(data)
        if last is None or last.response_complete:
            self._begin_wait()
        super().data_received(data)
        if self.cycle is not last:
            self._end_wait()
        elif self._num_bytes > MAX_HEADER_BYTES and not self.flow.read_paused:  # paused: h11 has a next request waiting
            self._refuse(HeadersTooLarge())

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP, or headers too long for h11, with the server's typed body."""
        self._refuse(HeadersTooLarge() if self._num_bytes > MAX_HEADER_BYTES else InvalidRequest(msg))

    def _replace_idle(self) -> bool:
        """Close the connection whose client has owed bytes longest, as nginx does; False if none owes any.

        A client owes a request, or the rest of one, whose bytes come at `LEAST_BYTES_PER_SECOND` or faster.
        """
        waiting = [other for other in self.connections if isinstance(other, BoundedHeaders) and other._is_waiting]
        oldest = min(waiting, key=lambda other: other._owing_since, default=self)
        if self.loop.time() - oldest._owing_since < self.least_idle_seconds:
            return False
        if oldest.cycle is None or oldest.cycle.response_complete:
            oldest.transport.close()
        else:
            oldest._refuse(Overloaded(f"{self.max_connections} connections are open; send the whole body at once"))
        return True

    @property
    def _is_waiting(self) -> bool:
        if self.transport.is_closing():
            return False
        is_idle = self.cycle is None or self.cycle.response_complete
        return is_idle or (self.cycle.more_body and not self.flow.read_paused)

    def _begin_wait(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.seconds, self._expire)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        """Close the connection, with 408 if a request had begun; a websocket connection stays open."""
        if self not in self.connections:
            return
        if self._num_bytes:
            self._refuse(
                SlowHeaders(
                    f"{self._num_bytes} bytes of the request line and its headers came within {self.seconds:g} s, and "
                    "not their end; send them at once"
                )
            )
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        answer = error_answer(error)
        is_answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not is_answering:
            lines = [
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(),
                *(name + b": " + value for name, value in answer.raw_headers),
                b"connection: close",
            ]
            self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
            if self.metrics is not None:
                self.metrics.count_refusal(error.status)
        self.transport.close()
