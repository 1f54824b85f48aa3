"""`/v1/chat/completions`: a conversation goes on, in one piece or as a stream."""

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from headrace.server.conversing import Job, answered, finished, note, prepare, told
from headrace.server.frame import Frame, to_json
from headrace.server.presence import attend
from headrace.server.protocol.output import AnswerStream
from headrace.server.protocol.patches import Counts, about, chat_choice, chat_event
from headrace.server.schemas.chat import ChatRequest
from headrace.server.sse import respond
from headrace.server.state import state_of

router = APIRouter(tags=["conversations"])


@router.post("/v1/chat/completions", response_model=None)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Let the model answer a conversation."""
    state = state_of(request)
    state.check_model(body.model)
    wanted = body.wanted(state.salt(request, body.cache_salt))
    job = await prepare(request, wanted, f"chatcmpl-{uuid.uuid4().hex}")
    if body.stream:
        wants_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        frames = _frames(job, request, wants_usage=wants_usage)
        return await respond(request, frames, dialect="openai", response_id=job.response_id, progress=job.progress)
    return JSONResponse(await attend(request, _whole(job, request)))


async def _whole(job: Job, request: Request) -> dict[str, Any]:
    answers, results = await answered(job, request)
    return {
        **_head(job, "chat.completion"),
        "choices": [chat_choice(answer, choice) for choice, answer in enumerate(answers)],
        "usage": Counts.of(answers).chat(),
        "headrace": about(job.turn, results[0]),
    }


async def _frames(job: Job, request: Request, *, wants_usage: bool) -> AsyncGenerator[Frame, None]:
    answers = job.answers()
    head = _head(job, "chat.completion.chunk")
    more = {"usage": None} if wants_usage else {}
    async with aclosing(told(job, answers)) as source:
        async for choice, events in source:
            for event in events:
                yield None, to_json({**_chunk(job, answers[choice], event, choice), **head, **more})
    note(request, finished(answers))
    if wants_usage:
        usage = Counts.of(answers).chat()
        yield None, to_json({**head, "choices": [], "usage": usage})
    yield None, "[DONE]"


def _chunk(job: Job, answer: AnswerStream, event: Any, choice: int) -> dict[str, Any]:
    data = chat_event(event, answer, choice)
    if answer.result is not None and data["choices"][0]["finish_reason"] is not None:
        data["headrace"] = about(job.turn, answer.result)
    return data


def _head(job: Job, kind: str) -> dict[str, Any]:
    return {
        "id": job.response_id,
        "object": kind,
        "created": job.created,
        "model": job.state.name,
        "system_fingerprint": job.state.llm.numerics,
    }
