"""Between coroutines and the engine: requests go in, events come out, and whoever leaves takes the work along."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.core.errors import HeadraceError
from headrace.engine.core.events import PrefillEvent, TokenEvent
from headrace.engine.sampling.params import SamplingParams
from headrace.server.errors import OutOfTime
from headrace.server.inbox import Inbox
from headrace.server.sse import Progress
from headrace.server.state import ServerState

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np

    from headrace.engine.images import PlacedImage
    from headrace.engine.process.client import Tell

Event = TokenEvent | PrefillEvent


@dataclass(frozen=True)
class Asked:
    """One request of the engine."""

    prompt_ids: "np.ndarray"
    params: SamplingParams
    images: "tuple[PlacedImage, ...]" = ()


async def stream(
    state: ServerState,
    prompt_ids: "np.ndarray",
    params: SamplingParams,
    *,
    images: "tuple[PlacedImage, ...]" = (),
    response_id: str | None = None,
    progress: Progress | None = None,
) -> AsyncGenerator[Event, None]:
    """Hand a request to the engine and yield its events, until all its `n` answers have their result.

    Leaving the iterator ends the request in the engine within a step. Use `contextlib.aclosing` where the loop over it
    may be left early.

    Args:
        state: the server's.
        prompt_ids: from `state.encode` or `state.place`.
        params: how to sample.
        images: from `state.place`.
        response_id: under which it can be aborted, and its x-ray found.
        progress: kept up to date.

    Raises:
        UserError: the engine refuses the request.
        OverloadedError: too many requests wait.
        EngineError: the engine ended, or the server is being stopped.
        Aborted: somebody else ended it.
    """
    asked = [Asked(prompt_ids, params, images)]
    async with aclosing(stream_many(state, asked, response_id=response_id, progress=progress)) as events:
        async for _, event in events:
            yield event


async def stream_many(
    state: ServerState,
    asked: Sequence[Asked],
    *,
    response_id: str | None = None,
    progress: Progress | None = None,
) -> AsyncGenerator[tuple[int, Event], None]:
    """Hand requests to the engine and yield (request, event) as they come; one that fails ends the others.

    Raises:
        HeadraceError: as in `stream`.
    """
    inbox = Inbox()
    state.enter(response_id, inbox, len(asked))
    flight = _Flight(state, asked, response_id, progress)
    try:
        await state.until_up()
        for index, one in enumerate(asked):
            tell = functools.partial(inbox.put, index)
            params = state.bounded(one.params)
            flight.sent.append(state.post(_submit, state, one.prompt_ids, params, tell, one.images))
        for sending in flight.sent:
            await asyncio.wrap_future(sending)
        while flight.is_running:
            index, told = await inbox.get()
            if isinstance(told, HeadraceError):
                raise told
            flight.note(index, told)
            yield index, told
    finally:
        flight.end()
        state.leave(response_id, inbox, len(asked))


class _Flight:
    """Requests of one response in the engine: what is still to come, and what the books of the server learn."""

    def __init__(
        self, state: ServerState, asked: Sequence[Asked], response_id: str | None, progress: Progress | None
    ) -> None:
        self.sent: list[Future[str]] = []
        self._state, self._progress = state, progress
        self._left = [one.params.n for one in asked]
        self._read = [0] * len(asked)
        self._lengths = [len(one.prompt_ids) for one in asked]
        self._newest: dict[tuple[int, int], float] = {}
        self._xray = None
        if len(asked) == 1 and asked[0].params.xray and response_id is not None:
            self._xray = state.xrays.begin(response_id, asked[0].prompt_ids, asked[0].params.cache_salt)

    @property
    def is_running(self) -> bool:
        return any(self._left)

    def note(self, index: int, event: Event) -> None:
        """Learn from an event.

        Raises:
            OutOfTime: the request's time was over before its first token.
        """
        if self._xray is not None:
            self._xray.add(event)
        if isinstance(event, PrefillEvent):
            self._see(index, event.tokens)
            return
        state, now = self._state, time.monotonic()
        self._see(index, self._lengths[index])
        if event.token_id is not None:
            state.last_token = now
            before = self._newest.get((index, event.choice))
            if before is not None:
                state.metrics.between_tokens(now - before)
            self._newest[index, event.choice] = now
        result = event.result
        if result is not None:
            self._left[index] -= 1
            state.metrics.finished(result)
            if result.finish_reason == "deadline" and not result.token_ids:
                raise OutOfTime("the request's time was over before its first token")

    def end(self) -> None:
        """End in the engine what still runs there; a request on its way is followed by its cancellation."""
        state = self._state
        if self._xray is not None:
            self._xray.close()
        for sending, left in zip(self.sent, self._left, strict=False):
            if left and not sending.cancel():
                state.post(_cancel, state, sending)

    def _see(self, index: int, tokens: int) -> None:
        if self._progress is not None and tokens > self._read[index]:
            self._progress.read += tokens - self._read[index]
            self._read[index] = tokens


def _submit(
    state: ServerState, ids: "np.ndarray", params: SamplingParams, tell: "Tell", images: "tuple[PlacedImage, ...]"
) -> str:
    return state.llm.submit(ids, params, tell, images=images)


def _cancel(state: ServerState, sending: "Future[str]") -> None:
    if sending.exception() is None:
        state.llm.cancel(sending.result())
