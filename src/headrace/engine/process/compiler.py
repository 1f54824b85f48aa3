"""Compiles structures beside the engine's loop, so that no step waits for a grammar."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from headrace.core.errors import HeadraceError, InternalError
from headrace.engine.sampling.spec import Structured
from headrace.engine.sampling.structured import Compiled
from headrace.engine.submission import Submission


class Compiler:
    """Requests whose structure is being compiled. Owns one thread; the loop asks it what is done."""

    def __init__(self, compile_one: Callable[[Structured], Compiled]) -> None:
        self._compile = compile_one
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="headrace-structures")
        self._pending: list[tuple[Submission, Future[Compiled]]] = []
        self._cancelled: set[str] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a request waits here."""
        return bool(self._pending)

    @property
    def num_waiting(self) -> int:
        """Requests that wait here and are not cancelled."""
        return len(self._pending) - len(self._cancelled)

    def add(self, submission: Submission, structured: Structured) -> None:
        """Compile a request's structure."""
        self._pending.append((submission, self._pool.submit(self._compile, structured)))

    def cancel(self, request_id: str) -> bool:
        """Remember that a request that waits here is cancelled; return whether there is one."""
        is_here = any(submission.request_id == request_id for submission, _ in self._pending)
        if is_here:
            self._cancelled.add(request_id)
        return is_here

    def done(self) -> list[tuple[Submission, Compiled | HeadraceError, bool]]:
        """Return what was compiled or refused since the last call, and whether the request was cancelled meanwhile."""
        found: list[tuple[Submission, Compiled | HeadraceError, bool]] = []
        for submission, future in [one for one in self._pending if one[1].done()]:
            self._pending.remove((submission, future))
            is_cancelled = submission.request_id in self._cancelled
            self._cancelled.discard(submission.request_id)
            problem = future.exception()
            if problem is None:
                found.append((submission, future.result(), is_cancelled))
            elif isinstance(problem, HeadraceError):
                found.append((submission, problem, is_cancelled))
            else:  # the library broke; the other requests go on
                found.append(
                    (submission, InternalError(f"the structure broke its compiler: {problem!r}"), is_cancelled)
                )
        return found

    def close(self) -> None:
        """Forget what waits; what is being compiled is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
