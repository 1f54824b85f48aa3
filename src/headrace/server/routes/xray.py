"""`GET /v1/xray/{response_id}`: what an answer took, from its first step on, live until it ends."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from headrace.server.errors import NotFound
from headrace.server.state import state_of
from headrace.server.xray import Xray

router = APIRouter()

_KEEP_ALIVE_S = 10.0


@router.get(
    "/v1/xray/{response_id}",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
        404: {"description": "No such X-ray."},
    },
)
async def xray(request: Request, response_id: str) -> Response:
    """Stream the X-ray of an answer that was asked for with `xray: true`; the newest 32 are kept."""
    state = state_of(request)
    found = state.xrays.get(response_id)
    if found is None or not state.owns(request, found.salt):
        raise NotFound(
            f"there is no X-ray of {response_id[:100]!r}; accepted are the newest answers asked for with xray: true",
            param="response_id",
        )
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(found), media_type="text/event-stream", headers=headers)


async def _events(xray: Xray) -> AsyncIterator[str]:
    """Frame the events; while nothing comes, a comment keeps the connection open."""
    stream = xray.follow()
    pending: asyncio.Task[tuple[str, str]] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(stream))
            done, _ = await asyncio.wait({pending}, timeout=_KEEP_ALIVE_S)
            if not done:
                yield ": waiting\n\n"
                continue
            task, pending = pending, None
            try:
                name, data = task.result()
            except StopAsyncIteration:
                return
            yield f"event: {name}\ndata: {data}\n\n"
    finally:
        if pending is not None:
            pending.cancel()
