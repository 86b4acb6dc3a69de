"""Pages for a browser on this machine alone.

A request must name this server as its host, and must not come from a page of another origin. Everything but an empty
page requires a token, which is part of the address that the command prints. Therefore other machines, other sites and
other users of this machine cannot read anything.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import sys
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rm_optimizer.errors import ConfigError

HOST = "127.0.0.1"
"""Address that other machines cannot reach."""


class LocalServer(ThreadingHTTPServer):
    """Server on a port of this machine.

    Args:
        handler: class that answers the requests.
        port: port; 0 takes a free one.

    Raises:
        ConfigError: if the port is taken.

    Attributes:
        token: secret of this server's addresses.
    """

    daemon_threads = True

    def __init__(self, handler: type[LocalHandler], port: int) -> None:
        self.token = secrets.token_urlsafe(18)
        try:
            super().__init__((HOST, port), handler)
        except OSError as error:
            raise ConfigError(
                f"--port {port} cannot be used ({error.strerror}); leave it out to take a free one"
            ) from None

    def is_token(self, given: str) -> bool:
        """True for the server's token."""
        return secrets.compare_digest(given.encode(), self.token.encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that the browser closed; report anything else."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class LocalHandler(BaseHTTPRequestHandler):
    """Handler of a connection to a `LocalServer`."""

    server: LocalServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    @property
    def is_own_request(self) -> bool:
        """True if the request names this server as its host, and does not come from a page of another origin."""
        hosts = [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]
        origin = self.headers.get("Origin")
        return self.headers.get("Host") in hosts and (origin is None or origin in [f"http://{host}" for host in hosts])

    def send_content(self, status: HTTPStatus, kind: str, content: bytes, policy: str) -> None:
        """Send an answer that must not be cached or embedded in another page.

        Args:
            status: HTTP status.
            kind: media type.
            content: body of the answer.
            policy: content security policy.
        """
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing, since the command prints its own lines."""


def page_policy(page: bytes, also: Mapping[str, str]) -> str:
    """Content security policy that lets a page's own script and style run, and no other.

    Args:
        page: the page, with one `<script>` and one `<style>` at most.
        also: sources of further directives.
    """
    own = {}
    for directive, tag in (("script-src", b"script"), ("style-src", b"style")):
        inside = re.search(b"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
        if inside is not None:
            own[directive] = f"'sha256-{base64.b64encode(hashlib.sha256(inside[1]).digest()).decode()}'"
    closed = {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'"}
    return "; ".join(f"{name} {source}" for name, source in (closed | own | dict(also)).items())
