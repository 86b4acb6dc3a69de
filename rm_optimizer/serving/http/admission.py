"""Admission control: limits on the open requests and on the bytes of their bodies, counted before any is parsed."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rm_optimizer.serving.http.connections import ConnectionLimits
from rm_optimizer.serving.http.error_answers import error_answer
from rm_optimizer.serving.service.api_errors import ApiError, Overloaded, TooLarge
from rm_optimizer.serving.service.fair_share import CLIENT, FairShare

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


class AdmissionControl:
    """Middleware that refuses requests while too many are open, and bodies that are too large.

    Args:
        app: application behind this middleware.
        max_body_bytes: largest size of one body.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.requests = FairShare(ConnectionLimits.of_process().open // 2)  # the other half answers probes and refusals
        self.bytes = FairShare(MAX_OPEN_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 413 or 503."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        CLIENT.set((scope.get("client") or [""])[0])
        chunks = list[bytes]()  # counted as they arrive, also those of a body that never ends
        try:
            refusal = await self._refusal(scope, receive, chunks)
            if refusal is not None:
                await error_answer(refusal)(scope, receive, send)
                return
            with self.requests.holding(1):
                await self.app(scope, _replayed(chunks[0], receive), send)
        finally:
            self.bytes.release(id(chunks))

    async def _refusal(self, scope: Scope, receive: Receive, chunks: list[bytes]) -> ApiError | None:
        """Read the body into one chunk, or return the reason to refuse it; a request opens once it is read."""
        if count := self.requests.excess(1):
            return Overloaded(f"{count} requests are open, which is the most")
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self.max_body_bytes:
            return self._too_large()
        size = 0
        while True:
            message = await receive()
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            self.bytes.hold(id(chunks), size)
            if size > self.max_body_bytes:
                return self._too_large()
            if open_bytes := self.bytes.excess(size):
                return Overloaded(f"the bodies of open requests hold {open_bytes} bytes")
            if not message.get("more_body", False):
                chunks[:] = [b"".join(chunks)]
                return _too_complex(chunks[0])

    def _too_large(self) -> TooLarge:
        return TooLarge(f"expected a body of at most {self.max_body_bytes} bytes; split the request")


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


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body that was read, then the messages that follow."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
