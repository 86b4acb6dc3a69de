"""Typed JSON bodies of all failures: of this package, of FastAPI, and of uncaught exceptions."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rm_optimizer.errors import EngineFailed, EngineUnavailable
from rm_optimizer.serving.protocol import ErrorBody
from rm_optimizer.serving.service.api_errors import (
    ApiError,
    InvalidRequest,
    NotReady,
    ServerFailed,
    TooLarge,
    error_body,
)

_KINDS = {400: "InvalidRequest", 404: "NotFound", 405: "MethodNotAllowed"}
_HINTS = dict.fromkeys(
    ("activation", "softmax", "normalize"), "unknown field; use_activation: false asks for raw rewards"
)


def error_answer(error: ApiError) -> JSONResponse:
    """HTTP answer of a failure."""
    return JSONResponse(error.body().model_dump(), error.status, headers=dict(error.headers))


def install_error_answers(app: FastAPI) -> None:
    """Install the handlers that give every failure its typed body."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(EngineUnavailable, _unavailable)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unforeseen)


def error_responses(*statuses: int) -> dict[int | str, dict[str, object]]:
    """Failures of a route, for its documentation."""
    return {status: {"model": ErrorBody} for status in statuses}


def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error_answer(error)


def _unavailable(request: Request, error: Exception) -> JSONResponse:
    return error_answer(ServerFailed(str(error)) if isinstance(error, EngineFailed) else NotReady(str(error)))


def _invalid(request: Request, error: Exception) -> JSONResponse:
    """Return the first error of the body."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    context = first.get("ctx", {})
    if first["type"] == "json_invalid":
        return error_answer(InvalidRequest(f"the body is not JSON: {context.get('error', 'cannot be read')}"))
    places = [place for place in first["loc"][1:] if _is_place(place)]
    if first["type"] == "unknown_field":
        places.append(context["field"])
    param = "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in places).lstrip(".") or None
    if first["type"] == "too_long":
        return error_answer(TooLarge(f"{param}: expected at most {context['max_length']} entries; split it", param))
    hint = _HINTS.get(str(places[-1])) if places and first["type"] == "unknown_field" else None
    return error_answer(InvalidRequest(f"{param or 'the body'}: {hint or first['msg']}", param))


def _is_place(place: object) -> bool:
    """True for a field or an index, False for the tag of a union's member."""
    return isinstance(place, int) or not str(place).startswith("(")


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = _KINDS.get(error.status_code, "HttpError")
    body = error_body(str(error.detail), kind, error.status_code)
    return JSONResponse(body.model_dump(), error.status_code, headers=error.headers)


def _unforeseen(request: Request, error: Exception) -> JSONResponse:
    body = error_body("the server failed; its log says why", "InternalError", 500)
    return JSONResponse(body.model_dump(), 500)
