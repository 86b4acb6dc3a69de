"""Time limit of request bodies: a client that stops or trickles gets 408, and its connection is closed.

The rule is Apache's (`mod_reqtimeout`, `RequestReadTimeout body=20,MinRate=…`): a body has some seconds, and more for
every byte received. Only time spent waiting for the client counts, so that a busy server ends no request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rm_optimizer.serving.http.error_answers import error_answer
from rm_optimizer.serving.service.api_errors import ApiError

BODY_SECONDS = 20.0
"""Longest pause in a body, and the time of a body beyond what its bytes earn, in seconds."""
LEAST_BYTES_PER_SECOND = 128 * 2**10
"""Least rate of a body; each byte extends its time by the reciprocal in seconds."""


class SlowBody(ApiError):
    """The client stopped within its body, or sends it too slowly."""

    status, kind = 408, "SlowBody"
    headers: Mapping[str, str] = {"Connection": "close"}
    """The rest of the body is not awaited."""


class BodyTimeout:
    """Middleware that ends requests whose bodies do not arrive.

    Args:
        app: application that reads the bodies.
        seconds: longest pause in a body, in seconds.
        least_rate: bytes that earn one more second in all.
    """

    def __init__(self, app: ASGIApp, seconds: float = BODY_SECONDS, least_rate: float = LEAST_BYTES_PER_SECOND) -> None:
        self.app = app
        self.seconds = seconds
        self.least_rate = least_rate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 408 if the application leaves the `SlowBody` of its `receive` unanswered."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            await self.app(scope, _TimedReceive(receive, self.seconds, self.least_rate), send)
        except SlowBody as error:  # nothing has been sent: an answer begins once the body is read
            await error_answer(error)(scope, receive, send)


class _TimedReceive:
    """`receive` with a time limit on the body; it waits without one for the disconnection that follows."""

    def __init__(self, receive: Receive, seconds: float, least_rate: float) -> None:
        self._receive = receive
        self._seconds = seconds
        self._least_rate = least_rate
        self._waited = 0.0
        self._size = 0
        self._is_whole = False

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()
        left = self._seconds + self._size / self._least_rate - self._waited
        started = time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), min(self._seconds, left))
        except TimeoutError as error:
            raise self._slow(time.monotonic() - started) from error
        self._waited += time.monotonic() - started
        self._size += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        return message

    def _slow(self, last_wait: float) -> SlowBody:
        return SlowBody(
            f"{self._size} bytes of the body came in {self._waited + last_wait:.1f} s; expected the next within "
            f"{self._seconds:g} s and {self._least_rate:g} bytes a second; send the body in one go"
        )
