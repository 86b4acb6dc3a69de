"""The messages of a weight update as its sender puts them: repeated while that is safe, in the time that is left."""

from __future__ import annotations

import time
from typing import Any

import httpx
from pydantic import ValidationError

from rm_optimizer.serving.client.retries import (
    RETRIED_STATUSES,
    Deadline,
    RewardServerRefused,
    RewardServerUnavailable,
    broken,
    retry_after,
)
from rm_optimizer.serving.protocol import Commit, Outcome, WireModel
from rm_optimizer.serving.weights.group_transfer import TransferFailed

CONFLICT = 409
"""Status of an update that another one keeps out; with `Retry-After` where waiting helps."""


class CommitUnanswered(RewardServerUnavailable):
    """The server was told to swap the weights in, and has not said how that ended."""


class UpdateMessages:
    """Asks the routes under `/rm/weights` of a server; every message carries the update's id, so it may be repeated.

    Args:
        url: of the server.
        session: the HTTP session, its owner's to close.
    """

    def __init__(self, url: str, session: httpx.Client) -> None:
        self.url = url
        self.session = session

    def commit(self, batch_id: str, deadline: Deadline) -> Outcome:
        """How the update ended.

        Raises:
            CommitUnanswered: if nobody says.
            RewardServerRefused: if the server knows no such update, or its engine died.
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
        """The answer to a JSON message; see `request`."""
        return self.request("POST", route, deadline, json=message.model_dump(mode="json"))

    def request(self, method: str, route: str, deadline: Deadline, **content: Any) -> httpx.Response:
        """An answer that is a success.

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
    """Whether the same message may pass later: it was not the update's end, and another update's end is near."""
    if answer.status_code == CONFLICT:
        wait = retry_after(answer)
        return wait is not None and deadline.left >= 2 * wait
    return answer.status_code in RETRIED_STATUSES and not _is_outcome(answer)


def _is_outcome(response: httpx.Response) -> bool:
    """Whether an answer says how an update ended: the same message again gets the same answer."""
    try:
        Outcome.model_validate_json(response.content)
    except ValidationError:
        return False
    return True
