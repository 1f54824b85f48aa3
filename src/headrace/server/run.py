"""The server's process from its first socket to its last stream."""

import asyncio
import functools
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from headrace.core.errors import UserError
from headrace.engine.llm import LLM
from headrace.server.app import create_app
from headrace.server.connection import Connection
from headrace.server.routes.health import decode_token
from headrace.server.settings import ServerSettings
from headrace.server.state import ServerState

_LOG = logging.getLogger("headrace.server")
_GRACE_S = 5
_LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def serve(settings: ServerSettings, name: str, load: Callable[[], LLM], on_ready: Callable[[str], object]) -> None:
    """Serve until an interrupt or a termination.

    Args:
        settings: the server's.
        name: under which the model is served.
        load: starts the engine; called once the address is known to be free.
        on_ready: called with the address once a token was decoded and requests are taken.

    Raises:
        UserError: the address cannot be used, or the engine refuses its options.
    """
    _log_to_stderr()
    listener = _bind(settings)
    if not settings.is_loopback and not settings.api_keys:
        _LOG.warning("everybody who can connect to %s may use this server; --api-key asks for a key", settings.host)
    try:
        state = ServerState(load(), settings, name)
        try:
            asyncio.run(_serve(state, listener, on_ready))
        finally:
            state.close()
    finally:
        listener.close()


async def _serve(state: ServerState, listener: socket.socket, on_ready: Callable[[str], object]) -> None:
    await decode_token(state)
    server = _Server(create_app(state), state, lambda: on_ready(_address(listener, state.settings.host)))
    await server.serve(sockets=[listener])


def http_config(app: FastAPI, settings: ServerSettings) -> uvicorn.Config:
    """Return how an application is served."""
    http: Any = functools.partial(Connection, settings)
    return uvicorn.Config(
        app,
        http=http,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=_GRACE_S,
    )


class _Server(uvicorn.Server):
    """uvicorn, with streams that are told when it stops, and an exit status of 0 after a signal."""

    def __init__(self, app: FastAPI, state: ServerState, on_ready: Callable[[], object]) -> None:
        super().__init__(http_config(app, state.settings))
        self._state, self._on_ready = state, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so."""
        await super().startup(sockets)
        if not self.should_exit:
            self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at the first signal, at once at the second."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._state.stop()


def _bind(settings: ServerSettings) -> socket.socket:
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            # listening is what finds out that another process has the port; connections wait until the server is ready
        except OSError:
            listener.close()
            raise
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise UserError(
            f"host {settings.host} port {settings.port} cannot be used: {reason}; --host and --port take others",
            param="port",
        ) from None
    return listener


def _address(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    for name, level in (("headrace", logging.INFO), ("uvicorn", logging.WARNING)):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [handler], False
        log.setLevel(level)
