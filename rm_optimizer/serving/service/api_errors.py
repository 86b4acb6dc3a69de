"""Failures of a request, each with an HTTP status and a typed body that states the remedy."""

from __future__ import annotations

from collections.abc import Mapping

from rm_optimizer.errors import RMOptimizerError
from rm_optimizer.serving.protocol import ErrorBody, ErrorDetail

MAX_HEADER_BYTES = 16 * 2**10
"""Most bytes of a request line and its headers; h11's own limit for incomplete ones."""
MAX_QUOTED = 1000
"""Most characters of a message, and of a field's name."""


class ApiError(RMOptimizerError):
    """Failure of a request.

    Args:
        message: expected value, value found and remedy.
        param: field at fault.
        retry_after_seconds: seconds until the next attempt; None if a retry cannot help.
    """

    status = 400
    kind = "BadRequest"
    headers: Mapping[str, str] = {}
    """Headers of the answer beside those of its body."""

    def __init__(self, message: str, param: str | None = None, *, retry_after_seconds: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        if retry_after_seconds is not None:
            self.headers = {**self.headers, "Retry-After": str(retry_after_seconds)}

    def body(self) -> ErrorBody:
        """The answer's body."""
        return error_body(str(self), self.kind, self.status, self.param)


class InvalidRequest(ApiError):
    """A field has the wrong type, is empty or unknown, or the body is not JSON."""

    kind = "InvalidRequest"


class TooLong(ApiError):
    """A sequence has more tokens than the model reads; it is refused, not truncated."""

    kind = "TooLong"


class Unauthorized(ApiError):
    """The API key is missing or wrong."""

    status, kind = 401, "Unauthorized"
    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}


class UnknownModel(ApiError):
    """The request names a model that is not served."""

    status, kind = 404, "UnknownModel"


class TooLarge(ApiError):
    """A request exceeds the limits of the server; it must be split."""

    status, kind = 413, "TooLarge"


class HeadersTooLarge(ApiError):
    """The request line and its headers hold more than `MAX_HEADER_BYTES`."""

    status, kind = 431, "HeadersTooLarge"

    def __init__(self) -> None:
        super().__init__(f"expected a request line and headers of at most {MAX_HEADER_BYTES} bytes; send fewer")


class ServerFailed(ApiError):
    """The engine failed for good, and the server ends."""

    status, kind = 500, "ServerFailed"


class NonFiniteScore(ApiError):
    """The model returned NaN or infinity for a sequence, so the request has no answer."""

    status, kind = 500, "NonFiniteScore"


class Overloaded(ApiError):
    """The queue is full; the same request may succeed later.

    Args:
        message: state of the queue.
        retry_after_seconds: seconds until the next attempt.
    """

    status, kind = 503, "Overloaded"

    def __init__(self, message: str, retry_after_seconds: int = 1) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)


class NotReady(Overloaded):
    """The model is loading, restarting, or failed its parity probe."""

    kind = "NotReady"


def error_body(message: str, kind: str, status: int, param: str | None = None) -> ErrorBody:
    """Body of an unsuccessful answer; its quotes of the request are cut to `MAX_QUOTED` characters."""
    param = None if param is None else _encodable(param)
    return ErrorBody(error=ErrorDetail(message=_encodable(message), type=kind, param=param, code=status))


def _encodable(text: str) -> str:
    """Text cut to the limit, with question marks for halves of surrogate pairs."""
    short = text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]} …"
    return short.encode("utf-8", "replace").decode()
