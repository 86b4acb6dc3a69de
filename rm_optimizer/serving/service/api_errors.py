"""Failures of a request, each with an HTTP status and a typed body that states the remedy."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rm_optimizer.errors import EngineFailed, EngineUnavailable, RMOptimizerError, WeightsRefused
from rm_optimizer.serving.protocol import ErrorBody, ErrorDetail

MAX_HEADER_BYTES = 16 * 2**10
"""Most bytes of a request line and its headers."""
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
    """Headers of the answer in addition to its body's."""

    def __init__(self, message: str, param: str | None = None, *, retry_after_seconds: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        if retry_after_seconds is not None:
            self.headers = {**self.headers, "Retry-After": str(retry_after_seconds)}


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


_KINDS = {400: "InvalidRequest", 404: "NotFound", 405: "MethodNotAllowed"}
_HINTS = dict.fromkeys(
    ("activation", "softmax", "normalize"), "unknown field; use_activation: false asks for raw rewards"
) | dict.fromkeys(
    ("prompt", "responses"), 'unknown field here; POST /rm/score takes {"items": [{"prompt": …, "responses": […]}]}'
)
_ROUTES = "POST /classify, /rm/score or /get_reward for rewards, GET /ready, /rm/info or /metrics; GET /docs lists all"


def error_answer(error: ApiError) -> JSONResponse:
    """HTTP answer of a failure."""
    return _answer(str(error), error.kind, error.status, error.param, error.headers)


def _answer(
    message: str, kind: str, status: int, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """HTTP answer whose quotes of the request are cut, with question marks for halves of surrogate pairs."""

    def quoted(text: str) -> str:
        short = text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]} …"
        return short.encode("utf-8", "replace").decode()

    param = None if param is None else quoted(param)
    body = ErrorBody(error=ErrorDetail(message=quoted(message), type=kind, param=param, code=status))
    return JSONResponse(body.model_dump(), status, headers=headers)


def install_error_answers(app: FastAPI) -> None:
    """Install the handlers that give every failure its typed body."""
    for kind in (ApiError, EngineUnavailable, WeightsRefused):
        app.add_exception_handler(kind, _known)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(
        Exception, lambda request, error: _answer("the server failed; its log says why", "InternalError", 500)
    )


def error_responses(*statuses: int) -> dict[int | str, dict[str, object]]:
    """Failures of a route, for its documentation; the default replaces FastAPI's 422, which no request gets."""
    return {"default": {"model": ErrorBody}, **{status: {"model": ErrorBody} for status in statuses}}


def _known(request: Request, error: Exception) -> JSONResponse:
    """Answer of a failure that has a class."""
    if isinstance(error, EngineUnavailable):
        return error_answer(ServerFailed(str(error)) if isinstance(error, EngineFailed) else NotReady(str(error)))
    if isinstance(error, ApiError):
        return error_answer(error)
    return _answer(str(error), type(error).__name__, 400)


def _invalid(request: Request, error: Exception) -> JSONResponse:
    """Return the first error of the body."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    context = first.get("ctx", {})
    if first["type"] == "json_invalid":
        return error_answer(InvalidRequest(f"the body is not JSON: {context.get('error', 'cannot be read')}"))
    kind = request.headers.get("content-type")
    if first["loc"] == ("body",) and "json" not in (kind or ""):
        return error_answer(
            InvalidRequest(f"expected a body with the header content-type: application/json, got {kind}")
        )
    places = [place for place in first["loc"][1:] if not str(place).startswith("(")]  # no tag of a union's member
    if first["type"] == "unknown_field":
        places.append(context["field"])
    param = "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in places).lstrip(".") or None
    if first["type"] == "too_long":
        return error_answer(TooLarge(f"{param}: expected at most {context['max_length']} entries; split it", param))
    hint = _HINTS.get(str(places[-1])) if places and first["type"] == "unknown_field" else None
    return error_answer(InvalidRequest(f"{param or 'the body'}: {hint or first['msg']}", param))


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind, detail, cause = _KINDS.get(error.status_code, "HttpError"), str(error.detail), error.__cause__
    if isinstance(cause, ApiError):
        return error_answer(cause)
    if error.status_code == 404:
        detail = f"expected {_ROUTES}; got {request.method} {request.url.path[:64]}"
    elif cause is not None:
        encoding = request.headers.get("content-encoding")
        detail = f"expected JSON in UTF-8, got content-encoding {encoding}" if encoding else f"the body: {cause}"
    return _answer(detail, kind, error.status_code, headers=error.headers)
