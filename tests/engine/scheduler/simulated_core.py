"""An engine core without a model: it carries plans out on block tables of its own and checks every one of them."""

import zlib
from dataclasses import dataclass, field

from headrace.engine.scheduler.entry import Phase
from headrace.engine.scheduler.plan import Pool, StepPlan
from headrace.engine.scheduler.request import Holders, Match, Request, count_holders
from headrace.engine.scheduler.scheduler import Scheduler

IN_HOST = -1
Key = tuple[int, ...]


@dataclass
class Sequence:
    """What the core knows of a request that has started."""

    request: Request
    tokens: list[int]
    slot: int | None
    table: list[int]
    next_row: int
    write_from: int
    is_read: bool = False
    host_bytes: int = 0


@dataclass
class SimulatedCore:
    """Block tables, a prefix index of sealed blocks, and host memory."""

    scheduler: Scheduler
    prompts: dict[str, tuple[int, ...]]
    resume_everywhere: bool = True
    free: set[int] = field(default_factory=set)
    index: dict[Key, int] = field(default_factory=dict)
    keys: dict[int, Key] = field(default_factory=dict)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    matches: dict[str, tuple[list[int], Match]] = field(default_factory=dict)
    drafts: dict[str, int] = field(default_factory=dict)
    evicted: int = 0
    most_host_bytes: int = 0

    def __post_init__(self) -> None:
        self.config = self.scheduler.config
        self.free = set(range(self.config.num_blocks))

    # ------------------------------------------------------------------------------------------------- questions

    def holders(self) -> dict[int, set[str]]:
        """Return who holds each block of the pool that is held at all."""
        held: dict[int, set[str]] = {}
        for name, sequence in self.sequences.items():
            for block in sequence.table:
                if block != IN_HOST:
                    held.setdefault(block, set()).add(name)
        return held

    def pool(self) -> Pool:
        """Return what the scheduler is told: cached blocks that nobody holds can be evicted."""
        held = self.holders()
        return Pool(free=len(self.free), evictable=sum(block not in held for block in self.index.values()))

    def match(self, request: Request, starting: tuple[str, ...]) -> Match:
        """Return the longest chain of indexed blocks, odd tokens of the next one included."""
        size, prompt = self.config.block_tokens, self.prompts[request.request_id]
        blocks: list[int] = []
        while len(prompt) >= (len(blocks) + 1) * size and prompt[: (len(blocks) + 1) * size] in self.index:
            blocks.append(self.index[prompt[: (len(blocks) + 1) * size]])
        cached = len(blocks) * size
        for key in self.index:
            if len(key) == (len(blocks) + 1) * size and key[:cached] == prompt[:cached]:
                cached = max(cached, common(key, prompt))
        if cached // size > len(blocks):
            cached = len(blocks) * size
        first = max(0, min(cached, len(prompt) - self.config.window)) // 2 * 2
        if not self.resume_everywhere:
            first = first // 3 // 2 * 2
        tables = {name: sequence.table for name, sequence in self.sequences.items()}
        tables |= {name: self.matches[name][0] for name in starting if name in self.matches}
        leader, tokens = None, cached
        for name in [*self.sequences, *starting]:
            shared = common(self.prompts[name], prompt) // size * size if name in self.prompts else 0
            done = self.sequences[name].next_row if name in self.sequences else 0
            if shared > tokens and done < shared:
                leader, tokens = name, shared
        found = Match(
            cached_tokens=cached,
            first_row=first,
            holders=count_holders(blocks, tables),
            waits_for=leader,
            wait_tokens=tokens if leader else 0,
        )
        self.matches[request.request_id] = (blocks, found)
        return found

    # ------------------------------------------------------------------------------------------------ carrying out

    def step(self, now: float) -> StepPlan:
        """Plan a step, check it and carry it out."""
        before = {entry.request_id: entry for entry in self.scheduler._books.live()}
        pool = self.pool()
        plan = self.scheduler.plan(now, pool, self.match, self.drafts)
        assert plan.rows <= self.config.max_rows
        self._end(plan)
        self._swap_out(plan)
        self._admit(plan)
        self.evicted = 0
        for back in plan.swap_ins:
            self._swap_in(back.request_id, back.slot, back.blocks)
        for new in plan.allocations:
            self.sequences[new.request_id].table += self._allocate(new.blocks)
        self._run(plan)
        for fork in plan.forks:
            parent = self.sequences[fork.parent]
            table = parent.table[: fork.shared_blocks] + self._allocate(fork.own_blocks)
            request = self.scheduler.entry(fork.request_id).request
            self.sequences[fork.request_id] = Sequence(
                request=request, tokens=list(parent.tokens[: request.prompt_tokens]), slot=fork.slot, table=table,
                next_row=parent.next_row, write_from=0, is_read=True,
            )  # fmt: skip
        assert self.evicted <= plan.evictions
        if not plan.ended and not plan.preemptions:
            assert self.evicted == plan.evictions
        self._check(plan, before)
        return plan

    def _end(self, plan: StepPlan) -> None:
        for over in plan.ended:
            assert over.request_id not in self.ended
            self.ended[over.request_id] = over.reason.value
            sequence = self.sequences.pop(over.request_id, None)
            assert (sequence is None) == (over.phase in {Phase.QUEUED, Phase.FORKING})
            if sequence is not None:
                assert sequence.slot == over.slot
                assert sequence.next_row == over.computed
                self._let_go(sequence.table)

    def _swap_out(self, plan: StepPlan) -> None:
        for out in plan.preemptions:
            sequence, held = self.sequences[out.request_id], self.holders()
            assert sequence.slot == out.slot
            own = [i for i, block in enumerate(sequence.table) if held.get(block) == {out.request_id}]
            moved = own[len(own) - out.blocks :]
            assert len(moved) == out.blocks
            blocks = [sequence.table[i] for i in moved]
            for i in moved:
                sequence.table[i] = IN_HOST
            self._let_go(blocks)
            sequence.slot = None
            sequence.host_bytes = self.config.slot_bytes + out.blocks * self.config.block_bytes
            used = sum(one.host_bytes for one in self.sequences.values())
            self.most_host_bytes = max(self.most_host_bytes, used)
            assert used <= self.config.host_bytes

    def _admit(self, plan: StepPlan) -> None:
        for new in plan.admissions:
            request = self.scheduler.entry(new.request_id).request
            blocks, match = ([], Match()) if request.mode == "full" else self.matches[new.request_id]
            assert (match.cached_tokens, match.first_row) == (new.cached_tokens, new.first_row)
            assert len(blocks) == new.shared_blocks
            self.sequences[new.request_id] = Sequence(
                request=request, tokens=list(self.prompts[new.request_id]), slot=new.slot, table=list(blocks),
                next_row=new.first_row, write_from=new.cached_tokens,
            )  # fmt: skip

    def _swap_in(self, name: str, slot: int, blocks: int) -> None:
        sequence = self.sequences[name]
        places = [i for i, block in enumerate(sequence.table) if block == IN_HOST]
        assert sequence.slot is None
        assert len(places) == blocks
        for i, block in zip(places, self._allocate(blocks), strict=True):
            sequence.table[i] = block
        sequence.slot, sequence.host_bytes = slot, 0
        self._seal(name)

    def _run(self, plan: StepPlan) -> None:
        names = [one.request_id for one in (*plan.decodes, *plan.prefills)]
        assert len(names) == len(set(names))
        window = self.config.window
        for row in plan.decodes:
            sequence = self.sequences[row.request_id]
            assert sequence.is_read
            assert (sequence.slot, sequence.next_row) == (row.slot, row.position)
            assert 0 <= row.drafts <= self.drafts.get(row.request_id, 0)
            last = row.position + row.drafts
            assert last + 1 <= sequence.request.max_tokens_stored or not row.drafts
            assert len(sequence.table) * self.config.block_tokens >= last + 1
            accepted = zlib.crc32(f"{row.position} {row.request_id}".encode()) % (row.drafts + 1)
            for position in range(row.position, row.position + 1 + accepted):
                sequence.tokens.append(zlib.crc32(f"{row.request_id} {position}".encode()) % 1000 + 1000)
            sequence.next_row += 1 + accepted
            if accepted:
                self.scheduler.accept(row.request_id, accepted)
        for chunk in plan.prefills:
            sequence = self.sequences[chunk.request_id]
            total = sequence.request.prompt_tokens
            assert not sequence.is_read
            assert (sequence.slot, sequence.next_row) == (chunk.slot, chunk.start)
            assert chunk.write_from == sequence.write_from
            rows = chunk.stop - chunk.start
            assert rows > 0
            assert chunk.is_last == (chunk.stop == total)
            tail = min(window, total) if sequence.request.mode == "replay" else 1
            assert rows <= max(self.config.chunk, tail if chunk.is_last else 0)
            if chunk.is_last:
                assert rows >= tail
            sequence.next_row, sequence.is_read = chunk.stop, chunk.is_last
        for name in names:
            sequence = self.sequences[name]
            assert IN_HOST not in sequence.table
            assert len(sequence.table) * self.config.block_tokens >= sequence.next_row
            self._seal(name)

    # ----------------------------------------------------------------------------------------------------- blocks

    def _allocate(self, count: int) -> list[int]:
        held, taken = self.holders(), []
        for _ in range(count):
            if not self.free:
                idle = [key for key, block in self.index.items() if block not in held]
                assert idle, "the plan allocates more blocks than there are"
                block = self.index.pop(max(idle, key=len))
                del self.keys[block]
                self.free.add(block)
                self.evicted += 1
            taken.append(self.free.pop())
        return taken

    def _let_go(self, blocks: list[int]) -> None:
        held = self.holders()
        for block in blocks:
            if block != IN_HOST and block not in held and block not in self.keys:
                assert block not in self.free
                self.free.add(block)

    def _seal(self, name: str) -> None:
        sequence, size = self.sequences[name], self.config.block_tokens
        for i in range(sequence.next_row // size):
            key, block = tuple(sequence.tokens[: (i + 1) * size]), sequence.table[i]
            if block != IN_HOST and key not in self.index and block not in self.keys:
                self.index[key], self.keys[block] = block, key

    # ------------------------------------------------------------------------------------------------------ checks

    def _check(self, plan: StepPlan, before: dict) -> None:
        held = self.holders()
        cached = set(self.index.values())
        assert not self.free & (set(held) | cached)
        assert self.free | set(held) | cached == set(range(self.config.num_blocks))
        for sequence in self.sequences.values():
            own = [block for block in sequence.table if block != IN_HOST]
            assert len(own) == len(set(own))
        for block, names in held.items():
            if len(names) > 1:
                first, *others = sorted(names)
                place = self.sequences[first].table.index(block)
                for other in others:
                    assert self.sequences[other].table[place] == block
                    assert self.sequences[other].next_row >= 0
        slots = [one.slot for one in self.sequences.values() if one.slot is not None]
        assert len(slots) == len(set(slots)) <= self.config.num_slots
        groups: dict[Holders, int] = {}
        for names in held.values():
            groups[frozenset(names)] = groups.get(frozenset(names), 0) + 1
        assert groups == self.scheduler.holdings
        live = {entry.request_id for entry in self.scheduler._books.live()}
        rows = [one.request_id for one in (*plan.decodes, *plan.prefills)]
        forked = {one.request_id for one in plan.forks}
        waiting = [name for name, _ in plan.waits]
        assert sorted([*rows, *waiting, *forked]) == sorted(live)
        assert live | {one.request_id for one in plan.ended} == set(before)


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length
