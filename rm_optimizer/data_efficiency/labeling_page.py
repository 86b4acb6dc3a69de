"""Labeling page on this machine, and its answers, each of which is saved before it is confirmed.

The token in the page's address follows `#`, which browsers do not send; questions and answers need the token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import wilson_interval
from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.core.rows.messages import as_messages
from rm_optimizer.data_efficiency.questions import ANSWER_LOG_SUFFIX, Question, standing_rows
from rm_optimizer.errors import DataError
from rm_optimizer.records.ledger import Ledger, open_ledger
from rm_optimizer.serving.http.local_pages import HOST, LocalHandler, LocalServer, page_policy

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
        left_out = answered - self._rows.keys()
        asked = [question for question in questions if question.pair_id not in left_out]
        self._questions = {question.pair_id: _turned(question, seed) for question in asked}

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
            DataError: if the word is no answer, or another question is the current one.
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


def _turned(question: Question, seed: int) -> Question:
    """The question with its responses exchanged or not, by its texts and the seed."""
    first, second = sorted((question.response_a, question.response_b))
    if np.random.default_rng([seed, int(question.pair_id, 16)]).random() < 0.5:
        first, second = second, first
    return Question(question.pair_id, question.prompt, first, second, question.rank)


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
        self.page = files("rm_optimizer.data_efficiency").joinpath("labeling_page.html").read_bytes()
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
