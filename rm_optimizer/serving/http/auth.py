"""Checks of key and host before a body is read, on every route including the documentation."""

from __future__ import annotations

import hmac
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rm_optimizer.serving.http.error_answers import error_answer
from rm_optimizer.serving.service.api_errors import InvalidRequest, Unauthorized

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Paths without a key, for the liveness probes of an orchestrator; they reveal only that the server runs."""
UPDATE_PATHS = "/rm/weights"
"""Prefix of the paths of weight updates, which may have a key of their own."""
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_PORT = re.compile(r":\d+\Z")


class BearerAuth:
    """Middleware that requires `Authorization: Bearer KEY`, compared in constant time.

    Args:
        app: application behind this middleware.
        api_key: key of all paths but `OPEN_PATHS`; None requires no key.
        update_key: key of the paths of weight updates in its place; None uses the `api_key` there too.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, update_key: str | None = None) -> None:
        self.app = app
        self._key = None if api_key is None else api_key.encode()
        self._update_key = self._key if update_key is None else update_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 without the right key."""
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            which = "update" if _is_update(scope) and self._update_key != self._key else "API"
            answer = error_answer(
                Unauthorized(f"expected the header Authorization: Bearer KEY with the server's {which} key")
            )
            await answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may_pass(self, scope: Scope) -> bool:
        key = self._update_key if _is_update(scope) else self._key
        if key is None or (scope["path"] in OPEN_PATHS and scope.get("method") in ("GET", "HEAD")):
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        return hmac.compare_digest(given.strip().encode(), key) and scheme.lower() == "bearer"


class LocalHost:
    """Middleware against DNS rebinding: it refuses requests whose `Host` is not this machine.

    Args:
        app: application behind this middleware.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400 to another host."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else "localhost"
        if _PORT.sub("", host).lower() in LOCAL_HOSTS:
            await self.app(scope, receive, send)
            return
        text = f"expected the header Host to name this machine, got {host!r}; serve with --api-key for other names"
        await error_answer(InvalidRequest(text))(scope, receive, send)


def _is_update(scope: Scope) -> bool:
    return str(scope.get("path", "")).startswith(UPDATE_PATHS)
