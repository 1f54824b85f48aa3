"""The whole server - uvicorn, application, engine process - with its state in the test's hands."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from headrace.engine.llm import LLM
from headrace.server.app import create_app
from headrace.server.run import http_config
from headrace.server.settings import ServerSettings
from headrace.server.state import ServerState

NAME = "headrace-nano"


@dataclass
class Inside:
    """A running server and what it is made of."""

    base_url: str
    llm: LLM
    state: ServerState
    loop: asyncio.AbstractEventLoop

    @property
    def port(self) -> int:
        return int(self.base_url.rsplit(":", 1)[1])

    def alive(self) -> int:
        """Requests that the engine knows."""
        status = self.llm.status()
        return sum(status[name] for name in ("queued", "forking", "prefill", "decode", "swapped"))

    def until_idle(self, seconds: float = 10.0) -> float:
        """Wait until the engine has nothing to do; return how long that took."""
        began = time.monotonic()
        while self.alive():
            assert time.monotonic() - began < seconds, self.llm.status()
            time.sleep(0.002)
        return time.monotonic() - began


@contextmanager
def inside(
    *, engine: dict[str, Any] | None = None, send_buffer: int | None = None, **settings: Any
) -> Iterator[Inside]:
    """Run a server in a thread of this process; `send_buffer` are the bytes that the kernel takes for a client."""
    with LLM(**{"num_slots": 4, "trace_steps": 4096, **(engine or {})}) as llm:
        listener = socket.socket()
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        listener.bind(("127.0.0.1", 0))
        state = ServerState(llm, ServerSettings(**settings), NAME)
        server = uvicorn.Server(http_config(create_app(state), state.settings))
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve([listener])

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield Inside(f"http://127.0.0.1:{listener.getsockname()[1]}", llm, state, loops[0])
        finally:
            loops[0].call_soon_threadsafe(state.stop)
            server.should_exit = True
            thread.join(20)
            state.close()
