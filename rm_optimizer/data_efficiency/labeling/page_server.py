"""Server of the labeling page, for this machine alone; an answer is on the disk before it is confirmed.

A request must name this server as its host and, for questions and answers, carry the token of the page's address. The
token stands behind `#`, which browsers never send. So other sites and other users of the machine can neither read
questions nor give answers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Lock
from typing import Any

from rm_optimizer.core.rows.messages import as_messages
from rm_optimizer.data_efficiency.labeling.answer_log import AnswerLog
from rm_optimizer.errors import ConfigError, DataError

HOST = "127.0.0.1"
"""Address that no other machine reaches."""


class PageServer(ThreadingHTTPServer):
    """Labeling page on a port of this machine.

    Args:
        log: questions and answers.
        name: name of the questions' file, which the page shows.
        port: port; 0 takes a free one.

    Raises:
        ConfigError: if the port is taken.

    Attributes:
        token: secret of this server's page.
    """

    daemon_threads = True

    def __init__(self, log: AnswerLog, name: str, port: int = 0) -> None:
        self.log, self.name = log, name
        self.token = secrets.token_urlsafe(18)
        self.lock = Lock()
        self.page = files("rm_optimizer.data_efficiency.labeling").joinpath("page.html").read_bytes()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--port {port} cannot be used ({error.strerror}); leave it out to take a free one"
            ) from None

    @property
    def url(self) -> str:
        """Address of the page, its token behind `#`."""
        return f"http://{HOST}:{self.server_port}/#{self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a connection that the browser closed; report anything else."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def state(self) -> dict[str, Any]:
        """Progress and current question, as the page reads them."""
        question = self.log.current
        shown = question and {
            "pair_id": question.pair_id,
            "messages": [message.to_dict() for message in as_messages(question.prompt)],
            "response_a": question.response_a,
            "response_b": question.response_b,
        }
        numbers = {"num_questions": self.log.num_questions, "num_answered": self.log.num_answered}
        return {"name": self.name, **numbers, "can_undo": self.log.num_answered > 0, "question": shown}


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        if not self._is_ours():
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers its own page alone")
        elif self.path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        elif self.path == "/state":
            self._answer(lambda: None)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such address")

    def do_POST(self) -> None:
        body = self._body()
        if not self._is_ours() or body is None:
            self.close_connection = True
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers its own page alone")
        elif self.path == "/answer":
            self._answer(lambda: self.server.log.answer(str(body.get("pair_id")), str(body.get("label"))))
        elif self.path == "/undo":
            self._answer(self.server.log.undo)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such address")

    def _is_ours(self) -> bool:
        """True if the request names this server as its host, and comes from no page of another origin."""
        hosts = [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]
        origin = self.headers.get("Origin")
        return self.headers.get("Host") in hosts and (origin is None or origin in [f"http://{host}" for host in hosts])

    def _body(self) -> dict[str, Any] | None:
        """Object of a JSON body; None where there is none."""
        size = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != "application/json" or not re.fullmatch(r"\d{1,4}", size):
            return None
        try:
            found = json.loads(self.rfile.read(int(size)))
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _answer(self, change: Callable[[], None]) -> None:
        """Make a change and send the state after it, if the page's token is there."""
        if not secrets.compare_digest(self.headers.get("X-Label-Token", "").encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "the address lacks its token; open the one that rm-opt label printed")
            return
        with self.server.lock:
            try:
                change()
            except DataError as error:
                self._send_json(HTTPStatus.CONFLICT, self.server.state() | {"error": str(error)})
            except OSError as error:
                self._refuse(HTTPStatus.INSUFFICIENT_STORAGE, f"Not saved: {error.strerror}. Make room and try again.")
            else:
                self._send_json(HTTPStatus.OK, self.server.state())

    def _refuse(self, status: HTTPStatus, error: str) -> None:
        self._send_json(status, {"error": error})

    def _send_json(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", _policy(self.server.page))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the command prints its own lines."""


def _policy(page: bytes) -> str:
    """Content security policy that lets the page's own script and style run, and no other."""
    found = {}
    for tag in (b"script", b"style"):
        inside = re.search(b"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
        assert inside is not None
        found[tag] = base64.b64encode(hashlib.sha256(inside[1]).digest()).decode()
    own = f"script-src 'sha256-{found[b'script']}'; style-src 'sha256-{found[b'style']}'"
    return f"default-src 'none'; {own}; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
