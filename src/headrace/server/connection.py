"""One connection of a client: it must ask for something within a time, and there are not too many at once."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.server.settings import ServerSettings

BEYOND_LIMIT = "is_beyond_limit"
"""Key of a request's state: its connection is one more than may be open, so it is to be refused."""


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1, which alone would wait for the head of a request for ever."""

    def __init__(self, settings: ServerSettings, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._settings = settings
        self._giving_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, and wait for a request."""
        super().connection_made(transport)
        is_beyond = len(self.connections) > self._settings.max_connections
        self.app_state = {**self.app_state, BEYOND_LIMIT: is_beyond}
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        super().connection_lost(exc)
        if self._giving_up is not None:
            self._giving_up.cancel()

    def _watch(self) -> None:
        """Have the time run while the head of a request is awaited; bytes that come one by one gain none."""
        is_waiting = self.conn.their_state is h11.IDLE
        if is_waiting and self._giving_up is None:
            self._giving_up = self.loop.call_later(self._settings.head_timeout_s, self.transport.close)
        elif not is_waiting and self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
