"""Whether the client is still there, and what ends when it is not."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from headrace.server.errors import ClientGone

T = TypeVar("T")


async def until_gone(request: Request) -> None:
    """Return when the client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def attend(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do some work for a client that is there; when it goes, the work is cancelled, in the engine too.

    Raises:
        ClientGone: it went.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone("the client hung up")
    finally:
        await cancelled(working, watching)


async def cancelled(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks and wait until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
