"""Processes that should live or be gone, and requests that run in threads."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from headrace import LLM, SamplingParams
from headrace.core.errors import HeadraceError
from headrace.engine.result import Piece

PATIENCE_S = 60.0
"""A shared machine stalls; what hangs is caught all the same."""


def is_running(pid: int) -> bool:
    """Say whether a process is there and not just waiting to be collected by its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"}


def children(pid: int) -> list[int]:
    """Return the processes that a process started."""
    return [int(one) for file in Path(f"/proc/{pid}/task").glob("*/children") for one in file.read_text().split()]


def wait_until(is_so: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait for something.

    Raises:
        AssertionError: it did not come.
    """
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.02)


@dataclass
class Reader:
    """Reads a stream in a thread of its own; `outcome` is what it raised, or None at its end."""

    llm: LLM
    prompt: list[int]
    params: SamplingParams
    pieces: list[Piece] = field(default_factory=list)
    outcome: BaseException | None = None
    _is_stopped: bool = False

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for piece in self.llm.stream([self.prompt], self.params):
                self.pieces.append(piece)
                if self._is_stopped:
                    break
        except (HeadraceError, AssertionError) as error:
            self.outcome = error

    def stop(self) -> None:
        """Read no further."""
        self._is_stopped = True
        self.join()

    def join(self) -> BaseException | None:
        """Wait for the end and return the outcome."""
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "a request hangs"
        return self.outcome


def read_long(llm: LLM, prompts: Iterable[list[int]]) -> list[Reader]:
    """Start a long answer to each prompt and return once every one of them talks."""
    params = SamplingParams(max_tokens=1500, seed=1, ignore_eos=True)
    readers = [Reader(llm, ids, params) for ids in prompts]
    wait_until(lambda: all(reader.pieces or reader.outcome for reader in readers))
    assert all(reader.outcome is None for reader in readers)
    return readers
