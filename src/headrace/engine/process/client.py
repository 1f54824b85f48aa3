"""The front's side of the engine process: start, submit, listen, cancel, start again after a crash."""

import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import headrace
from headrace.core.errors import EngineError, HeadraceError
from headrace.engine.core.events import ErrorEvent, Event, PrefillEvent, TokenEvent
from headrace.engine.process.messages import (
    Answer,
    Cancel,
    Failed,
    FromEngine,
    Progress,
    Query,
    Question,
    Ready,
    Setup,
    ToEngine,
    to_error,
)
from headrace.engine.submission import Submission

_MAX_RESTARTS = 3
_RESTART_WINDOW_S = 60.0
_END_S = 10.0


Tell = Callable[[TokenEvent | PrefillEvent | HeadraceError], object]


@dataclass
class _Waiting:
    """Who hears of a request, and how many of its answers are still to come."""

    tell: Tell
    left: int


class EngineClient:
    """One engine process and everyone who waits for it. May be used from many threads.

    Owns the process, the connection and the queues of requests in flight. When the process ends unasked, every request
    in it gets an error and the process is started again; after three restarts in a minute it is given up.
    """

    def __init__(self, setup: Setup, progress: Callable[[int], object] | None = None) -> None:
        """Start the process and wait until it can take requests.

        Raises:
            UserError: the checkpoint or an option is refused.
            EngineError: the process ended while it started.
        """
        self._setup = setup
        self._lock = threading.Lock()  # the books below; never held while a message is sent, which may take a while
        self._sending = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}
        self._answers: dict[int, Callable[[Any], object]] = {}
        self._tokens = 0
        self._is_closed = False
        self.num_restarts = 0
        self._restarts: list[float] = []
        self._is_up = threading.Event()
        self._given_up: HeadraceError | None = None
        self._process, self._link = _spawn()
        self.ready = _wait_ready(self._process, self._link, setup, progress)
        self._is_up.set()
        self._listener = threading.Thread(
            target=_listen, args=(weakref.ref(self),), name="headrace-engine", daemon=True
        )
        self._listener.start()
        self._finalizer = weakref.finalize(self, _end, self._process, self._link)

    @property
    def pid(self) -> int:
        """Number of the engine's process."""
        return self._process.pid

    @property
    def is_up(self) -> bool:
        """Whether a process is there to take requests: not while one is started again, not after it was given up."""
        return self._is_up.is_set() and self._given_up is None and not self._is_closed

    @property
    def is_starting(self) -> bool:
        """Whether a process is started again after one ended."""
        return not self._is_up.is_set()

    def submit(self, submission: Submission, tell: Tell) -> None:
        """Hand a request over; `tell` hears its events, in order, from another thread, and at most one error, last.

        Raises:
            EngineError: the engine was closed or given up.
        """
        with self._lock_while_up() as link:
            self._waiting[submission.request_id] = _Waiting(tell, submission.params.n)
        self._write(link, submission)

    def cancel(self, request_id: str) -> None:
        """End a request at the next step boundary, if it has not ended yet."""
        with self._lock:
            link = self._link
            if request_id not in self._waiting:
                return
        self._write(link, Cancel(request_id))

    def query(self, what: Question) -> Any:
        """Ask the engine about itself.

        Raises:
            EngineError: the process ended.
        """
        queue: SimpleQueue[Any] = SimpleQueue()
        self.ask(what, queue.put)
        value = queue.get()
        if isinstance(value, HeadraceError):
            raise value
        return value

    def ask(self, what: Question, tell: Callable[[Any], object]) -> None:
        """Ask the engine about itself; `tell` hears the answer, or an `EngineError`, from another thread.

        Raises:
            EngineError: the engine was closed or given up.
        """
        with self._lock_while_up() as link:
            self._tokens += 1
            token = self._tokens
            self._answers[token] = tell
        self._write(link, Query(token, what))

    def close(self) -> None:
        """End the process; requests in it get an error."""
        with self._lock:
            self._is_closed = True
            end = self._finalizer
        end()
        self._is_up.set()
        self._fail_all(EngineError("the engine was closed"))

    @contextmanager
    def _lock_while_up(self) -> Iterator[Connection]:
        """Hold the books while there is a process, and give its connection: who is in them when it ends is told so.

        Raises:
            EngineError: there is none any more.
        """
        while True:
            self._is_up.wait()
            with self._lock:
                if self._is_closed or self._given_up is not None:
                    raise self._given_up or EngineError("the engine was closed; it takes no more requests")
                if self._is_up.is_set():
                    yield self._link
                    return

    def _write(self, link: Connection, message: ToEngine) -> None:
        with self._sending:
            try:
                link.send(message)
            except OSError:
                return  # the process ended, and the listener tells everyone who waits

    # -------------------------------------------------------------------------------------------------- the listener

    def _deliver(self, told: FromEngine) -> None:
        if isinstance(told, list):
            for event in told:
                self._hand_on(event)
        elif isinstance(told, Answer):
            with self._lock:
                waiting = self._answers.pop(told.token, None)
            if waiting is not None:
                waiting(told.value)

    def _hand_on(self, event: Event) -> None:
        is_last = isinstance(event, ErrorEvent)
        with self._lock:
            waiting = self._waiting.get(event.request_id)
            if waiting is None:
                return
            if isinstance(event, TokenEvent) and event.result is not None:
                waiting.left -= 1
                is_last = waiting.left == 0
            if is_last:
                del self._waiting[event.request_id]
        waiting.tell(to_error(event) if isinstance(event, ErrorEvent) else event)

    def _recover(self, reason: str) -> bool:
        """Tell everyone that the process ended, and start another; return whether there is one."""
        with self._lock:
            self._is_up.clear()
            process, link = self._process, self._link
        _end(process, link)
        why = reason or f"exit status {process.returncode}"
        then = "is given up" if self._recent_restarts() >= _MAX_RESTARTS else "is started again"
        self._fail_all(EngineError(f"the engine's process ended ({why}) and {then}"))
        problem = self._start_again()
        with self._lock:
            self._given_up = problem
        self._is_up.set()
        return problem is None

    def _recent_restarts(self) -> int:
        now = time.monotonic()
        self._restarts = [then for then in self._restarts if now - then < _RESTART_WINDOW_S]
        return len(self._restarts)

    def _start_again(self) -> HeadraceError | None:
        """Start another process, once more if that ends too; return why there is none."""
        while True:
            count = self._recent_restarts() + 1
            self._restarts.append(time.monotonic())
            if count > _MAX_RESTARTS:
                return EngineError(f"the engine's process ended {count} times in a minute and is given up")
            try:
                process, link = _spawn()
            except EngineError as problem:
                return problem
            try:
                ready = _wait_ready(process, link, self._setup, None)
            except EngineError:
                continue
            except HeadraceError as problem:
                return problem
            with self._lock:
                if not self._is_closed:
                    self._process, self._link, self.ready = process, link, ready
                    self.num_restarts += 1
                    self._finalizer.detach()
                    self._finalizer = weakref.finalize(self, _end, process, link)
                    return None
            _end(process, link)
            return EngineError("the engine was closed")

    def _fail_all(self, error: HeadraceError) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            answers, self._answers = self._answers, {}
        for one in waiting.values():
            one.tell(type(error)(error.message, error.param))  # each raises its own
        for answer in answers.values():
            answer(type(error)(error.message, error.param))


def _listen(reference: "weakref.ref[EngineClient]") -> None:
    """Deliver what the process tells until it ends or nobody holds the client any more."""
    reason = ""
    while True:
        client = reference()
        if client is None:
            return
        link = client._link
        del client
        try:
            told = link.recv()
        except (EOFError, OSError):
            told = None
        client = reference()
        if client is None or client._is_closed:
            return
        if told is None:
            if not client._recover(reason):
                return
            reason = ""
        elif isinstance(told, Failed):
            reason = told.message
        else:
            client._deliver(told)
        del client


def _spawn() -> tuple["subprocess.Popen[bytes]", Connection]:
    mine, its = socket.socketpair()
    package = str(Path(headrace.__file__).resolve().parent.parent)
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.engine.process.worker", str(its.fileno())],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
            process_group=0,  # an interrupt from the terminal is for the front alone
        )
    except OSError as problem:
        mine.close()
        raise EngineError(f"the engine's process could not be started: {problem.strerror or problem}.") from None
    finally:
        its.close()
    return process, Connection(mine.detach())


def _wait_ready(
    process: "subprocess.Popen[bytes]", link: Connection, setup: Setup, progress: Callable[[int], object] | None
) -> Ready:
    try:
        link.send(setup)
        while True:
            told = link.recv()
            if isinstance(told, Progress):
                if progress is not None:
                    progress(told.count)
            elif isinstance(told, Failed):
                raise to_error(told)
            elif isinstance(told, Ready):
                return told
    except (EOFError, OSError):
        _end(process, link)
        raise EngineError(f"the engine's process ended while it started (exit status {process.returncode})") from None
    except BaseException:
        _end(process, link)
        raise


def _end(process: "subprocess.Popen[bytes]", link: Connection) -> None:
    """Hang up, which ends the process; one that takes too long is killed.

    The connection itself is closed when the last thread lets go of it: the number of a closed file is soon another's.
    """
    try:
        with socket.fromfd(link.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.shutdown(socket.SHUT_RDWR)  # wakes whoever waits at either end; closing alone does not
    except OSError:
        pass  # it hung up first
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
