"""Messages of a weight update from its sender, repeated while that is safe and time is left."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import ValidationError

from rm_optimizer.errors import RewardServerRefused, RewardServerUnavailable, TransferFailed
from rm_optimizer.serving.client.retries import RETRIED_STATUSES, Deadline, broken, retry_after
from rm_optimizer.serving.protocol import WireModel
from rm_optimizer.serving.update_protocol import Commit, Outcome

CONFLICT = 409
"""Status of an update that another one blocks; with `Retry-After` if waiting helps."""


class CommitUnanswered(RewardServerUnavailable):
    """The outcome of a commit is unknown: the server has not answered."""


@dataclass(frozen=True, eq=False)
class UpdateMessages:
    """Client of the routes under `/rm/weights`; every message carries the update's id, so it may be repeated.

    Args:
        url: address of the server.
        session: HTTP session, which its owner closes.
    """

    url: str
    session: httpx.Client

    def commit(self, batch_id: str, deadline: Deadline) -> Outcome:
        """Commit the update and return its outcome.

        Raises:
            CommitUnanswered: if the server does not answer.
            RewardServerRefused: if the server has no such update, or its engine died.
        """
        try:
            return Outcome.model_validate(self.post("commit", Commit(batch_id=batch_id), deadline).json())
        except RewardServerUnavailable as error:
            raise CommitUnanswered(str(error)) from error
        except RewardServerRefused as error:
            if error.status < 500 or error.status in RETRIED_STATUSES:
                raise
            raise CommitUnanswered(str(error)) from error

    def post(self, route: str, message: WireModel, deadline: Deadline) -> httpx.Response:
        """Answer to a JSON message; see `request`."""
        return self.request("POST", route, deadline, json=message.model_dump(mode="json"))

    def request(self, method: str, route: str, deadline: Deadline, **content: Any) -> httpx.Response:
        """Successful answer to a request.

        Raises:
            RewardServerRefused: if the server refuses.
            RewardServerUnavailable: if it does not answer in time.
            TransferFailed: if a body breaks off: it is read once, and the update is tried again as a whole.
        """
        url = f"{self.url}/rm/weights/{route}"
        while True:
            got: httpx.Response | httpx.HTTPError
            try:
                got = self.session.request(method, url, timeout=deadline.timeout(), **content)
            except httpx.HTTPError as error:
                if "content" in content:
                    broken(error, self.url)
                    raise TransferFailed(f"the upload broke off: {error}") from error
                got = error
            judged = deadline.judge(got, self.url, lambda answer: _may_be_repeated(answer, deadline))
            if isinstance(judged, httpx.Response):
                return judged
            time.sleep(judged)


def _may_be_repeated(answer: httpx.Response, deadline: Deadline) -> bool:
    """True if the same message may succeed later: the update has not ended, and the blocking one will soon."""
    if answer.status_code == CONFLICT:
        wait = retry_after(answer)
        return wait is not None and deadline.left >= 2 * wait
    return answer.status_code in RETRIED_STATUSES and not _is_outcome(answer)


def _is_outcome(response: httpx.Response) -> bool:
    """True if an answer is the outcome of an update, which a repeated message gets again."""
    try:
        Outcome.model_validate_json(response.content)
    except ValidationError:
        return False
    return True
