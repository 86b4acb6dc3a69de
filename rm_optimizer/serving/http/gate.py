"""Gate before the application: checks of a request's head, limits on its body and its JSON, counts, and access log.

A body that stops or trickles gets 408 and its connection is closed, as by
Apache's `mod_reqtimeout` (`RequestReadTimeout body=20,MinRate=…`). Slow headers and idle connections are limited by
uvicorn's options alone, so a server that strangers reach belongs behind a proxy.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import resource
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rm_optimizer.records.codec import RepeatedKey, strict_json
from rm_optimizer.serving.options import ServeOptions
from rm_optimizer.serving.service import api_errors, telemetry
from rm_optimizer.serving.service.api_errors import ApiError, InvalidRequest, TooLarge
from rm_optimizer.serving.service.batcher import CLIENT, FairShare

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Paths without a key, for the liveness probes of an orchestrator; they reveal only that the server runs."""
UPDATE_PATHS = "/rm/weights"
"""Prefix of the paths of weight updates, which may have another key."""
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
MAX_OPEN_BYTES = 64 * 2**20
"""Bytes of the bodies of open requests before a new one; requests of falling sizes hold some times as many."""
MAX_BODY_BYTES = 8 * 2**20
"""Bytes of one body."""
BODY_SECONDS = 20.0
"""Longest pause in a body, and the time of a body beyond what its bytes earn, in seconds."""
LEAST_BYTES_PER_SECOND = 128 * 2**10
"""Least rate of a body; each byte extends its time by the reciprocal in seconds."""
MAX_CONNECTIONS = 2048
"""Most open connections, if the limit of open files allows as many."""
MAX_BACKLOG = 128
"""Most connections that wait to be accepted, in addition to the open ones."""
RESERVED_FILES = 64 + MAX_BACKLOG
"""Open files for everything but open connections."""
REQUEST_ID = "x-request-id"
"""Header that names a request; a client's own is kept, and every answer carries it."""
_PORT, _ID = re.compile(r":\d+\Z"), re.compile(r"[\w.:/+=@-]{1,128}")
_access = logging.getLogger("rm_optimizer.access")


def most_connections() -> int:
    """Most open connections of this process, after raising its limit of open files as far as the system allows."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != hard:
        with suppress(ValueError, OSError):  # macOS: more than the kernel has
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            files = hard
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(16, min(MAX_CONNECTIONS, files - RESERVED_FILES))


class AmbiguousLength(InvalidRequest):
    """A proxy may read another end of the body than this server, so the connection ends."""

    headers: Mapping[str, str] = {"connection": "close"}


class SlowBody(ApiError):
    """The client stopped before the end of its body, or sends it too slowly."""

    status, kind = 408, "SlowBody"
    headers: Mapping[str, str] = {"Connection": "close"}
    """The rest of the body is not read."""


def timed(receive: Receive) -> Receive:
    """`receive` with a time limit on the body; it waits without one for the disconnection that follows.

    Only time spent waiting for the client counts, so that a busy server ends no request. The result raises `SlowBody`.
    """
    waited, size, is_whole = 0.0, 0, False

    async def receive_in_time() -> Message:
        nonlocal waited, size, is_whole
        if is_whole:
            return await receive()
        started, allowed = time.monotonic(), BODY_SECONDS + size / LEAST_BYTES_PER_SECOND
        try:
            message = await asyncio.wait_for(receive(), min(BODY_SECONDS, allowed - waited))
        except TimeoutError as error:
            raise SlowBody(
                f"{size} bytes of the body came in {waited + time.monotonic() - started:.1f} s; expected the next "
                f"within {BODY_SECONDS:g} s and {LEAST_BYTES_PER_SECOND:g} bytes a second; send the body at once"
            ) from error
        waited += time.monotonic() - started
        size += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        return message

    return receive_in_time


def local_host_check(scope: Scope) -> ApiError | None:
    """Check against DNS rebinding: the `Host` of a request must be this machine."""
    host = Headers(scope=scope).get("host", "" if scope.get("http_version") != "1.0" else "localhost")  # no browser's
    if _PORT.sub("", host).lower() in LOCAL_HOSTS:
        return None
    return InvalidRequest(
        f"expected the header Host to name this machine, got {host!r}; serve with --api-key for other names"
    )


def header_size_check(scope: Scope) -> ApiError | None:
    """Check of the headers' size, of which the protocol limits only several pieces, and for one length of the body."""
    names = set(Headers(scope=scope).keys())
    if {"content-length", "transfer-encoding"} <= names:  # h11 takes what follows for a request
        return AmbiguousLength("expected either content-length or transfer-encoding, got both")
    target = scope.get("raw_path") or scope["path"].encode()
    line = len(scope["method"]) + len(target) + len(scope["query_string"]) + len(" ? HTTP/1.1\r\n")
    size = line + sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"]) + len("\r\n")
    if size <= api_errors.MAX_HEADER_BYTES:
        return None
    most = f"at most {api_errors.MAX_HEADER_BYTES} bytes"
    return api_errors.HeadersTooLarge(f"expected a request line and headers of {most}; send fewer")


@dataclass(eq=False)
class Gate:
    """Middleware that checks each request, reads its body within limits, and counts its answer.

    Args:
        app: application behind this middleware.
        metrics: counters of the server.
        options: keys and hosts of requests, and the form of the access log.
    """

    app: ASGIApp
    metrics: telemetry.ServerMetrics
    options: ServeOptions

    def __post_init__(self) -> None:
        self.requests = FairShare(most_connections() // 2)  # the other half answers probes and refusals
        self.bytes = FairShare(MAX_OPEN_BYTES)
        self.checks_host = self.options.checks_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with its refusal; requests are counted by route and status.

        HEAD is handled as GET.
        """
        if scope["type"] != "http":  # no route is a websocket, so the application closes each
            await self.app(scope, receive, send)
            return
        refusal = self._refused(scope)
        if scope["method"] == "HEAD":  # uvicorn keeps its own scope, by which it omits the body
            scope = {**scope, "method": "GET"}
        status, started = 500, time.perf_counter()
        given = Headers(scope=scope).get(REQUEST_ID, "")
        entry: dict[str, Any] = {"id": given if _ID.fullmatch(given) else uuid.uuid4().hex}
        entry |= {"client": (scope.get("client") or [""])[0], "method": scope["method"], "path": scope["path"]}
        telemetry.ENTRY.set(entry)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = entry["id"]
            await send(message)

        with telemetry.request_span(scope, entry) if telemetry.HAS_TRACING else nullcontext():
            try:
                if refusal is not None:
                    raise refusal
                answer = self._admitted if scope["method"] == "POST" else self.app
                await answer(scope, timed(receive), noting)
            except ApiError as error:  # nothing has been sent: an answer begins once the body is read
                await api_errors.error_answer(error)(scope, receive, noting)
            finally:
                route = getattr(scope.get("route"), "path", telemetry.OTHER_ROUTE)
                self.metrics.requests.labels(route, str(status)).inc()
                entry |= {"status": status, "seconds": round(time.perf_counter() - started, 6)}
                self.metrics.seconds.labels(route).observe(entry["seconds"])
                if self.options.access_log != "off":
                    _access.info(telemetry.log_line(entry, self.options.access_log))

    def _refused(self, scope: Scope) -> ApiError | None:
        """Reason to refuse a request by its head; None lets it pass."""
        found = header_size_check(scope)
        if found is None and self.checks_host:
            found = local_host_check(scope)
        return found or self._bearer_check(scope)

    def _bearer_check(self, scope: Scope) -> ApiError | None:
        """Check of `Authorization: Bearer KEY`, compared in constant time; updates may have another key."""
        key = api_key = self.options.api_key
        if self.options.update_key is not None and scope["path"].startswith(UPDATE_PATHS):
            key = self.options.update_key
        if key is None or (scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")):
            return None
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if hmac.compare_digest(given.strip().encode(), key.encode()) and scheme.lower() == "bearer":
            return None
        which = "API" if key == api_key else "update"
        return api_errors.Unauthorized(f"expected the header Authorization: Bearer KEY with the server's {which} key")

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then pass the request on; a request opens once its body is read.

        Raises:
            Overloaded: if too many requests are open, or their bodies hold too much.
            TooLarge: if the body is too large.
        """
        CLIENT.set((scope.get("client") or [""])[0])
        if count := self.requests.excess(1):
            raise api_errors.Overloaded(f"{count} requests are open, which is the most")
        announced = Headers(scope=scope).get("content-length", "0")
        chunks = list[bytes]()  # counted as they arrive, also if the body never ends
        size = int(announced) if announced.isdigit() and int(announced) > MAX_BODY_BYTES else 0
        is_whole = False
        try:
            while size <= MAX_BODY_BYTES and not is_whole:
                message = await receive()
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                self.bytes.hold(id(chunks), size)
                if size <= MAX_BODY_BYTES and (open_bytes := self.bytes.excess(size)):
                    raise api_errors.Overloaded(f"the bodies of open requests hold {open_bytes} bytes")
                is_whole = not message.get("more_body", False)
            if size > MAX_BODY_BYTES:
                raise TooLarge(f"expected a body of at most {MAX_BODY_BYTES} bytes; split the request")
            left: list[Message] = [{"type": "http.request", "body": b"".join(chunks), "more_body": False}]
            chunks.clear()

            async def replayed() -> Message:
                return left.pop() if left else await receive()

            with self.requests.holding(1):
                await self.app(scope, replayed, send)
        finally:
            self.bytes.release(id(chunks))


MAX_CONTAINERS = 2**16
"""JSON lists and objects in one body; each costs Python's parser as much as a hundred numbers."""
MAX_STRINGS = 2**19
"""JSON strings in one body, more than any request of `MAX_CONTAINERS` objects needs."""
MAX_VALUES = 2**20
"""Commas outside of strings in one body."""
MAX_KEYS = 2**18
"""Colons outside of strings in one body."""


class JsonRoute(APIRoute):
    """Route whose JSON bodies are not too complex to parse and have each key once."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Handler that reads such bodies."""
        handle = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return read_strictly


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if refusal := too_complex(body):
            raise refusal
        try:
            return strict_json(body)
        except RepeatedKey as error:
            raise InvalidRequest(str(error), error.key) from None


def too_complex(body: bytes) -> TooLarge | None:
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
