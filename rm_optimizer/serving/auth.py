"""The API key, asked for before anything else is looked at: on every route, the documentation included."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rm_optimizer.serving.api_errors import Unauthorized
from rm_optimizer.serving.error_answers import error_answer


class BearerAuth:
    """Lets a request through if it brings `Authorization: Bearer KEY`; compared in constant time.

    Args:
        app: what is behind the door.
        api_key: the key.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 to whoever does not bring the key."""
        if scope["type"] == "lifespan" or self._is_key(Headers(scope=scope).get("authorization", "")):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            answer = error_answer(
                Unauthorized("expected the header Authorization: Bearer KEY with the server's API key")
            )
            await answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_key(self, header: str) -> bool:
        scheme, _, given = header.partition(" ")
        return hmac.compare_digest(given.strip().encode(), self._key) and scheme.lower() == "bearer"
