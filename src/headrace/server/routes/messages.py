"""`/v1/messages` and `/v1/messages/count_tokens`: conversations in Anthropic's dialect."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from headrace.engine.images import ImagePrompt
from headrace.server.conversing import Job, answered, finished, note, prepare, told
from headrace.server.frame import Frame, to_json
from headrace.server.presence import attend
from headrace.server.protocol.patches import message, message_event
from headrace.server.schemas.messages import CountRequest, MessagesRequest
from headrace.server.sse import respond
from headrace.server.state import state_of

router = APIRouter(tags=["conversations"])


@router.post("/v1/messages", response_model=None)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Let the model answer a conversation."""
    state = state_of(request)
    state.check_model(body.model)
    wanted = body.wanted(state.salt(request, body.cache_salt))
    job = await prepare(request, wanted, f"msg_{uuid.uuid4().hex}")
    if body.stream:
        frames = _frames(job, request)
        return await respond(request, frames, dialect="anthropic", response_id=job.response_id, progress=job.progress)
    return JSONResponse(await attend(request, _whole(job, request)))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> dict[str, int]:
    """Count the tokens of a conversation, images included."""
    state = state_of(request)
    state.check_model(body.model)
    turn = await asyncio.to_thread(state.protocol.read, body.wanted(state.salt(request, body.cache_salt)))
    prompt = ImagePrompt(turn.prompt_ids, turn.images) if turn.images else turn.prompt_ids
    ids, _ = await state.place(prompt)
    return {"input_tokens": len(ids)}


async def _whole(job: Job, request: Request) -> dict[str, Any]:
    answers, results = await answered(job, request)
    return message(job.turn, answers[0], results[0])


async def _frames(job: Job, request: Request) -> AsyncGenerator[Frame, None]:
    answers = job.answers()
    async with aclosing(told(job, answers)) as source:
        async for _, events in source:
            for event in events:
                yield event.name, to_json(message_event(event, job.turn, answers[0]))
    note(request, finished(answers))
