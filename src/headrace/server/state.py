"""`ServerState`: the engine's front, the settings, and what is in flight. Reachable as `request.app.state.headrace`."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request

from headrace.core.errors import EngineError, HeadraceError, OverloadedError
from headrace.engine.images import ImagePrompt
from headrace.engine.llm import LLM
from headrace.engine.process.messages import Question
from headrace.engine.sampling.params import SamplingParams
from headrace.server.errors import Stopping, UnknownModel
from headrace.server.metrics import Metrics
from headrace.server.protocol.conversation import Protocol
from headrace.server.settings import ServerSettings
from headrace.server.xray import XrayStore

if TYPE_CHECKING:
    import numpy as np

    from headrace.engine.images import PlacedImage
    from headrace.engine.prompt import Prompt
    from headrace.server.inbox import Inbox

T = TypeVar("T")
_UP_POLL_S = 0.02
_SHORT_TEXT = 4096  # characters that are encoded where they are; more go to a thread


class ServerState:
    """Everything the routes share. Owned by the process that serves; its methods are called from the event loop.

    Attributes:
        llm: the engine's front.
        name: the name under which the model is served.
        metrics: what `/metrics` tells.
        started: seconds since the epoch.
        xrays: the X-rays of the newest answers.
        protocol: reads conversations, and remembers their answers.
        last_token: seconds of the monotonic clock when a token was last decoded, None before the first.
    """

    def __init__(self, llm: LLM, settings: ServerSettings, name: str) -> None:
        self.llm, self.settings, self.name = llm, settings, name
        self.metrics = Metrics(name)
        self.started = time.time()
        self.xrays = XrayStore(llm.config, name, llm.tokenizer)
        self.protocol = Protocol(llm.config, llm.tokenizer, settings)
        self.last_token: float | None = None
        self.in_flight = 0
        self._flights: dict[str, set[Inbox]] = {}
        self._is_stopping = False
        # One thread sends, so that a cancellation never overtakes its request; a large prompt may take a while to send.
        self._postman = ThreadPoolExecutor(1, thread_name_prefix="headrace-postman")
        self._capacity = llm.options.num_slots + settings.max_waiting
        self._asking: dict[Question, asyncio.Future[Any]] = {}

    # --------------------------------------------------------------------------------------------------- the engine

    def post(self, work: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Do something that may block on the engine's connection, in the order of calls, in another thread."""
        return self._postman.submit(work, *arguments)

    async def until_up(self) -> None:
        """Wait while the engine is started again.

        Raises:
            EngineError: that takes too long, or the server is being stopped.
        """
        deadline = time.monotonic() + self.settings.engine_wait_s
        while self.llm.is_starting and time.monotonic() < deadline and not self._is_stopping:
            await asyncio.sleep(_UP_POLL_S)
        if self._is_stopping:
            raise Stopping("the server is being stopped and takes no more requests")
        if self.llm.is_starting:
            raise EngineError("the engine is still being started again")

    async def ask(self, what: Question) -> Any:
        """Ask the engine about itself without holding up anybody; those who ask at the same time share an answer.

        Raises:
            HeadraceError: the engine is not there, or ended meanwhile.
        """
        asking = self._asking.get(what)
        if asking is None:
            asking = asyncio.ensure_future(self._ask(what))
            self._asking[what] = asking
            asking.add_done_callback(lambda _: self._asking.pop(what, None))
        return await asyncio.shield(asking)

    async def _ask(self, what: Question) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def hear(value: Any) -> None:
            loop.call_soon_threadsafe(_settle, answer, value)

        if not self.llm.is_up:
            raise EngineError("the engine is not up")
        await asyncio.wrap_future(self.post(self.llm.ask, what, hear))
        value = await answer
        if isinstance(value, HeadraceError):
            raise value
        return value

    async def encode(self, prompt: "Prompt") -> "np.ndarray":
        """Return a prompt's ids as `LLM.encode` does; long texts are encoded beside the event loop.

        Raises:
            UserError: the prompt is refused; CapacityError: it is longer than the context.
        """
        return (await self.place(prompt))[0]

    async def place(self, prompt: "Prompt") -> "tuple[np.ndarray, tuple[PlacedImage, ...]]":
        """Return a prompt's ids and images as `LLM.place` does.

        Raises:
            UserError: the prompt is refused; CapacityError: it is longer than the context.
        """
        if not isinstance(prompt, ImagePrompt) and len(prompt) <= _SHORT_TEXT:
            return self.llm.place(prompt)
        return await asyncio.to_thread(self.llm.place, prompt)

    # ------------------------------------------------------------------------------------------------------ requests

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; no name means the one that is.

        Raises:
            UnknownModel: it is another.
        """
        if name is not None and name != self.name:
            raise UnknownModel(f"model {name[:100]!r} is not served here; accepted is {self.name!r}", param="model")

    def bounded(self, params: SamplingParams) -> SamplingParams:
        """Return parameters that keep to the server's time limit."""
        limit = self.settings.request_timeout_s
        if limit is None or (params.deadline_s is not None and params.deadline_s <= limit):
            return params
        return replace(params, deadline_s=limit)

    def salt(self, request: Request, wanted: str | None) -> str | None:
        """Return the cache salt of a request: its key's own where there are several keys, with the one it asks for."""
        tenant = tenant_of(request)
        if len(self.settings.api_keys) < 2 or tenant is None:
            return wanted
        return f"{tenant}:{wanted or ''}"

    def owns(self, request: Request, salt: str | None) -> bool:
        """Return whether a request has the key of the one whose `salt` this is; with one key or none, all have."""
        if len(self.settings.api_keys) < 2:
            return True
        return salt is not None and salt.startswith(f"{tenant_of(request)}:")

    def enter(self, response_id: str | None, inbox: "Inbox", count: int) -> None:
        """Note requests that go into the engine.

        Raises:
            OverloadedError: too many are there already.
            Stopping: the server is being stopped.
        """
        if self._is_stopping:
            raise Stopping("the server is being stopped and takes no more requests")
        if self.in_flight and self.in_flight + count > self._capacity:
            raise OverloadedError(
                f"{self.in_flight} requests are in the server; accepted are {self._capacity}, so try again later"
            )
        self.in_flight += count
        self._flights.setdefault(response_id or "", set()).add(inbox)

    def leave(self, response_id: str | None, inbox: "Inbox", count: int) -> None:
        """Note that they left."""
        self.in_flight -= count
        inboxes = self._flights.get(response_id or "", set())
        inboxes.discard(inbox)
        if not inboxes:
            self._flights.pop(response_id or "", None)

    def abort(self, response_id: str | None, error: HeadraceError) -> int:
        """End the requests behind a response, or all with None; return how many."""
        names = list(self._flights) if response_id is None else [response_id]
        inboxes = [inbox for name in names for inbox in self._flights.get(name, ())]
        for inbox in inboxes:
            inbox.put(0, error)
        return len(inboxes)

    def stop(self) -> None:
        """Take no more requests, and tell those in flight."""
        self._is_stopping = True
        self.abort(None, Stopping("the server is being stopped; what was generated so far is all there is"))

    def close(self) -> None:
        """End the engine."""
        self.llm.close()
        self._postman.shutdown(wait=False, cancel_futures=True)


def _settle(answer: "asyncio.Future[Any]", value: Any) -> None:
    if not answer.done():
        answer.set_result(value)


def state_of(request: Request) -> ServerState:
    """Return the server's state behind a request."""
    state: ServerState = request.app.state.headrace
    return state


def tenant_of(request: Request) -> str | None:
    """Return the name of the key that a request carries, None where none is asked for."""
    tenant: str | None = getattr(request.state, "tenant", None)
    return tenant


def tenant_name(api_key: str) -> str:
    """Return the name under which a key's cached prompts are kept; it does not give the key away."""
    return hashlib.sha256(b"headrace tenant\0" + api_key.encode()).hexdigest()[:32]
