"""`/v1/completions`: a text goes on, in one piece or as a stream."""

import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from headrace.core.errors import UserError
from headrace.engine.core.events import PrefillEvent
from headrace.server import bridge
from headrace.server.bridge import Asked
from headrace.server.completion_text import CompletionText
from headrace.server.frame import Frame, to_json
from headrace.server.presence import attend
from headrace.server.schemas.completions import CompletionRequest
from headrace.server.sse import Progress, respond
from headrace.server.state import ServerState, state_of

router = APIRouter(tags=["completions"])


@dataclass(frozen=True)
class _Job:
    """A checked request: what the engine is asked, and what its response is called."""

    state: ServerState
    body: CompletionRequest
    asked: list[Asked]
    response_id: str
    created: int
    progress: Progress

    @property
    def head(self) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.state.name,
            "system_fingerprint": self.state.llm.numerics,
        }

    def choices(self) -> list[CompletionText]:
        """Return the response's choices, each with its prompt's text if that is wanted."""
        body, tokenizer = self.body, self.state.llm.tokenizer
        found = []
        for place, prompt in enumerate(body.prompts()):
            for choice in range(body.n):
                text = CompletionText(
                    place * body.n + choice,
                    tokenizer,
                    wants_logprobs=body.logprobs is not None,
                    keeps_token=body.max_tokens > 0,
                )
                if body.echo:
                    text.echo(_text_of(self.state, prompt))
                found.append(text)
        return found


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Let the model go on with one or many texts."""
    state = state_of(request)
    state.check_model(body.model)
    body.check()
    salt = state.salt(request, body.cache_salt)
    params = body.sampling(default_temperature=state.settings.default_temperature, cache_salt=salt)
    asked = [Asked(await state.encode(prompt), params) for prompt in body.prompts()]
    total = sum(len(one.prompt_ids) for one in asked)
    job = _Job(state, body, asked, f"cmpl-{uuid.uuid4().hex}", int(time.time()), Progress(total))
    request.state.log.update(id=job.response_id, prompt_tokens=total)
    if state.settings.logs_prompts:
        request.state.log["prompt"] = json.dumps(body.prompt)
    if body.stream:
        frames = _frames(job, request)
        return await respond(request, frames, dialect="openai", response_id=job.response_id, progress=job.progress)
    return JSONResponse(await attend(request, _whole(job, request)))


async def _whole(job: _Job, request: Request) -> dict[str, Any]:
    choices = job.choices()
    async with aclosing(_events(job)) as events:
        async for index, event in events:
            choices[index].add(event)
    if job.body.echo and job.body.logprobs is not None:
        for choice in choices:
            _echo_logprobs(job, choice)
    request.state.log.update(completion_tokens=_usage(job, choices)["completion_tokens"])
    return {**job.head, "choices": [choice.take() for choice in choices], "usage": _usage(job, choices)}


async def _frames(job: _Job, request: Request) -> AsyncGenerator[Frame, None]:
    choices = job.choices()
    options = job.body.stream_options
    wants_usage = options is not None and options.include_usage
    more = {"usage": None} if wants_usage else {}
    async with aclosing(_events(job)) as events:
        async for index, event in events:
            choice = choices[index]
            choice.add(event)
            found = choice.take()
            if found is not None:
                yield None, to_json({**job.head, "choices": [found], **more})
    usage = _usage(job, choices)
    request.state.log.update(completion_tokens=usage["completion_tokens"])
    if wants_usage:
        yield None, to_json({**job.head, "choices": [], "usage": usage})
    yield None, "[DONE]"


async def _events(job: _Job) -> AsyncGenerator[tuple[int, Any], None]:
    """Yield (choice of the response, token event)."""
    many = bridge.stream_many(job.state, job.asked, response_id=job.response_id, progress=job.progress)
    async with aclosing(many) as events:
        async for index, event in events:
            if not isinstance(event, PrefillEvent):
                yield index * job.body.n + event.choice, event


def _usage(job: _Job, choices: list[CompletionText]) -> dict[str, Any]:
    results = [choice.result for choice in choices if choice.result is not None]
    generated = sum(result.usage.completion_tokens for result in results) if job.body.max_tokens else 0
    cached = sum(result.usage.cached_tokens for result in results[:: job.body.n])
    prompt = job.progress.total
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _echo_logprobs(job: _Job, choice: CompletionText) -> None:
    tokenizer, result = job.state.llm.tokenizer, choice.result
    if tokenizer is None or result is None or result.prompt_logprobs is None:
        raise UserError("echo with logprobs needs a tokenizer", param="logprobs")
    place = choice.index // job.body.n
    ids = job.asked[place].prompt_ids.tolist()
    # the begin token that was put before a text is not part of it
    first = int(isinstance(job.body.prompts()[place], str) and len(ids) > 1)
    choice.echo_logprobs(tokenizer, ids[first:], result.prompt_logprobs[first:])


def _text_of(state: ServerState, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    if state.llm.tokenizer is None:
        raise UserError("the checkpoint has no tokenizer.json, so token ids cannot be echoed", param="echo")
    return state.llm.tokenizer.decode(prompt, skip_special_tokens=True)
