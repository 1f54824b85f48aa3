"""What the three dialects of conversations have in common: a prompt is read, asked, and told event by event."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastapi import Request

from headrace.core.errors import InternalError
from headrace.engine.core.events import PrefillEvent
from headrace.engine.images import ImagePrompt
from headrace.server import bridge
from headrace.server.protocol.conversation import Turn, Wanted
from headrace.server.protocol.history import key_of_answer
from headrace.server.protocol.output import AnswerStream, Event
from headrace.server.sse import Progress
from headrace.server.state import ServerState, state_of

if TYPE_CHECKING:
    import numpy as np

    from headrace.engine.images import PlacedImage
    from headrace.engine.result import Result

_SHORT = 2048  # tokens of a conversation that are remembered where they are; more go to a thread


@dataclass(frozen=True)
class Job:
    """A checked request, ready for the engine."""

    state: ServerState
    turn: Turn
    prompt_ids: "np.ndarray"
    images: "tuple[PlacedImage, ...]"
    response_id: str
    created: int
    progress: Progress

    def answers(self) -> list[AnswerStream]:
        """Return a stream for each answer that was asked for."""
        return [
            AnswerStream(self.turn, self.response_id, self.state.name, self.created) for _ in range(self.turn.params.n)
        ]


async def prepare(request: Request, wanted: Wanted, response_id: str) -> Job:
    """Read a request's prompt.

    Raises:
        UserError: something in it is refused; CapacityError: it is longer than the context.
    """
    state = state_of(request)
    turn = await asyncio.to_thread(state.protocol.read, wanted)
    prompt = ImagePrompt(turn.prompt_ids, turn.images) if turn.images else turn.prompt_ids
    ids, images = await state.place(prompt)
    max_tokens = turn.resolve(len(ids), state.llm.max_context)
    turn = replace(turn, params=replace(turn.params, max_tokens=max_tokens))
    request.state.log.update(id=response_id, prompt_tokens=len(ids))
    if state.settings.logs_prompts:
        request.state.log["prompt"] = json.dumps(turn.wanted.body, ensure_ascii=True)
    return Job(state, turn, ids, images, response_id, int(time.time()), Progress(len(ids)))


async def told(job: Job, answers: list[AnswerStream]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """Yield (answer, events) as they come; the first are those before any token.

    Raises:
        HeadraceError: as `bridge.stream`.
    """
    protocol, tokenizer = job.state.protocol, job.state.llm.tokenizer
    if tokenizer is None:
        raise InternalError("a conversation was read without a tokenizer")
    has_begun = False
    source = bridge.stream(
        job.state,
        job.prompt_ids,
        job.turn.params,
        images=job.images,
        response_id=job.response_id,
        progress=job.progress,
    )
    async with aclosing(source) as events:
        async for event in events:
            if not has_begun:
                has_begun = True
                for choice, answer in enumerate(answers):
                    yield choice, answer.begin(len(job.prompt_ids))
            if isinstance(event, PrefillEvent):
                continue
            answer = answers[event.choice]
            found = answer.take(event, protocol.tokens, tokenizer)
            if event.result is not None:
                size = len(job.prompt_ids) + len(event.result.token_ids)
                if size > _SHORT:
                    await asyncio.to_thread(remember, job, answer, event.result)
                else:
                    remember(job, answer, event.result)
            if found:
                yield event.choice, found


async def answered(job: Job, request: Request) -> "tuple[list[AnswerStream], list[Result]]":
    """Return the answers that were asked for and their results, when all are over.

    Raises:
        HeadraceError: as `bridge.stream`.
    """
    answers = job.answers()
    async with aclosing(told(job, answers)) as events:
        async for _ in events:
            pass
    results = finished(answers)
    note(request, results)
    return answers, results


def remember(job: Job, answer: AnswerStream, result: "Result") -> None:
    """Keep the tokens of an answer for the conversation that comes back with it."""
    turn, protocol = job.turn, job.state.protocol
    key = key_of_answer(turn.wanted.cache_salt, turn.conversation.messages, answer.said())
    protocol.history.put(key, answer.raw(result, protocol.tokens))


def finished(answers: list[AnswerStream]) -> "list[Result]":
    """Return the results of answers that are over.

    Raises:
        InternalError: one is not.
    """
    results = [answer.result for answer in answers if answer.result is not None]
    if len(results) < len(answers):
        raise InternalError("an answer ended without a result")
    return results


def note(request: Request, results: "list[Result]") -> None:
    """Add an answer's length to the log line."""
    log: dict[str, Any] = request.state.log
    log["completion_tokens"] = sum(result.usage.completion_tokens for result in results)
