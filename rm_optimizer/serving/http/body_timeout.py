"""Time limit of request bodies: a client that stops or trickles gets 408, and its connection is closed.

The rule is Apache's (`mod_reqtimeout`, `RequestReadTimeout body=20,MinRate=…`): a body has some seconds, and more for
every byte received. Only time spent waiting for the client counts, so that a busy server ends no request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rm_optimizer.serving.http.error_answers import error_answer
from rm_optimizer.serving.service.api_errors import ApiError

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
class BodyTimeout:
    """Middleware that ends requests whose bodies do not arrive.

    Args:
        app: application that reads the bodies.
        seconds: longest pause in a body, in seconds.
        least_rate: bytes that earn one more second in all.
    """

    app: ASGIApp
    seconds: float = BODY_SECONDS
    least_rate: float = LEAST_BYTES_PER_SECOND

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 408 if the application leaves the `SlowBody` of its `receive` unanswered."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            await self.app(scope, _TimedReceive(receive, self.seconds, self.least_rate), send)
        except SlowBody as error:  # nothing has been sent: an answer begins once the body is read
            await error_answer(error)(scope, receive, send)


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
            raise self._slow(time.monotonic() - started) from error
        self.waited += time.monotonic() - started
        self.size += len(message.get("body", b""))
        self.is_whole = not message.get("more_body", False)
        return message

    def _slow(self, last_wait: float) -> SlowBody:
        return SlowBody(
            f"{self.size} bytes of the body came in {self.waited + last_wait:.1f} s; expected the next within "
            f"{self.seconds:g} s and {self.least_rate:g} bytes a second; send the body at once"
        )
