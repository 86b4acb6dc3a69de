"""Labeling page on this machine, and its answers, each of which is saved before it is confirmed.

The token in the page's address follows `#`, which browsers do not send; questions and answers need the token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import wilson_interval
from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.core.rows.messages import shown_response
from rm_optimizer.core.rows.prompts import as_messages
from rm_optimizer.data_efficiency.questions import ANSWER_LOG_SUFFIX, Question, standing_rows
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.records.ledger import Ledger, open_ledger

HOST = "127.0.0.1"
"""Address that other machines cannot reach."""
_POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'; "
    "script-src 'sha256-{}'; style-src 'sha256-{}'"
)
"""Content security policy, with places for the digests of the page's script and style."""
WORDS = ("A", "B", "tie", "skip")
"""Answers that the page can send."""


class AnswerLog:
    """Questions with their responses in random order, and their answers; `open_answer_log` opens it.

    Args:
        questions: the questions, in the order of asking.
        ledger: answers so far, as rows of the questions as they were shown. The last row of a question counts.
        answered: ids of questions answered elsewhere; they are asked only if they were answered here too.
        seed: seed of the order of responses.
    """

    def __init__(self, questions: Sequence[Question], ledger: Ledger, answered: Set[str], seed: int) -> None:
        self._ledger = ledger
        self._rows: dict[str, dict[str, Any]] = standing_rows(ledger.values())
        self._questions: dict[str, Question] = {}
        for question in questions:
            key = question.pair_id
            if key in self._rows or key not in answered:
                is_turned = np.random.default_rng([seed, int(key, 16)]).random() < 0.5
                first, second = sorted((question.response_a, question.response_b), reverse=is_turned)
                self._questions[key] = replace(question, response_a=first, response_b=second)

    @property
    def num_questions(self) -> int:
        """Number of all questions."""
        return len(self._questions)

    @property
    def num_answered(self) -> int:
        """Number of questions that were answered or skipped."""
        return len(self._rows)

    @property
    def current(self) -> Question | None:
        """First question without an answer; None if all have one."""
        return next((question for key, question in self._questions.items() if key not in self._rows), None)

    @property
    def first_share(self) -> Estimate | None:
        """Share of answers for a side that prefer the response shown first.

        It is None without such answers.
        """
        sides = [row["label"] for row in self._rows.values() if row["label"] in ("A", "B")]
        if not sides:
            return None
        share = sides.count("A") / len(sides)
        error = (share * (1 - share) / len(sides)) ** 0.5
        return Estimate(share, error, len(sides), *wilson_interval(share, len(sides)))

    def answer(self, pair_id: str, word: str) -> None:
        """Save an answer to the current question.

        Raises:
            DataError: if the word is not an answer, or another question is the current one.
        """
        if word not in WORDS:
            raise DataError(f"label must be one of {', '.join(WORDS)}, got {word!r}")
        if self.current is None or pair_id != self.current.pair_id:
            raise DataError("this question was answered in another window; here is the next one")
        self._keep(self.current.row() | {"label": word})

    def undo(self) -> None:
        """Withdraw the last answer, so that its question is asked again.

        Raises:
            DataError: if there is no answer.
        """
        if not self._rows:
            raise DataError("there is no answer to take back")
        self._keep({**self._rows[next(reversed(self._rows))], "label": None})

    def _keep(self, row: dict[str, Any]) -> None:
        self._ledger.append(row)
        if row["label"] is None:
            del self._rows[row["pair_id"]]
        else:
            self._rows[row["pair_id"]] = row


@contextmanager
def open_answer_log(
    path: Path, questions: Sequence[Question], *, answered: Set[str] = frozenset(), seed: int = 0
) -> Iterator[AnswerLog]:
    """Open the answers to a file of questions, for one process at a time.

    Args:
        path: file of the questions; its answers are in `NAME.labels.jsonl` in the same folder.
        questions: all questions of the file.
        answered: ids of questions with an answer in the file, which are not asked.
        seed: seed of the order of each question's responses.

    Raises:
        DataError: if another process has the answers open, or they belong to other questions.
    """
    identity = digest(sorted(question.pair_id for question in questions))
    remedy = f"move it away, or bring back the {path.name} that it belongs to"
    log = path.with_suffix(ANSWER_LOG_SUFFIX)
    with open_ledger(log, identity, other="the answers to other questions", remedy=remedy) as ledger:
        yield AnswerLog(questions, ledger, answered, seed)


class PageServer(ThreadingHTTPServer):
    """Labeling page on a port of this machine.

    A request must name this server as its host, and must not come from a page of another origin. Everything but the
    empty page requires the token. Therefore other machines, other sites and other users of this machine cannot read
    anything.

    Args:
        log: questions and answers.
        name: name of the questions' file, which the page shows.
        port: port; 0 picks a free one.

    Raises:
        ConfigError: if the port is taken.
    """

    daemon_threads = True

    def __init__(self, log: AnswerLog, name: str, port: int = 0) -> None:
        self.log, self.name, self.lock = log, name, Lock()
        self.token = secrets.token_urlsafe(18)
        self.page = files("rm_optimizer.data_efficiency").joinpath("labeling_page.html").read_bytes()
        # The page's own script and style run, and no other.
        inside = [self.page.partition(b"<%s>" % tag)[2].partition(b"</%s>" % tag)[0] for tag in (b"script", b"style")]
        self.policy = _POLICY.format(*(base64.b64encode(hashlib.sha256(text).digest()).decode() for text in inside))
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--port {port} cannot be used ({error.strerror}); leave it out to take a free one"
            ) from None

    @property
    def url(self) -> str:
        """Address of the page, with its token after `#`."""
        return f"http://{HOST}:{self.server_port}/#{self.token}"

    def state(self) -> dict[str, Any]:
        """Progress and current question, in the page's format."""
        question = self.log.current
        shown = question and {
            "pair_id": question.pair_id,
            "messages": [{"role": turn.role, "content": turn.shown()} for turn in as_messages(question.prompt)],
            "response_a": shown_response(question.response_a),
            "response_b": shown_response(question.response_b),
        }
        numbers = {"num_questions": self.log.num_questions, "num_answered": self.log.num_answered}
        return {"name": self.name, **numbers, "can_undo": self.log.num_answered > 0, "question": shown}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that the browser closed, and report anything else."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        if not self._is_own_request:
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers its own page alone")
        elif self.path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        elif self.path == "/state":
            self._answer(lambda: None)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such address")

    def do_POST(self) -> None:
        body = self._body()
        if not self._is_own_request or body is None:
            self.close_connection = True
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers its own page alone")
        elif self.path == "/answer":
            self._answer(lambda: self.server.log.answer(str(body.get("pair_id")), str(body.get("label"))))
        elif self.path == "/undo":
            self._answer(self.server.log.undo)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such address")

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing, since the command prints its own lines."""

    @property
    def _is_own_request(self) -> bool:
        hosts = [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]
        origin = self.headers.get("Origin")
        return self.headers.get("Host") in hosts and (origin is None or origin in [f"http://{host}" for host in hosts])

    def _body(self) -> dict[str, Any] | None:
        """Object of a JSON body; None if the body is something else."""
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
        given = self.headers.get("X-Label-Token", "")
        if not secrets.compare_digest(given.encode(), self.server.token.encode()):
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
        """Send an answer that must not be cached or embedded in another page."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", self.server.policy)
        self.end_headers()
        self.wfile.write(content)
