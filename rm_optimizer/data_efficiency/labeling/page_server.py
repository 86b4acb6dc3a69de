"""Server of the labeling page, for this machine only; an answer is saved before it is confirmed.

The token in the page's address follows `#`, which browsers do not send; questions and answers need the token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from http import HTTPStatus
from importlib.resources import files
from threading import Lock
from typing import Any

from rm_optimizer.core.rows.messages import as_messages
from rm_optimizer.data_efficiency.labeling.answer_log import AnswerLog
from rm_optimizer.errors import DataError
from rm_optimizer.serving.http.local_pages import HOST, LocalHandler, LocalServer, page_policy


class PageServer(LocalServer):
    """Labeling page on a port of this machine.

    Args:
        log: questions and answers.
        name: name of the questions' file, which the page shows.
        port: port; 0 picks a free one.

    Raises:
        ConfigError: if the port is taken.
    """

    def __init__(self, log: AnswerLog, name: str, port: int = 0) -> None:
        self.log, self.name = log, name
        self.lock = Lock()
        self.page = files("rm_optimizer.data_efficiency.labeling").joinpath("page.html").read_bytes()
        self.policy = page_policy(self.page, {"connect-src": "'self'"})
        super().__init__(_Handler, port)

    @property
    def url(self) -> str:
        """Address of the page, with its token after `#`."""
        return f"http://{HOST}:{self.server_port}/#{self.token}"

    def state(self) -> dict[str, Any]:
        """Progress and current question, in the page's format."""
        question = self.log.current
        shown = question and {
            "pair_id": question.pair_id,
            "messages": [message.to_dict() for message in as_messages(question.prompt)],
            "response_a": question.response_a,
            "response_b": question.response_b,
        }
        numbers = {"num_questions": self.log.num_questions, "num_answered": self.log.num_answered}
        return {"name": self.name, **numbers, "can_undo": self.log.num_answered > 0, "question": shown}


class _Handler(LocalHandler):
    server: PageServer

    def do_GET(self) -> None:
        if not self.is_own_request:
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers its own page alone")
        elif self.path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        elif self.path == "/state":
            self._answer(lambda: None)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such address")

    def do_POST(self) -> None:
        body = self._body()
        if not self.is_own_request or body is None:
            self.close_connection = True
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers its own page alone")
        elif self.path == "/answer":
            self._answer(lambda: self.server.log.answer(str(body.get("pair_id")), str(body.get("label"))))
        elif self.path == "/undo":
            self._answer(self.server.log.undo)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such address")

    def _body(self) -> dict[str, Any] | None:
        """Object of a JSON body; None if the body is no object."""
        size = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != "application/json" or not re.fullmatch(r"\d{1,4}", size):
            return None
        try:
            found = json.loads(self.rfile.read(int(size)))
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _answer(self, change: Callable[[], None]) -> None:
        """Make a change and send the new state, if the request has the page's token."""
        if not self.server.is_token(self.headers.get("X-Label-Token", "")):
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
        self.send_content(status, kind, content, self.server.policy)
