"""A server-sent stream of one answer: events, comments that keep it alive, an error event, an end."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from headrace.server import errors
from headrace.server.errors import ClientGone, Dialect
from headrace.server.frame import Frame, comment, to_bytes
from headrace.server.presence import cancelled, until_gone
from headrace.server.state import state_of

__all__ = ["Frame", "Progress", "respond"]

_LOG = logging.getLogger("headrace.server")
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass
class Progress:
    """How far a prompt is read; `headrace.server.bridge` keeps it up to date."""

    total: int
    read: int = 0

    def __str__(self) -> str:
        if self.read < self.total:
            return f"reading {self.read} of {self.total} tokens"
        return "working"


async def respond(
    request: Request,
    frames: AsyncGenerator[Frame, None],
    *,
    dialect: Dialect,
    response_id: str,
    progress: Progress,
) -> Response:
    """Return the stream of an answer once its first event is there, or has been long in coming.

    Closes `frames`, whatever happens; the work behind them must end with them.

    Args:
        request: what is answered.
        frames: name and data of each event, in order.
        dialect: shape of an error event.
        response_id: told in a header, before the first event: an X-ray is followed from it on.
        progress: what comments say.

    Raises:
        HeadraceError: the request was refused before anything was sent, so it gets a status of its own.
        ClientGone: the client went before.
    """
    state = state_of(request)
    settings = state.settings
    first = asyncio.ensure_future(_next(frames))
    watching = asyncio.ensure_future(until_gone(request))
    try:
        await asyncio.wait({first, watching}, timeout=settings.keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            raise ClientGone("the client hung up")
        if first.done():
            first.result()
    except BaseException:
        await cancelled(first, watching)
        await frames.aclose()
        raise
    return _EventStream(
        _Source(first, frames, watching),
        dialect=dialect,
        progress=progress,
        patience=(settings.keep_alive_s, settings.stall_timeout_s),
        on_failure=state.metrics.failed,
        headers={**_HEADERS, "x-response-id": response_id},
    )


async def _next(frames: AsyncIterator[Frame]) -> Frame | None:
    return await anext(frames, None)


@dataclass
class _Source:
    first: "asyncio.Future[Frame | None]"
    frames: AsyncGenerator[Frame, None]
    watching: "asyncio.Future[None]"


class _EventStream(Response):
    """Sends frames as they come. Owns the iterator of them and the task that watches for the client's leaving."""

    def __init__(
        self,
        source: _Source,
        *,
        dialect: Dialect,
        progress: Progress,
        patience: tuple[float, float],
        on_failure: Callable[[int], object],
        headers: dict[str, str],
    ) -> None:
        super().__init__(status_code=200, headers=headers)
        del self.headers["content-length"]
        self._source, self._dialect, self._progress, self._on_failure = source, dialect, progress, on_failure
        self._keep_alive_s, self._stall_s = patience
        self._sent = time.monotonic()
        self._is_sending = False

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
        """Send the stream; an ASGI application."""
        pumping = asyncio.ensure_future(self._pump(send))
        beating = asyncio.ensure_future(self._beat(send))
        watching = self._source.watching
        try:
            await asyncio.wait({pumping, beating, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(pumping, beating, watching, self._source.first)
            await self._source.frames.aclose()

    async def _pump(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        count = 0
        try:
            frame = await self._source.first
            while frame is not None:
                await self._send(send, to_bytes(frame))
                count += 1
                frame = await anext(self._source.frames, None)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client hears of it as an event
            self._on_failure(errors.refusal(error).status)
            await self._send(send, to_bytes(errors.event(error, self._dialect, count)))
            if self._dialect == "openai":
                await self._send(send, to_bytes((None, "[DONE]")))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Any, data: bytes) -> None:
        self._is_sending = True
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending, self._sent = False, time.monotonic()

    async def _beat(self, send: Any) -> None:
        """Send a comment after every silence; return when the client has taken nothing for too long."""
        while True:
            silence = time.monotonic() - self._sent
            if self._is_sending:
                if silence > self._stall_s:
                    _LOG.info("a client took nothing for %.0f s; its answer is given up", silence)
                    return
                await asyncio.sleep(self._keep_alive_s)
            elif silence < self._keep_alive_s:
                await asyncio.sleep(self._keep_alive_s - silence)
            else:
                try:
                    async with asyncio.timeout(self._stall_s):
                        await self._send(send, comment(str(self._progress)))
                except (TimeoutError, OSError):
                    return
