"""A step being planned: the books it changes and the lists it fills."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.engine.scheduler.books import Books
from headrace.engine.scheduler.entry import Entry, Rank, WaitReason
from headrace.engine.scheduler.plan import (
    Admission,
    Allocation,
    DecodeRow,
    Ended,
    Fork,
    Pool,
    Preemption,
    PrefillChunk,
    StepPlan,
    SwapIn,
)


@dataclass
class Work:
    """What the passes of a step share.

    `drafts` is how many guesses each request in decode would like to have verified; `lacking` the rank of the first
    running request without a block it needs.
    """

    books: Books
    drafts: Mapping[str, int] = field(default_factory=dict)
    lacking: Rank | None = None
    ended: list[Ended] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    swap_ins: list[SwapIn] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    decodes: list[DecodeRow] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    waits: dict[str, WaitReason] = field(default_factory=dict)

    def wait(self, entry: Entry, reason: WaitReason) -> None:
        """Say why a request has no row."""
        self.waits[entry.request_id] = reason

    def allocate(self, request_id: str, blocks: int) -> None:
        """List new blocks for a request; the books have them already."""
        if blocks:
            self.allocations.append(Allocation(request_id=request_id, blocks=blocks))

    def change(self, entry: Entry, **fields: object) -> Entry:
        """Replace fields of a started request."""
        changed = replace(entry, **fields)  # type: ignore[arg-type]
        self.books.started[entry.request_id] = changed
        return changed

    def plan(self, pool: Pool) -> StepPlan:
        """Return the finished plan, its waits in order of rank."""
        taken = sum(one.blocks for one in self.allocations) + sum(one.blocks for one in self.swap_ins)
        taken += sum(one.own_blocks for one in self.forks)
        order = [entry.request_id for entry in self.books.live()]
        return StepPlan(
            ended=tuple(self.ended),
            preemptions=tuple(self.preemptions),
            admissions=tuple(self.admissions),
            evictions=max(0, taken - pool.free),
            swap_ins=tuple(self.swap_ins),
            allocations=tuple(self.allocations),
            decodes=tuple(self.decodes),
            prefills=tuple(self.prefills),
            forks=tuple(self.forks),
            waits=tuple((name, self.waits[name]) for name in order if name in self.waits),
        )
