"""What a refusal looks like: status, body and stream event in the shape of each dialect. No path, no trace in any."""

import logging
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from headrace.core.errors import CheckpointError, EngineError, HeadraceError, InternalError, OverloadedError, UserError
from headrace.server.frame import Frame, to_json

Dialect = Literal["openai", "responses", "anthropic"]

_LOG = logging.getLogger("headrace.server")
_OPENAI_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_INTERNAL = "the server made a mistake; its log says which"
_ENGINE = (
    "the engine ended while it had this request; it is started again unless it ends too often, so try the request again"
)
_DAMAGED = "the checkpoint is damaged where this request reads it; the server's log says where"
_RETRY_AFTER_S = 2


class Refused(UserError):  # noqa: N818 - the names say what happened
    """Refuse a request with a status of its own."""

    status: ClassVar[int] = 400
    code: ClassVar[str | None] = None


class NoKey(Refused):
    """The request carries no API key that is accepted."""

    status = 401
    code = "invalid_api_key"


class Forbidden(Refused):
    """The request may not do this here."""

    status = 403


class NotFound(Refused):
    """There is nothing of that name."""

    status = 404
    code = "not_found"


class UnknownModel(NotFound):
    """The named model is not served."""

    code = "model_not_found"


class WrongMethod(Refused):
    """The path is not called that way."""

    status = 405


class TooSlow(Refused):
    """The body did not arrive in time."""

    status = 408


class Aborted(Refused):
    """Somebody ended the request through `/abort_request`."""

    status = 409
    code = "aborted"


class TooLarge(Refused):
    """The body is larger than accepted."""

    status = 413


class OutOfTime(Refused):
    """Not one token was generated within the request's time."""

    status = 503
    code = "timeout"


class TooManyConnections(Refused):
    """More clients are connected than the server takes."""

    status = 503
    code = "overloaded"


class ClientGone(Refused):
    """The client hung up, so nobody reads the answer."""

    status = 499


class Stopping(EngineError):  # noqa: N818 - a state, told as an error
    """The server is being stopped."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An error as a client sees it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None


def refusal(error: Exception) -> Refusal:
    """Return what a client is told of an error."""
    if isinstance(error, Refused):
        retry = _RETRY_AFTER_S if error.status == 503 else None
        return Refusal(
            status=error.status, message=error.message, param=error.param, code=error.code, retry_after=retry
        )
    if isinstance(error, OverloadedError):
        return Refusal(status=429, message=error.message, code="overloaded", retry_after=_RETRY_AFTER_S)
    if isinstance(error, Stopping):
        return Refusal(status=503, message=error.message, code="stopping", retry_after=_RETRY_AFTER_S)
    if isinstance(error, EngineError):
        return Refusal(status=503, message=_ENGINE, code="engine_down", retry_after=_RETRY_AFTER_S)
    if isinstance(error, CheckpointError):
        return Refusal(status=500, message=_DAMAGED, code="damaged_checkpoint")
    if isinstance(error, UserError):
        return Refusal(status=400, message=error.message, param=error.param)
    return Refusal(status=500, message=_INTERNAL, code="internal_error")


def body(error: Exception, dialect: Dialect) -> dict[str, Any]:
    """Return the JSON body of a refusal."""
    told = refusal(error)
    message = whole(told.message)
    if dialect == "anthropic":
        kind = _ANTHROPIC_KINDS.get(told.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = "server_error" if told.status >= 500 else _OPENAI_KINDS.get(told.status, "invalid_request_error")
    param = None if told.param is None else whole(told.param)
    return {"error": {"message": message, "type": kind, "param": param, "code": told.code}}


def whole(text: str) -> str:
    """Return a text that can be sent: half characters, which a body may hold as escapes, become question marks."""
    return text.encode("utf-8", "replace").decode()


def response(error: Exception, dialect: Dialect) -> JSONResponse:
    """Return the answer to a request that is refused."""
    told = refusal(error)
    headers = {} if told.retry_after is None else {"retry-after": str(told.retry_after)}
    if told.status == 401:
        headers["www-authenticate"] = "Bearer"
    note(error)
    return JSONResponse(body(error, dialect), status_code=told.status, headers=headers)


def event(error: Exception, dialect: Dialect, place: int) -> Frame:
    """Return the event that tells of an error after a stream began, in which it has a place, counted from 0."""
    note(error)
    if dialect == "openai":
        return None, to_json(body(error, dialect))
    if dialect == "anthropic":
        return "error", to_json(body(error, dialect))
    told = refusal(error)
    code = told.code or ("server_error" if told.status >= 500 else "invalid_request_error")
    found = {"type": "error", "code": code, "message": whole(told.message), "param": told.param}
    return "error", to_json({**found, "sequence_number": place})


def note(error: Exception) -> None:
    """Write what a client is not told into the log."""
    if isinstance(error, InternalError | CheckpointError) or not isinstance(error, HeadraceError):
        _LOG.error("%s: %s", type(error).__name__, error, exc_info=error)
    elif isinstance(error, EngineError) and not isinstance(error, Stopping):
        _LOG.warning("%s", error.message)


def dialect_of(path: str) -> Dialect:
    """Return the dialect in which a path's callers expect errors."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    return "responses" if path.startswith("/v1/responses") else "openai"


def install(app: FastAPI) -> None:
    """Make every error of an application come out in the shape of its dialect."""

    async def refused(request: Request, error: Exception) -> JSONResponse:
        return response(error, dialect_of(request.url.path))

    async def not_understood(request: Request, error: Exception) -> JSONResponse:
        found = error.errors() if isinstance(error, RequestValidationError) else []
        return response(_sentence(found, request.headers.get("content-type")), dialect_of(request.url.path))

    async def by_status(request: Request, error: Exception) -> JSONResponse:
        path, status = request.url.path, getattr(error, "status_code", 500)
        known: dict[int, Exception] = {
            404: NotFound(f"{path[:200]} is not a path of this server; /openapi.json lists those that are"),
            405: WrongMethod(f"{path[:200]} is not called with {request.method}; /openapi.json lists what is accepted"),
            400: UserError("the body cannot be read as JSON; accepted is one JSON object in UTF-8"),
        }
        answer = response(known.get(status, error), dialect_of(path))
        allowed = (getattr(error, "headers", None) or {}).get("Allow")
        if allowed:
            answer.headers["allow"] = allowed
        return answer

    app.add_exception_handler(HeadraceError, refused)
    app.add_exception_handler(RequestValidationError, not_understood)
    for status in (400, 404, 405):
        app.add_exception_handler(status, by_status)
    app.add_exception_handler(HTTPException, by_status)
    app.add_exception_handler(Exception, refused)


def _sentence(found: Any, content_type: str | None) -> UserError:
    """Return the first thing that is wrong with a body, by name and without the value."""
    if not found:
        return UserError("the request is not understood; /openapi.json says what is accepted")
    first = min(found, key=lambda one: one["type"] != "extra_forbidden")
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return UserError(f"the body is not JSON at character {first['loc'][-1]}: {reason}")
    where = first["loc"][1:]
    if not where:
        return _no_object(content_type)
    alternatives = [one for one in found if one["loc"][:2] == first["loc"][:2]]
    if len(alternatives) > 1 and len({one["loc"] for one in alternatives}) > 1 and first["type"] != "extra_forbidden":
        name = str(where[0])
        return UserError(f"{name} is none of the forms that are accepted; /openapi.json lists them", param=name)
    name = ".".join(map(str, where))[:200]
    if first["type"] == "extra_forbidden":
        return UserError(f"{name} is not supported; /openapi.json lists the fields that are", param=name)
    if first["type"] == "missing":
        return UserError(f"{name} is missing", param=name)
    return UserError(f"{name} is not accepted: {first['msg'].removeprefix('Value error, ')}", param=name)


def _no_object(content_type: str | None) -> UserError:
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type.startswith("application/") and media_type.endswith(("/json", "+json")):
        return UserError("the body is no JSON object; accepted is one, in UTF-8")
    told = "missing" if content_type is None else repr(content_type[:60])
    return UserError(f"the header content-type is {told}; accepted is 'application/json'")
