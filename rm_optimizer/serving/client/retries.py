"""Retry rules of requests. A scoring request changes nothing, so it may always be repeated."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

from rm_optimizer.errors import MissingExtra, RewardServerRefused, RewardServerUnavailable
from rm_optimizer.schema.checks import require_key
from rm_optimizer.serving.protocol import ErrorBody

try:
    import httpx
    from pydantic import ValidationError
except ModuleNotFoundError as error:
    raise MissingExtra("httpx", "serve") from error

RETRIED_STATUSES = frozenset({429, 503})
"""Statuses by which the server asks to retry. After a proxy's 502 or 504 it is unknown if the server was reached."""
RETRIED_ERRORS = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""Errors of refused or broken connections. A connection without an answer is not an error; its timeout applies."""
FIRST_DELAY_SECONDS = 0.05
MOST_DELAY_SECONDS = 5.0
CONNECT_SECONDS = 10.0
if logging.getLogger("httpx").level == logging.NOTSET:
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request, over a run's progress


def bearer(api_key: str | None) -> dict[str, str]:
    """Authorization header with the key.

    Raises:
        ConfigError: if no header can carry the key.
    """
    if api_key is None:
        return {}
    require_key("api_key", api_key)
    return {"Authorization": f"Bearer {api_key}"}


def broken(error: httpx.HTTPError, url: str) -> str:
    """Reason of a failed attempt, in words, if the request may be sent again.

    Raises:
        RewardServerUnavailable: if it may not.
    """
    reason = f"{type(error).__name__} {error}".strip()
    if isinstance(error, RETRIED_ERRORS):
        return reason
    raise RewardServerUnavailable(f"{url}: {reason}") from error


class Deadline:
    """Time limit of a call, with exponential pauses and jitter between its attempts.

    Args:
        url: address of the server, for the message.
        seconds: seconds for the whole call.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self.url = url
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._delay = FIRST_DELAY_SECONDS
        self._random = random.Random()  # a generator of its own leaves those of a training run unchanged

    @property
    def left(self) -> float:
        """Seconds left, at least a millisecond."""
        return max(1e-3, self._end - time.monotonic())

    def timeout(self) -> httpx.Timeout:
        """Timeouts of one attempt."""
        return httpx.Timeout(self.left, connect=min(self.left, CONNECT_SECONDS))

    def judge(
        self,
        got: httpx.Response | httpx.HTTPError,
        url: str,
        is_retried: Callable[[httpx.Response], bool] = lambda answer: answer.status_code in RETRIED_STATUSES,
    ) -> httpx.Response | float:
        """Return a successful answer, or the seconds until the request may be repeated.

        Args:
            got: answer of one attempt, or the error in its place.
            url: address of the request.
            is_retried: True if the same request may succeed after a refusal.

        Raises:
            RewardServerRefused: if the server refuses and a repetition would be refused too.
            RewardServerUnavailable: if no time is left for another attempt, or the request might run twice.
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
            reason: error of the last attempt.
            least: seconds that the server asked for.

        Raises:
            RewardServerUnavailable: if that is later than the deadline.
        """
        pause = max(self._delay * self._random.uniform(0.5, 1.0), least or 0.0)
        self._delay = min(2 * self._delay, MOST_DELAY_SECONDS)
        if time.monotonic() + pause >= self._end:
            raise RewardServerUnavailable(f"{self.url} gave no answer within {self.seconds:g} s: {reason}")
        return pause


def retry_after(response: httpx.Response) -> float | None:
    """Seconds of an answer's `Retry-After`, a number or a date; None if absent or unreadable."""
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
    """Error of an unsuccessful answer, with the server's own message if it has one."""
    try:
        detail = ErrorBody.model_validate({"error": response.json()["error"]}).error
    except (ValueError, KeyError, TypeError, ValidationError):
        text = response.text[:200] or response.reason_phrase
        return RewardServerRefused(f"{response.url}: {response.status_code} {text}", response.status_code, "HttpError")
    where = f" ({detail.param})" if detail.param and detail.param not in detail.message else ""
    message = f"{response.url}: {response.status_code} {detail.message}{where}"
    return RewardServerRefused(message, response.status_code, detail.type)


def is_loopback(url: str) -> bool:
    """True for a URL of this machine, which is reached without a proxy."""
    return httpx.URL(url).host in ("localhost", "127.0.0.1", "::1")
