"""The books: every live request, who holds which blocks, and what is left of pool, slots and host memory."""

from dataclasses import dataclass, field, replace

from headrace.engine.scheduler.config import SchedulerConfig
from headrace.engine.scheduler.entry import EndReason, Entry, Phase
from headrace.engine.scheduler.holdings import Holdings
from headrace.engine.scheduler.request import Match, Request, own_blocks
from headrace.engine.scheduler.safety import everyone_can_end


@dataclass
class Books:
    """State of the scheduler. A step works on a copy; the entries in it are values.

    Args:
        config: the budgets.
        queue: requests that wait for their first step.
        forking: further answers that wait for their prompt.
        started: running and swapped requests.
        holdings: the blocks of the started ones.
        ending: requests that end at the next boundary, with the reason.
        host_used: bytes of host memory in use.
        available: blocks that this step can still get, from the free ones and the cache.
        newest_arrival: highest sequence number seen.
    """

    config: SchedulerConfig
    queue: dict[str, Entry] = field(default_factory=dict)
    forking: dict[str, Entry] = field(default_factory=dict)
    started: dict[str, Entry] = field(default_factory=dict)
    holdings: Holdings = field(default_factory=Holdings)
    ending: dict[str, EndReason] = field(default_factory=dict)
    host_used: int = 0
    available: int = 0
    newest_arrival: int | None = None

    def copy(self) -> "Books":
        """Return independent books with the same content."""
        return replace(
            self,
            queue=dict(self.queue),
            forking=dict(self.forking),
            started=dict(self.started),
            holdings=self.holdings.copy(),
            ending=dict(self.ending),
        )

    def find(self, request_id: str) -> Entry | None:
        """Return a live request."""
        return self.queue.get(request_id) or self.forking.get(request_id) or self.started.get(request_id)

    def live(self) -> list[Entry]:
        """Return every live request in order of rank."""
        entries = [*self.queue.values(), *self.forking.values(), *self.started.values()]
        return sorted(entries, key=lambda entry: entry.rank)

    def in_order(self) -> list[Entry]:
        """Return the started requests in order of rank."""
        return sorted(self.started.values(), key=lambda entry: entry.rank)

    def running(self) -> list[Entry]:
        """Return the requests that have a slot, in order of rank."""
        return [entry for entry in self.in_order() if entry.is_running]

    def prefilling(self) -> list[Entry]:
        """Return the requests in prefill, in order of rank."""
        return [entry for entry in self.in_order() if entry.phase is Phase.PREFILL]

    @property
    def free_slots(self) -> int:
        """Slots that are neither in use nor kept for further answers."""
        return self.config.num_slots - sum(entry.slots for entry in self.started.values() if entry.is_running)

    @property
    def host_free(self) -> int:
        """Bytes of host memory not used."""
        return self.config.host_bytes - self.host_used

    @property
    def reserved(self) -> int:
        """Blocks kept for further answers."""
        return sum(entry.reserved for entry in self.started.values())

    def everyone_can_end(self) -> bool:
        """Return whether the rule of `headrace.engine.scheduler.safety` holds."""
        return everyone_can_end(self.config, self.in_order(), self.holdings, self.available, self.host_free)

    def add(self, request: Request) -> None:
        """Put a checked request and its further answers in the queue."""
        self.queue[request.request_id] = Entry(request=request, unforked=len(request.children))
        for branch, name in enumerate(request.children, start=1):
            own = replace(request, request_id=name, children=())
            self.forking[name] = Entry(request=own, phase=Phase.FORKING, parent=request.request_id, branch=branch)
        self.newest_arrival = request.arrival

    def allocate(self, entry: Entry, blocks: int) -> None:
        """Give a running request new blocks."""
        self.available -= blocks
        self.holdings.add(entry.request_id, blocks)
        self.started[entry.request_id] = replace(entry, blocks=entry.blocks + blocks)

    def start(self, entry: Entry, match: Match) -> Entry:
        """Move a request from the queue to prefill with all blocks of its prompt; `available` may fall below 0."""
        request, config = entry.request, self.config
        del self.queue[entry.request_id]
        shared = match.cached_tokens // config.block_tokens
        for names, count in match.holders:
            holders = frozenset(name for name in names if name in self.started)  # some may have ended in this step
            self.available -= 0 if holders else count
            self.holdings.share(holders, entry.request_id, count)
        reserved = entry.unforked * own_blocks(request, config)
        self.available -= reserved
        entry = replace(
            entry,
            phase=Phase.PREFILL,
            slot=self._lowest_free_slot(),
            computed=match.first_row,
            cached=match.cached_tokens,
            blocks=shared,
            reserved=reserved,
            waits_for=None,
        )
        self.allocate(entry, config.blocks_for(request.prompt_tokens) - shared)
        return self.started[entry.request_id]

    def swap_out(self, entry: Entry) -> int | None:
        """Move a running request to host memory; return the blocks moved, None if host memory cannot take its slot."""
        config = self.config
        room = self.host_free - config.slot_bytes
        if room < 0:
            return None
        moved = min(self.holdings.private(entry.request_id), room // config.block_bytes)
        self.holdings.give_back(entry.request_id, moved)
        self.available += moved + entry.reserved
        self.host_used += config.slot_bytes + moved * config.block_bytes
        self.started[entry.request_id] = replace(
            entry, phase=Phase.SWAPPED, was=entry.phase, slot=None, host_blocks=moved, reserved=0, skipped=0
        )
        return moved

    def swap_in(self, entry: Entry) -> Entry:
        """Bring a swapped request back; `available` may fall below 0."""
        reserved = entry.unforked * own_blocks(entry.request, self.config)
        self.available -= entry.host_blocks + reserved
        self.holdings.add(entry.request_id, entry.host_blocks)
        self.host_used -= self.config.slot_bytes + entry.host_blocks * self.config.block_bytes
        back = replace(
            entry,
            phase=entry.was or Phase.DECODE,
            was=None,
            slot=self._lowest_free_slot(),
            host_blocks=0,
            reserved=reserved,
        )
        self.started[entry.request_id] = back
        return back

    def fork(self, parent: Entry) -> list[Entry]:
        """Start the further answers of a request whose prompt has just been read."""
        children = sorted(
            (entry for entry in self.forking.values() if entry.parent == parent.request_id),
            key=lambda entry: entry.rank,
        )
        own = own_blocks(parent.request, self.config)
        self.holdings.fork(parent.request_id, [child.request_id for child in children], own)
        self.started[parent.request_id] = replace(parent, unforked=0, reserved=0)
        for child in children:
            del self.forking[child.request_id]
            self.holdings.add(child.request_id, own)
            self.started[child.request_id] = replace(
                child,
                phase=Phase.DECODE,
                slot=self._lowest_free_slot(),
                computed=parent.computed,
                cached=parent.cached,
                generated=parent.generated,
                blocks=parent.blocks,
            )
        return [self.started[child.request_id] for child in children]

    def end(self, request_id: str) -> Entry | None:
        """Take a request out of the books, with all that it holds; return it as it was."""
        entry = self.find(request_id)
        if entry is None:
            return None
        self.ending.pop(request_id, None)
        if entry.phase is Phase.QUEUED:
            del self.queue[request_id]
        elif entry.phase is Phase.FORKING:
            del self.forking[request_id]
            self._lose_child(entry)
        else:
            del self.started[request_id]
            self.available += self.holdings.drop(request_id) + entry.reserved
            if entry.phase is Phase.SWAPPED:
                self.host_used -= self.config.slot_bytes + entry.host_blocks * self.config.block_bytes
        return entry

    def _lose_child(self, child: Entry) -> None:
        parent = self.find(child.parent or "")
        if parent is None:
            return
        back = own_blocks(parent.request, self.config) if parent.is_running else 0
        self.available += back
        changed = replace(parent, unforked=parent.unforked - 1, reserved=parent.reserved - back)
        (self.queue if parent.phase is Phase.QUEUED else self.started)[parent.request_id] = changed

    def _lowest_free_slot(self) -> int:
        used = {entry.slot for entry in self.started.values()}
        return next(slot for slot in range(self.config.num_slots) if slot not in used)
