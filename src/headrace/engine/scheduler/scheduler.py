"""`Scheduler`: the queue and the books, and one plan per step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headrace.core.errors import InternalError, OverloadedError, UserError
from headrace.engine.scheduler.books import Books
from headrace.engine.scheduler.config import SchedulerConfig
from headrace.engine.scheduler.entry import EndReason, Entry, Phase
from headrace.engine.scheduler.plan import Pool, StepPlan
from headrace.engine.scheduler.request import Holders, Match, Matcher, Request, check_request
from headrace.engine.scheduler.step import plan_step


def nothing_cached(_request: Request, _starting: tuple[str, ...]) -> Match:
    """Answer for an engine without a prefix cache."""
    return Match()


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Requests per phase and bytes of host memory in use."""

    queued: int
    forking: int
    prefill: int
    decode: int
    swapped: int
    host_bytes: int


class Scheduler:
    """Owns the queue and the books. Not thread-safe: one loop calls it.

    Between two plans the engine reports what it learnt: new requests, cancellations, answers that met a stop. A plan
    counts as carried out: the books are already what they will be after it.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._books = Books(config)

    def submit(self, request: Request) -> None:
        """Take a request, with its further answers.

        Raises:
            UserError: see `check`.
        """
        self.check(request)
        self._books.add(request)

    def check(self, request: Request) -> None:
        """Refuse a request that cannot be taken now.

        Raises:
            UserError: a number is out of range, or an id is in use.
            CapacityError: it can never fit the context, the pool or the slots.
            OverloadedError: too many requests wait.
        """
        books = self._books
        check_request(request, self.config, _Ids(books.find))
        if books.newest_arrival is not None and request.arrival <= books.newest_arrival:
            raise UserError(
                f"arrival is {request.arrival}; accepted is more than {books.newest_arrival}, the newest",
                param="arrival",
            )
        waiting = sum(name not in books.ending for name in books.queue)
        if waiting >= self.config.max_waiting:
            raise OverloadedError(
                f"{waiting} requests wait already; accepted are {self.config.max_waiting}, so try again later"
            )

    def cancel(self, request_id: str) -> bool:
        """End a request at the next boundary, whatever its phase; return whether it was alive."""
        return self.finish(request_id, EndReason.CANCELLED)

    def finish(self, request_id: str, reason: EndReason = EndReason.STOP) -> bool:
        """End a request at the next boundary for a reason the engine found; the first reason given stays."""
        if self._books.find(request_id) is None:
            return False
        self._books.ending.setdefault(request_id, reason)
        return True

    def plan(
        self, now: float, pool: Pool, match: Matcher = nothing_cached, drafts: Mapping[str, int] | None = None
    ) -> StepPlan:
        """Return what the next step does; see `headrace.engine.scheduler.step.plan_step`."""
        plan, self._books = plan_step(self._books, now, pool, match, drafts)
        return plan

    def accept(self, request_id: str, drafts: int) -> None:
        """Count drafts of the last step that turned out to be tokens of the answer.

        Raises:
            InternalError: the request does not decode.
        """
        entry = self._books.started.get(request_id)
        if entry is None or entry.phase is not Phase.DECODE:
            raise InternalError(f"{drafts} drafts of request {request_id!r} were accepted, which does not decode")
        self._books.started[request_id] = replace(
            entry, computed=entry.computed + drafts, generated=entry.generated + drafts
        )

    def entry(self, request_id: str) -> Entry | None:
        """Return where a live request stands."""
        return self._books.find(request_id)

    @property
    def holdings(self) -> dict[Holders, int]:
        """Blocks counted by their holders, as they are after the last plan; for an audit of the pool."""
        return dict(self._books.holdings.groups())

    @property
    def is_idle(self) -> bool:
        """Whether no request is alive."""
        return not (self._books.queue or self._books.forking or self._books.started)

    @property
    def counts(self) -> Counts:
        """How many requests are in each phase."""
        books = self._books
        phases = [entry.phase for entry in books.started.values()]
        return Counts(
            queued=len(books.queue),
            forking=len(books.forking),
            prefill=phases.count(Phase.PREFILL),
            decode=phases.count(Phase.DECODE),
            swapped=phases.count(Phase.SWAPPED),
            host_bytes=books.host_used,
        )


class _Ids:
    """The ids in use, as a container."""

    def __init__(self, find: Callable[[str], Entry | None]) -> None:
        self._find = find

    def __contains__(self, request_id: object) -> bool:
        return isinstance(request_id, str) and self._find(request_id) is not None
