"""When a request is sent again, and when it is given up. A scoring request may always be: it changes nothing."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

from rm_optimizer.errors import MissingExtra, RMOptimizerError
from rm_optimizer.schema.checks import require_key
from rm_optimizer.serving.protocol import ErrorBody

try:
    import httpx
    from pydantic import ValidationError
except ModuleNotFoundError as error:
    raise MissingExtra("httpx", "serve") from error

RETRIED_STATUSES = frozenset({429, 503})
"""Our server's ways to say later. 502 and 504 are a proxy's, which does not say whether the server was reached."""
RETRIED_ERRORS = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""Connections that were refused, broke or did not come about. A connection that stays silent is waited for."""
FIRST_DELAY_SECONDS = 0.05
MOST_DELAY_SECONDS = 5.0
CONNECT_SECONDS = 10.0
if logging.getLogger("httpx").level == logging.NOTSET:
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request, over a run's progress


class RewardServerUnavailable(RMOptimizerError):
    """The reward server did not answer within the time given; there is no reward in its place."""


class RewardServerRefused(RMOptimizerError):
    """The reward server refused a request, and would again.

    Args:
        message: its own words.
        status: the HTTP status.
        kind: the error's type.
    """

    def __init__(self, message: str, status: int, kind: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class WrongVersion(RMOptimizerError):
    """Other weights answered than the caller expects."""


def bearer(api_key: str | None) -> dict[str, str]:
    """The header that brings the key.

    Raises:
        ConfigError: if no header can carry the key.
    """
    if api_key is None:
        return {}
    require_key("api_key", api_key)
    return {"Authorization": f"Bearer {api_key}"}


def broken(error: httpx.HTTPError, url: str) -> str:
    """Why a request got no answer, in words, where it may be sent again.

    Raises:
        RewardServerUnavailable: where it may not.
    """
    reason = f"{type(error).__name__} {error}".strip()
    if isinstance(error, RETRIED_ERRORS):
        return reason
    raise RewardServerUnavailable(f"{url}: {reason}") from error


class Deadline:
    """The time a call may take, and the pauses between its attempts: exponential, with jitter.

    Args:
        url: of the server, for the message.
        seconds: the whole call may take.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self.url = url
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._delay = FIRST_DELAY_SECONDS
        self._random = random.Random()  # of its own: a training run's generators stay as they are

    @property
    def left(self) -> float:
        """Seconds left, at least a millisecond."""
        return max(1e-3, self._end - time.monotonic())

    def timeout(self) -> httpx.Timeout:
        """For one attempt."""
        return httpx.Timeout(self.left, connect=min(self.left, CONNECT_SECONDS))

    def judge(
        self,
        got: httpx.Response | httpx.HTTPError,
        url: str,
        is_retried: Callable[[httpx.Response], bool] = lambda answer: answer.status_code in RETRIED_STATUSES,
    ) -> httpx.Response | float:
        """The answer if it is a success, else the seconds until the same request may be sent again.

        Args:
            got: answer to one attempt, or why there is none.
            url: that was asked.
            is_retried: whether the same request may succeed after a refusal.

        Raises:
            RewardServerRefused: if the server refuses, and would again.
            RewardServerUnavailable: if there is no time for another attempt, or it might be answered twice.
        """
        if isinstance(got, httpx.HTTPError):
            return self.pause(broken(got, url))
        if got.is_success:
            return got
        failure = refusal(got)
        if not is_retried(got):
            raise failure
        return self.pause(str(failure), retry_after(got))

    def pause(self, reason: str, least: float | None = None) -> float:
        """Seconds until the next attempt.

        Args:
            reason: why the last one failed.
            least: what the server asked for.

        Raises:
            RewardServerUnavailable: if that is later than the deadline.
        """
        pause = max(self._delay * self._random.uniform(0.5, 1.0), least or 0.0)
        self._delay = min(2 * self._delay, MOST_DELAY_SECONDS)
        if time.monotonic() + pause >= self._end:
            raise RewardServerUnavailable(f"{self.url} gave no answer within {self.seconds:g} s: {reason}")
        return pause


def retry_after(response: httpx.Response) -> float | None:
    """Seconds that an answer asks to wait, as a number or a date; None where it says nothing readable."""
    text = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def refusal(response: httpx.Response) -> RewardServerRefused:
    """The error of an answer that is not a success, in the server's own words where it has any."""
    try:
        detail = ErrorBody.model_validate({"error": response.json()["error"]}).error
    except (ValueError, KeyError, TypeError, ValidationError):
        text = response.text[:200] or response.reason_phrase
        return RewardServerRefused(f"{response.url}: {response.status_code} {text}", response.status_code, "HttpError")
    where = f" ({detail.param})" if detail.param and detail.param not in detail.message else ""
    message = f"{response.url}: {response.status_code} {detail.message}{where}"
    return RewardServerRefused(message, response.status_code, detail.type)


def is_loopback(url: str) -> bool:
    """Whether a URL is this machine's, to which no proxy leads."""
    return httpx.URL(url).host in ("localhost", "127.0.0.1", "::1")
