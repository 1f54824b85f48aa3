"""`/v1/responses`: conversations in the dialect of OpenAI's Responses, kept for later unless that is not wanted."""

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from headrace.core.errors import UserError
from headrace.server.conversing import Job, note, prepare, told
from headrace.server.errors import Aborted
from headrace.server.frame import Frame, to_json
from headrace.server.presence import attend
from headrace.server.protocol.output import AnswerStream, Event
from headrace.server.protocol.patches import about, response, response_event
from headrace.server.schemas.responses import ResponsesRequest
from headrace.server.sse import respond
from headrace.server.state import state_of, tenant_of

router = APIRouter(tags=["conversations"])


@dataclass(frozen=True)
class _Asked:
    """A request beside its job: what is told of it, and the items that its response goes on from."""

    job: Job
    tenant: str | None
    is_stored: bool
    echo: dict[str, Any]
    items: list[dict[str, Any]]

    def head(self) -> dict[str, Any]:
        """Return the response before anything is generated."""
        answer = self.job.answers()[0]
        answer.begin(len(self.job.prompt_ids))
        return response(answer.whole, answer, self.echo)

    def about(self, answer: AnswerStream) -> dict[str, Any]:
        """Return what the server adds to the response."""
        if answer.result is None:
            return {**self.echo, "status": "cancelled", "incomplete_details": None} if answer.is_cut else self.echo
        return {**self.echo, "headrace": about(self.job.turn, answer.result)}

    def end(self, request: Request, answer: AnswerStream) -> dict[str, Any]:
        """Return the response, and keep it if that is wanted."""
        if answer.result is not None:
            note(request, [answer.result])
        found = response(answer.whole, answer, self.about(answer))
        if self.is_stored:
            items = [*self.items, *found["output"]]
            self.job.state.protocol.responses.put(self.tenant, found, items)
        return found


@router.post("/v1/responses", response_model=None)
async def create(body: ResponsesRequest, request: Request) -> Response:
    """Let the model answer a conversation."""
    state = state_of(request)
    state.check_model(body.model)
    tenant, before = tenant_of(request), []
    if body.previous_response_id is not None:
        before = state.protocol.responses.get(tenant, body.previous_response_id, "previous_response_id").items
    wanted = body.wanted(state.salt(request, body.cache_salt), before)
    job = await prepare(request, wanted, f"resp_{uuid.uuid4().hex}")
    asked = _Asked(job, tenant, body.store is not False, body.echo(), [*before, *body.items])
    if body.stream:
        frames = _frames(asked, request)
        return await respond(request, frames, dialect="responses", response_id=job.response_id, progress=job.progress)
    return JSONResponse(await attend(request, _whole(asked, request)))


@router.get("/v1/responses/{response_id}")
async def retrieve(response_id: str, request: Request, stream: bool | None = None) -> dict[str, Any]:
    """Return a response that was kept."""
    for name in request.query_params:
        if name != "stream":
            raise UserError(f"{name[:40]} is not supported; a response is returned whole", param=name[:40])
    if stream:
        raise UserError("a response that is over is not streamed again; accepted is stream left out", param="stream")
    return state_of(request).protocol.responses.get(tenant_of(request), response_id).response


@router.delete("/v1/responses/{response_id}")
async def delete(response_id: str, request: Request) -> dict[str, Any]:
    """Forget a response that was kept."""
    state_of(request).protocol.responses.delete(tenant_of(request), response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(response_id: str, request: Request) -> dict[str, Any]:
    """End a response that is being generated; one that is over is returned as it is."""
    state = state_of(request)
    running = state.protocol.running.get(response_id)
    if running is None or running.tenant != tenant_of(request):
        return state.protocol.responses.get(tenant_of(request), response_id).response
    state.abort(response_id, Aborted("the response was cancelled"))
    return {**running.head(), "status": "cancelled"}


async def _whole(asked: _Asked, request: Request) -> dict[str, Any]:
    answer = asked.job.answers()[0]
    async with aclosing(_told(asked, answer)) as source:
        async for _ in source:
            pass
    return asked.end(request, answer)


async def _frames(asked: _Asked, request: Request) -> AsyncGenerator[Frame, None]:
    answer = asked.job.answers()[0]
    async with aclosing(_told(asked, answer)) as source:
        async for event in source:
            yield event.name, to_json(response_event(event, answer, asked.about(answer)))
    asked.end(request, answer)


async def _told(asked: _Asked, answer: AnswerStream) -> AsyncGenerator[Event, None]:
    """Yield the events of an answer; one that is cancelled ends as far as it got."""
    job, protocol = asked.job, asked.job.state.protocol
    protocol.running[job.response_id] = asked
    try:
        async with aclosing(told(job, [answer])) as source:
            async for _, events in source:
                for event in events:
                    yield event
    except Aborted:
        for event in answer.cut(len(job.prompt_ids)):
            yield event
    finally:
        del protocol.running[job.response_id]
