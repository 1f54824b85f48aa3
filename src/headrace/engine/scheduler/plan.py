"""What one step does, as a value."""

from dataclasses import dataclass

from headrace.engine.scheduler.entry import EndReason, Phase, WaitReason


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The block pool between two steps: blocks that are free, and cached blocks that nobody holds."""

    free: int
    evictable: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A request that is over: its blocks are let go, its slot is free, its copy in host memory is dropped."""

    request_id: str
    reason: EndReason
    phase: Phase
    slot: int | None
    computed: int
    generated: int


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """Copy a request's slot and `blocks` of the blocks that it alone holds to host memory, for the sake of another."""

    request_id: str
    slot: int
    blocks: int
    for_request: str


@dataclass(frozen=True, kw_only=True)
class SwapIn:
    """Copy a request's slot and blocks back; `blocks` new ones are allocated for it."""

    request_id: str
    slot: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Start a request: hold its `shared_blocks` matched blocks, bring its state to `first_row`."""

    request_id: str
    slot: int
    first_row: int
    cached_tokens: int
    shared_blocks: int


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Append `blocks` new blocks to a request's table."""

    request_id: str
    blocks: int


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """Run the newest token of the answer, at `position`, and `drafts` guesses of what follows, behind it."""

    request_id: str
    slot: int
    position: int
    drafts: int = 0


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """Run rows [start, stop) of a prompt; what rows below `write_from` produce is dropped."""

    request_id: str
    slot: int
    start: int
    stop: int
    write_from: int
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class Fork:
    """After the parent's last chunk: copy its slot, hold its full blocks, copy its open block if any."""

    request_id: str
    parent: str
    slot: int
    shared_blocks: int
    own_blocks: int  # new blocks for the copy: 1 or 0


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step. It is carried out in the order of the fields.

    `evictions` is how many cached blocks have to go at most; fewer when what ended or was swapped out left free blocks.
    Blocks matched by `admissions` are held before anything is evicted. `waits` names every request that has no row.
    """

    ended: tuple[Ended, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    admissions: tuple[Admission, ...] = ()
    evictions: int = 0
    swap_ins: tuple[SwapIn, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    decodes: tuple[DecodeRow, ...] = ()
    prefills: tuple[PrefillChunk, ...] = ()
    forks: tuple[Fork, ...] = ()
    waits: tuple[tuple[str, WaitReason], ...] = ()

    @property
    def rows(self) -> int:
        """Rows that the step computes."""
        return sum(1 + row.drafts for row in self.decodes) + sum(chunk.stop - chunk.start for chunk in self.prefills)
