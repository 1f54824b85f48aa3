"""What stands before every route: who may call, how much may come, and one log line for each request."""

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from headrace.core.errors import HeadraceError
from headrace.server import errors
from headrace.server.connection import BEYOND_LIMIT
from headrace.server.errors import Forbidden, NoKey, TooLarge, TooManyConnections, TooSlow
from headrace.server.settings import ServerSettings, is_loopback
from headrace.server.state import tenant_name

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_LOG = logging.getLogger("headrace.server")
_OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics", "/openapi.json", "/explain", "/favicon.ico"})
_OPEN_FOLDERS = ("/page/",)
_KEYED_OPERATIONS = frozenset({"/reset_prefix_cache", "/abort_request"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Guards:
    """An ASGI middleware. Owns nothing; the request's id and tenant are put into its state."""

    def __init__(self, app: Any, settings: ServerSettings, on_failure: Callable[[int], object]) -> None:
        """Stand before an application.

        Args:
            app: what is passed on to.
            settings: the server's.
            on_failure: called with the status of a request that is refused or failed.
        """
        self._app, self._settings, self._on_failure = app, settings, on_failure
        self._keys = [(key.encode(), tenant_name(key)) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        state = scope.setdefault("state", {})
        state["request_id"], state["log"] = request_id, {}
        line = _Line(scope, request_id)
        answer = _named(send, request_id, line)
        try:
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            state["tenant"] = self._check(scope, headers)
            if scope["method"] not in _SAFE_METHODS:
                receive = await self._read(headers, receive)
        except HeadraceError as error:
            refusal = errors.response(error, errors.dialect_of(scope["path"]))
            if isinstance(error, TooManyConnections):
                refusal.headers["connection"] = "close"
            await refusal(scope, receive, answer)
        else:
            if scope["method"] == "HEAD":  # the answer to GET, of which uvicorn sends the head
                scope = {**scope, "method": "GET"}
            await self._app(scope, receive, answer)
        finally:
            line.write()
            if line.status >= 400:
                self._on_failure(line.status)

    def _check(self, scope: Scope, headers: dict[str, str]) -> str | None:
        """Return the tenant of a request that may pass.

        Raises:
            NoKey, Forbidden, TooManyConnections: it may not.
        """
        path, settings = scope["path"], self._settings
        if scope["state"].get(BEYOND_LIMIT):
            raise TooManyConnections(f"{settings.max_connections} clients are connected already; try again later")
        host = _host_of(headers.get("host", ""))
        if not self._keys and settings.is_loopback and not is_loopback(host):
            raise Forbidden(
                "this server answers callers of its own machine; accepted is a Host header such as 127.0.0.1, or any "
                "with --api-key"
            )
        if scope["method"] not in _SAFE_METHODS and not self._is_own(headers, scope):
            raise Forbidden("pages of other origins may not call this server; --cors-origin accepts one")
        if scope["method"] == "OPTIONS" or path in _OPEN_PATHS or path.startswith(_OPEN_FOLDERS):
            return None
        if self._keys:
            return self._tenant(headers)
        if path in _KEYED_OPERATIONS and not settings.is_loopback:
            raise Forbidden(f"{path} needs an API key where other machines can connect; --api-key sets one")
        return None

    def _tenant(self, headers: dict[str, str]) -> str:
        given = headers.get("x-api-key", "")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if not given and scheme.lower() == "bearer":
            given = token.strip()
        found = None
        for key, tenant in self._keys:  # every key is compared, so that the time says nothing about which one matched
            if hmac.compare_digest(given.encode("utf-8", "replace"), key):
                found = tenant
        if found is None:
            what = "is not accepted" if given else "is missing"
            raise NoKey(f"the API key {what}; accepted is 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
        return found

    def _is_own(self, headers: dict[str, str], scope: Scope) -> bool:
        origin = headers.get("origin")
        if origin is None:
            return True
        allowed = self._settings.cors_origins
        own = f"{scope.get('scheme', 'http')}://{headers.get('host', '')}"
        return origin == own or "*" in allowed or origin in allowed

    async def _read(self, headers: dict[str, str], receive: Receive) -> Receive:
        """Read the body, and return a `receive` that gives it again and then goes on.

        Raises:
            TooLarge: it is larger than accepted.
            TooSlow: it did not come in time.
        """
        limit, seconds = self._settings.max_body_bytes, self._settings.body_timeout_s
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(int(length), limit)
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return _again([message], receive)
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise _too_large(len(body), limit)
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise TooSlow(f"the body did not arrive within {seconds:g} seconds") from None
        return _again([{"type": "http.request", "body": bytes(body), "more_body": False}], receive)


class _Line:
    """The log line of a request: who asked for what, what came of it; never a text."""

    def __init__(self, scope: Scope, request_id: str) -> None:
        self._scope, self._id = scope, request_id
        self._began = time.monotonic()
        self.status = 0

    def write(self) -> None:
        """Write it."""
        scope = self._scope
        seconds = time.monotonic() - self._began
        path = (scope.get("raw_path") or b"").decode("latin-1")[:200]
        more = "".join(f" {name}={value}" for name, value in scope["state"]["log"].items())
        level = logging.DEBUG if path in {"/health", "/metrics", "/ready"} else logging.INFO
        _LOG.log(level, "%s %s %s %.3fs %s%s", scope["method"], path, self.status or "-", seconds, self._id, more)


def _named(send: Send, request_id: str, line: _Line) -> Send:
    """Return a `send` that adds the request's id to the headers, under the names that official clients read."""
    extra = [(b"x-request-id", request_id.encode()), (b"request-id", request_id.encode())]

    async def named(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            line.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return named


def _again(messages: list[MutableMapping[str, Any]], receive: Receive) -> Receive:
    async def again() -> MutableMapping[str, Any]:
        return messages.pop(0) if messages else await receive()

    return again


def _too_large(size: int, limit: int) -> TooLarge:
    return TooLarge(f"the body has {size:,} bytes or more; accepted are {limit:,} at most")


def _host_of(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
