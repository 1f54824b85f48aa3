"""The engine's process: takes messages, steps while there is work, tells what happened.

Run as `python -m headrace.engine.process.worker FD` with one end of a socket pair; it ends when the other end closes.
"""

import os
import signal
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from headrace.core.errors import HeadraceError, InternalError, OverloadedError
from headrace.engine.core.build import build_core
from headrace.engine.core.core import EngineCore
from headrace.engine.core.events import ErrorEvent
from headrace.engine.core.memory_plan import MemoryPlan, peak_bytes, resident_bytes
from headrace.engine.process.compiler import Compiler
from headrace.engine.process.messages import Answer, Cancel, Failed, Progress, Query, Ready, Setup, ToEngine
from headrace.engine.sampling.structured import Compiled
from headrace.engine.submission import Submission

_COMPILE_POLL_S = 0.005


def main() -> int:
    """Serve one front until it goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides what an interrupt means
    link = Connection(int(sys.argv[1]))
    try:
        core = _start(link)
        if core is None:
            return 1
        try:
            return _serve(core, link)
        finally:
            core.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the front is gone


def _start(link: Connection) -> EngineCore | None:
    setup = link.recv()
    if not isinstance(setup, Setup):
        return None
    try:
        core = build_core(setup.path, setup.options, setup.load, lambda count: link.send(Progress(count)))
    except HeadraceError as error:
        link.send(_failed(error))
        return None
    plan = asdict(core.memory) | {"total": core.memory.total}
    link.send(Ready(numerics=core.model.numerics.name, max_context=core.max_context, memory=plan))
    return core


def _serve(core: EngineCore, link: Connection) -> int:
    compiler = Compiler(core.samplers.compile)
    while True:
        while link.poll(_patience(core, compiler)):
            _handle(core, compiler, link, link.recv())
        for submission, compiled, is_cancelled in compiler.done():
            _submit(core, link, submission, compiled)
            if is_cancelled:
                core.cancel(submission.request_id)
        if core.is_idle:
            continue
        try:
            events = core.step()
        except HeadraceError as error:
            link.send(_failed(error))
            return 1
        if events:
            link.send(events)


def _patience(core: EngineCore, compiler: Compiler) -> float | None:
    """Return how long to wait for a message: for ever only where there is nothing else to do."""
    if not core.is_idle:
        return 0
    return _COMPILE_POLL_S if compiler.is_busy else None


def _handle(core: EngineCore, compiler: Compiler, link: Connection, message: ToEngine) -> None:
    if isinstance(message, Submission):
        if message.params.structured is not None:
            waiting, limit = compiler.num_waiting + core.counts["queued"], core.options.max_waiting
            if waiting >= limit:
                text = f"{waiting} requests wait already; accepted are {limit}, so try again later"
                _refuse(link, message.request_id, OverloadedError(text))
                return
            compiler.add(message, message.params.structured)
        else:
            _submit(core, link, message, None)
    elif isinstance(message, Cancel):
        if not compiler.cancel(message.request_id):
            core.cancel(message.request_id)
    elif isinstance(message, Query):
        link.send(Answer(message.token, _answer(core, message)))


def _submit(
    core: EngineCore, link: Connection, submission: Submission, compiled: Compiled | HeadraceError | None
) -> None:
    try:
        if isinstance(compiled, HeadraceError):
            raise compiled
        core.submit(submission, compiled)
    except HeadraceError as error:
        refused = _failed(error)
    except Exception as error:  # noqa: BLE001 - what one request can cause must not end the others
        refused = Failed(InternalError.__name__, f"the request could not be taken: {error!r}", None)
    else:
        return
    _tell_refused(link, submission.request_id, refused)


def _refuse(link: Connection, request_id: str, error: HeadraceError) -> None:
    _tell_refused(link, request_id, _failed(error))


def _tell_refused(link: Connection, request_id: str, refused: Failed) -> None:
    link.send([ErrorEvent(request_id=request_id, kind=refused.kind, message=refused.message, param=refused.param)])


def _answer(core: EngineCore, query: Query) -> Any:
    if query.what == "traces":
        return core.traces.newest()
    if query.what == "totals":
        return _status(core, core.memory), core.totals
    if query.what == "audit":
        try:
            core.audit()
        except HeadraceError as error:
            return error.message
        return None
    if query.what in {"clear", "clear disk"}:
        return core.clear_cache(disk=query.what == "clear disk")
    return _status(core, core.memory)


def _status(core: EngineCore, plan: MemoryPlan) -> dict[str, float]:
    return {
        "pid": os.getpid(),
        **core.pools,
        "planned_bytes": plan.total,
        "resident_bytes": resident_bytes(),
        "peak_bytes": peak_bytes(),
        **core.counts,
        **core.cache.tier_status,
        **core.draft_status,
    }


def _failed(error: HeadraceError) -> Failed:
    return Failed(type(error).__name__, error.message, error.param)


if __name__ == "__main__":
    sys.exit(main())
