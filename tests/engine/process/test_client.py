"""The front's side against a scripted engine: long messages both ways, and ends at awkward moments."""

import socket
import subprocess
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import CapacityError, EngineError, HeadraceError, OverloadedError, UserError
from headrace.engine.core.events import ErrorEvent, TokenEvent
from headrace.engine.core.options import EngineOptions
from headrace.engine.process import client
from headrace.engine.process.client import EngineClient
from headrace.engine.process.messages import Failed, Ready, Setup, to_error
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.submission import Submission

SETUP = Setup(path=Path("/nowhere"), options=EngineOptions())
LONG = 8 << 20  # far more than a socket holds
Script = Callable[[Connection], object]


class Process(threading.Thread):
    """Plays a script in place of a process; `returncode` is 0 at its end."""

    pid, returncode = 0, None

    def __init__(self, script: Script, link: Connection) -> None:
        super().__init__(daemon=True)
        self._script, self._link = script, link
        self.start()

    def run(self) -> None:
        try:
            assert isinstance(self._link.recv(), Setup)
            self._script(self._link)
        except (EOFError, OSError):
            pass
        self._link.close()
        self.returncode = 0

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.is_alive():
            raise subprocess.TimeoutExpired("script", timeout or 0)
        return 0

    def kill(self) -> None:
        raise AssertionError("an engine had to be killed")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineClient]:
    """Return how to make a client of engines that play scripts, one after the other."""

    def begin(*scripts: Script) -> EngineClient:
        left = list(scripts)

        def spawn() -> tuple[Process, Connection]:
            if not left:
                raise EngineError("no more scripts")
            mine, its = socket.socketpair()
            return Process(left.pop(0), Connection(its.detach())), Connection(mine.detach())

        monkeypatch.setattr(client, "_spawn", spawn)
        return EngineClient(SETUP)

    return begin


def submission(name: str, length: int = 3) -> Submission:
    ids = np.zeros(length, dtype=np.int64)
    return Submission(request_id=name, prompt_ids=ids, params=SamplingParams(), seed=0, submitted=0.0)


def token(name: str, size: int) -> TokenEvent:
    return TokenEvent(request_id=name, choice=0, token_id=1, text="a" * size)


def ready(link: Connection) -> None:
    link.send(Ready(numerics="none", max_context=9))


def heard(queue: "SimpleQueue[Any]") -> Any:
    return queue.get(timeout=20)


def test_long_messages_cross_each_other(start: Callable[..., EngineClient]) -> None:
    def script(link: Connection) -> None:
        ready(link)
        assert link.recv().request_id == "one"
        for _ in range(3):  # nothing is read before all of this is sent
            link.send([token("one", LONG)])
        assert len(link.recv().prompt_ids) == LONG // 8
        link.send([token("two", 1)])

    engine, told = start(script), SimpleQueue()
    engine.submit(submission("one"), told.put)
    sender = threading.Thread(target=engine.submit, args=(submission("two", LONG // 8), told.put), daemon=True)
    sender.start()
    assert [heard(told).request_id for _ in range(4)] == ["one"] * 3 + ["two"]
    engine.close()


def test_whoever_submits_while_the_process_ends_is_told(start: Callable[..., EngineClient]) -> None:
    """Every request gets an error or reaches the next process, at whatever moment the first one ends."""
    seen: list[str] = []

    def first(link: Connection) -> None:
        ready(link)
        for _ in range(40):
            link.recv()

    def second(link: Connection) -> None:
        ready(link)
        while True:
            name = link.recv().request_id
            seen.append(name)
            link.send([token(name, 1)])

    engine, told = start(first, second), SimpleQueue()

    def submit(thread: int) -> None:
        for index in range(50):
            engine.submit(submission(f"{thread}/{index}"), told.put)

    threads = [threading.Thread(target=submit, args=(index,), daemon=True) for index in range(4)]
    for thread in threads:
        thread.start()
    events = [heard(told) for _ in range(200)]
    errors = [event for event in events if isinstance(event, HeadraceError)]
    assert len(errors) >= 40
    assert len(errors) + len(seen) >= 200
    assert {event.request_id for event in events if isinstance(event, TokenEvent)} <= set(seen)
    engine.close()


class Hasty(threading.Event):
    """An event that was seen set just before it was cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.set()
        self.seen = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.seen += 1
        return self.seen == 1 or super().wait(timeout)


def test_a_request_that_comes_just_too_late_reaches_the_next_process(start: Callable[..., EngineClient]) -> None:
    is_starting, may_go_on = threading.Event(), threading.Event()

    def first(link: Connection) -> None:
        ready(link)
        link.recv()

    def second(link: Connection) -> None:
        is_starting.set()
        may_go_on.wait(20)
        ready(link)
        link.send([token(link.recv().request_id, 1)])

    engine, told = start(first, second), SimpleQueue()
    engine.submit(submission("one"), told.put)
    assert isinstance(heard(told), EngineError)
    assert is_starting.wait(20)
    engine._is_up = Hasty()
    engine._is_up.clear()
    late = threading.Thread(target=engine.submit, args=(submission("two"), told.put), daemon=True)
    late.start()
    late.join(0.2)
    may_go_on.set()
    assert heard(told).request_id == "two"
    engine.close()


def test_what_an_engine_says_at_its_end_is_told(start: Callable[..., EngineClient]) -> None:
    def script(link: Connection) -> None:
        ready(link)
        link.recv()
        link.send(Failed("InternalError", "block 7 is held twice", None))

    engine, told = start(script), SimpleQueue()
    engine.submit(submission("one"), told.put)
    assert "block 7 is held twice" in heard(told).message
    with pytest.raises(EngineError, match="no more scripts"):
        engine.query("status")
    engine.close()


def test_closing_during_a_restart_ends_the_new_process_too(start: Callable[..., EngineClient]) -> None:
    is_starting, may_go_on, has_ended = (threading.Event() for _ in range(3))

    def second(link: Connection) -> None:
        is_starting.set()
        may_go_on.wait(20)
        ready(link)
        try:
            link.recv()
        except EOFError:
            has_ended.set()

    engine, told = start(ready, second), SimpleQueue()
    assert is_starting.wait(20)
    waiting = threading.Thread(target=lambda: told.put(_refused(engine)), daemon=True)
    waiting.start()
    engine.close()
    assert "closed" in heard(told).message
    may_go_on.set()
    assert has_ended.wait(20)


def _refused(engine: EngineClient) -> EngineError:
    with pytest.raises(EngineError) as caught:
        engine.submit(submission("late"), print)
    return caught.value


def test_errors_keep_their_types_across_processes() -> None:
    for kind in (UserError, CapacityError, OverloadedError, EngineError):
        error = to_error(ErrorEvent(request_id="one", kind=kind.__name__, message="no", param="chunk"))
        assert (type(error), error.message, error.param) == (kind, "no", "chunk")
    assert type(to_error(Failed("SomethingElse", "no", None))).__name__ == "InternalError"
