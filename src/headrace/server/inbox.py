"""Events from the engine's listening thread, handed to one coroutine."""

import asyncio
from collections import deque
from contextlib import suppress

from headrace.core.errors import HeadraceError
from headrace.engine.core.events import PrefillEvent, TokenEvent

Told = TokenEvent | PrefillEvent | HeadraceError


class Inbox:
    """A queue that threads fill and one coroutine empties; the loop is woken once for all that came together."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[int, Told]] = deque()
        self._bell = asyncio.Event()
        self._is_rung = False

    def put(self, index: int, told: Told) -> None:
        """Add what was told about request `index`; from any thread."""
        self._items.append((index, told))
        if not self._is_rung:
            self._is_rung = True
            with suppress(RuntimeError):  # the loop is closed, so nobody reads any more
                self._loop.call_soon_threadsafe(self._ring)

    async def get(self) -> tuple[int, Told]:
        """Return the oldest, waiting for it if need be."""
        while not self._items:
            self._bell.clear()
            await self._bell.wait()
        return self._items.popleft()

    def _ring(self) -> None:
        self._is_rung = False
        self._bell.set()
