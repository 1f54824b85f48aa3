"""Where one request stands: its phase, the rows planned so far, and what it holds."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from headrace.core.errors import InternalError
from headrace.engine.scheduler.config import SchedulerConfig
from headrace.engine.scheduler.request import Request, own_blocks


class Phase(Enum):
    """Where a request is between two steps."""

    QUEUED = "queued"
    FORKING = "forking"  # a further answer whose prompt is still being read by the first one
    PREFILL = "prefill"
    DECODE = "decode"
    SWAPPED = "swapped"


class EndReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class WaitReason(Enum):
    """Why a request has no row in a step."""

    TURN = "turn"  # behind a request of higher priority or earlier arrival
    SLOTS = "slots"
    BLOCKS = "blocks"
    HEADROOM = "headroom"  # the blocks exist, but running requests are about to need them
    PROMISE = "promise"  # the blocks exist, but a request ahead could then not run to its end
    HOST = "host"  # nobody can be swapped out: host memory is used up
    PARTIAL = "partial"  # as many prompts in prefill as allowed
    PREFIX = "prefix"  # another request is computing a prefix of this one
    LOADING = "loading"  # what lower tiers of the cache have of its prompt is being read
    PARENT = "parent"  # a further answer waits for its prompt to be read
    ROWS = "rows"  # the step budget is used up
    RETURNED = "returned"  # back from host memory in this step, decodes in the next


Rank = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A request in the books. A value: every change makes a new one.

    Args:
        request: as submitted; a further answer has its own id here.
        phase: where it is.
        parent: for a further answer, the id of the first one.
        branch: 0, or the number of a further answer, from 1.
        unforked: further answers that still wait for this prompt.
        slot: its slot while it runs.
        computed: tokens from position 0 on whose rows are planned, re-used ones included.
        cached: c of its match; rows below are not written.
        generated: tokens of the answer that are planned.
        blocks: blocks in its table, those in host memory included.
        host_blocks: how many of these are in host memory.
        reserved: pool blocks kept for the copies that its further answers need.
        was: for a swapped one, the phase it returns to.
        waits_for: the request whose prefix it waits for.
        wait_tokens: how far that request must be.
        skipped: steps in a row that its prefill went without rows.
    """

    request: Request
    phase: Phase = Phase.QUEUED
    parent: str | None = None
    branch: int = 0
    unforked: int = 0
    slot: int | None = None
    computed: int = 0
    cached: int = 0
    generated: int = 0
    blocks: int = 0
    host_blocks: int = 0
    reserved: int = 0
    was: Phase | None = None
    waits_for: str | None = None
    wait_tokens: int = 0
    skipped: int = 0

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @cached_property
    def rank(self) -> Rank:
        """Order of service; a smaller one goes first."""
        return (-self.request.priority, self.request.arrival, self.branch)

    @property
    def is_running(self) -> bool:
        """Whether it has a slot."""
        return self.phase in {Phase.PREFILL, Phase.DECODE}

    @property
    def held_slot(self) -> int:
        """Its slot.

        Raises:
            InternalError: it has none.
        """
        if self.slot is None:
            raise InternalError(f"request {self.request_id!r} has no slot in phase {self.phase.value}")
        return self.slot

    @property
    def slots(self) -> int:
        """Slots it occupies while it runs, those of its further answers included."""
        return 1 + self.unforked

    @property
    def device_blocks(self) -> int:
        """Blocks of its table that are in the pool."""
        return self.blocks - self.host_blocks

    def missing_blocks(self, config: SchedulerConfig) -> int:
        """Return the pool blocks it may still ask for until its end, those in host memory included."""
        most = config.blocks_for(self.request.max_tokens_stored) + self.unforked * own_blocks(self.request, config)
        return most - self.device_blocks - self.reserved
