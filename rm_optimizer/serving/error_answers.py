"""Every failure as the same typed JSON body, whoever noticed it: we, FastAPI, or nobody."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rm_optimizer.serving.api_errors import ApiError, InvalidRequest, NotReady, error_body
from rm_optimizer.serving.engine import EngineUnavailable
from rm_optimizer.serving.protocol import ErrorBody

_KINDS = {400: "InvalidRequest", 404: "NotFound", 405: "MethodNotAllowed"}
_HINTS = {
    "activation": "use_activation: false asks for raw rewards",
    "softmax": "use_activation: false asks for raw rewards",
    "normalize": "use_activation: false asks for raw rewards",
    "truncate_prompt_tokens": "nothing is truncated here; shorten the input",
}


def error_answer(error: ApiError) -> JSONResponse:
    """The HTTP answer of a failure."""
    return JSONResponse(error.body().model_dump(), error.status, headers=dict(error.headers))


def install_error_answers(app: FastAPI) -> None:
    """Give every kind of failure its typed body."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(EngineUnavailable, _unavailable)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unforeseen)


def error_responses(*statuses: int) -> dict[int | str, dict[str, object]]:
    """The failures of a route, for its documentation."""
    return {status: {"model": ErrorBody} for status in statuses}


def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error_answer(error)


def _unavailable(request: Request, error: Exception) -> JSONResponse:
    return error_answer(NotReady(str(error)))


def _invalid(request: Request, error: Exception) -> JSONResponse:
    """The first thing wrong with the body; of a union's members, the one that came furthest."""
    assert isinstance(error, RequestValidationError)
    first = max(error.errors(), key=lambda problem: len(problem["loc"]))
    if first["type"] == "json_invalid":
        return error_answer(
            InvalidRequest(f"the body is not JSON: {first.get('ctx', {}).get('error', 'cannot be read')}")
        )
    places = [place for place in first["loc"][1:] if _is_place(place)]
    param = "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in places).lstrip(".") or None
    hint = f"; {_HINTS[str(places[-1])]}" if places and str(places[-1]) in _HINTS else ""
    message = f"{param or 'the body'}: {first['msg']}{hint}"
    return error_answer(InvalidRequest(message, param))


def _is_place(place: object) -> bool:
    """Whether it is a field or an index, and not pydantic's name for a member of a union."""
    is_member = place in ("str", "json") or any(mark in str(place) for mark in ("[", "("))
    return isinstance(place, int) or not is_member


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = _KINDS.get(error.status_code, "HttpError")
    body = error_body(str(error.detail), kind, error.status_code)
    return JSONResponse(body.model_dump(), error.status_code, headers=error.headers)


def _unforeseen(request: Request, error: Exception) -> JSONResponse:
    body = error_body("the server failed; its log says why", "InternalError", 500)
    return JSONResponse(body.model_dump(), 500)
