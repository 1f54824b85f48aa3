"""For operators: metrics, forgetting cached prompts, ending requests."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from headrace.core.errors import EngineError, UserError
from headrace.server.errors import Aborted, NotFound
from headrace.server.metrics import CONTENT_TYPE
from headrace.server.state import state_of

router = APIRouter(tags=["operations"])

_PATIENCE_S = 5.0


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Tell everything that is counted, in the text format of Prometheus."""
    state = state_of(request)
    told = None
    try:
        async with asyncio.timeout(_PATIENCE_S):
            told = await state.ask("totals")
    except (TimeoutError, EngineError):
        pass  # the metrics say so
    return Response(state.metrics.render(told, state.llm.num_restarts), media_type=CONTENT_TYPE)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request, *, reset_external: bool = False) -> dict[str, Any]:
    """Forget every cached prompt that no running request uses; with `reset_external` also those on disk.

    Raises:
        EngineError: the directory cannot be written, or another process has it for long.
    """
    if not await state_of(request).ask("clear disk" if reset_external else "clear"):
        raise EngineError("what is cached on disk could not be forgotten; a writable directory is accepted")
    return {"status": "ok"}


class AbortRequest(BaseModel):
    """Which requests to end."""

    model_config = ConfigDict(extra="forbid")
    request_id: str | None = Field(default=None, max_length=200, description="id of the response, such as cmpl-...")
    abort_all: bool = Field(default=False, description="end every request")


@router.post("/abort_request", responses={404: {"description": "no such request is running"}})
async def abort_request(body: AbortRequest, request: Request) -> dict[str, Any]:
    """End the requests behind a response, or all.

    Raises:
        UserError: neither or both are named.
        NotFound: there is none.
    """
    if (body.request_id is None) != body.abort_all:
        raise UserError("the body names neither or both; accepted is either request_id or abort_all: true")
    ended = state_of(request).abort(body.request_id, Aborted("the request was ended through /abort_request"))
    if not ended and body.request_id is not None:
        raise NotFound("no request of that id is running", param="request_id")
    return {"status": "ok", "ended": ended}
