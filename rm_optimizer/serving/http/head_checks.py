"""Checks of key, host and size of the headers before a body is read, on every route including the documentation."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from starlette.datastructures import Headers
from starlette.types import Scope

from rm_optimizer.serving.service.api_errors import (
    MAX_HEADER_BYTES,
    ApiError,
    HeadersTooLarge,
    InvalidRequest,
    Unauthorized,
)

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Paths without a key, for the liveness probes of an orchestrator; they reveal only that the server runs."""
UPDATE_PATHS = "/rm/weights"
"""Prefix of the paths of weight updates, which may have a key of their own."""
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_PORT = re.compile(r":\d+\Z")


class AmbiguousLength(InvalidRequest):
    """A proxy may read another end of the body than this server, so the connection ends."""

    headers: Mapping[str, str] = {"connection": "close"}


Check: TypeAlias = Callable[[Scope], ApiError | None]
"""Function that returns the reason to refuse a request by its head; None lets it pass."""


def bearer_check(api_key: str | None, update_key: str | None = None) -> Check:
    """Check of `Authorization: Bearer KEY`, compared in constant time.

    Args:
        api_key: key of all paths but `OPEN_PATHS`; None requires no key.
        update_key: key of the paths of weight updates in its place; None uses the `api_key` there too.
    """

    def check(scope: Scope) -> ApiError | None:
        is_update = str(scope.get("path", "")).startswith(UPDATE_PATHS)
        key = update_key if is_update and update_key is not None else api_key
        if key is None or (scope["path"] in OPEN_PATHS and scope.get("method") in ("GET", "HEAD")):
            return None
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if hmac.compare_digest(given.strip().encode(), key.encode()) and scheme.lower() == "bearer":
            return None
        which = "API" if key == api_key else "update"
        return Unauthorized(f"expected the header Authorization: Bearer KEY with the server's {which} key")

    return check


def local_host_check(scope: Scope) -> ApiError | None:
    """Check against DNS rebinding: the `Host` of a request must be this machine."""
    host = Headers(scope=scope).get("host", "" if scope.get("http_version") != "1.0" else "localhost")  # no browser's
    if scope["type"] != "http" or _PORT.sub("", host).lower() in LOCAL_HOSTS:
        return None
    return InvalidRequest(
        f"expected the header Host to name this machine, got {host!r}; serve with --api-key for other names"
    )


def header_size_check(scope: Scope) -> ApiError | None:
    """Check of the headers' size, of which the protocol limits only several pieces, and for one length of the body."""
    if scope["type"] != "http":
        return None
    names = set(Headers(scope=scope).keys())
    if {"content-length", "transfer-encoding"} <= names:  # h11 takes what follows for a request
        return AmbiguousLength("expected either content-length or transfer-encoding, got both")
    target = scope.get("raw_path") or scope["path"].encode()
    line = len(scope["method"]) + len(target) + len(scope["query_string"]) + len(" ? HTTP/1.1\r\n")
    size = line + sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"]) + len("\r\n")
    return HeadersTooLarge() if size > MAX_HEADER_BYTES else None
