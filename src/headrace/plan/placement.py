"""What goes where: memory first for what every token needs, then sequences, then weights that can be read when needed.

Rules. Memory is filled in this order: weights that every token reads; running sequences, each with its windows, state
and global KV; draft module; vision tower; routed experts; n-gram tables. Experts and tables may lie on disk in part,
and are then read when a token needs them; a sequence that does not fit rests on disk with its global KV and runs later;
draft module and vision tower are in memory or unused. The disk holds the checkpoint whole (memory is filled from it)
and the global KV of resting sequences.
"""

from dataclasses import dataclass, field

from headrace.plan.facts import DRAFT, EXPERTS, TABLES, VISION, Facts
from headrace.plan.sizes import gigabytes

_LAST = (DRAFT, VISION, EXPERTS, TABLES)
_SPLITS = frozenset({EXPERTS, TABLES})


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`num_bytes` of one thing, `in_memory` of them in memory, `on_disk` of them only on disk."""

    name: str
    num_bytes: int
    in_memory: int
    on_disk: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where everything lies, and what does not fit.

    `memory_needed` would hold everything at once; `running` of the sequences are in memory together. `problems` are
    sentences on what does not fit anywhere, `remarks` on what works but is slower.
    """

    parts: tuple[Part, ...]
    sessions: int
    running: int
    memory: int | None
    disk: int | None
    memory_needed: int
    memory_used: int
    disk_needed: int
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the sequences can be served at all with these budgets."""
        return not self.problems


@dataclass
class _Room:
    """Memory being given out. `left` None: no limit."""

    left: int | None
    parts: list[Part] = field(default_factory=list)

    def take(self, name: str, size: int, *, splits: bool) -> int:
        """Place as much as there is room for, all or nothing unless it splits; return the bytes placed."""
        placed = size
        if self.left is not None:
            placed = min(size, self.left) if splits or size <= self.left else 0
            self.left -= placed
        self.parts.append(Part(name=name, num_bytes=size, in_memory=placed, on_disk=size - placed))
        return placed

    def take_sequences(self, count: int, kv: int, fixed: int) -> int:
        """Place whole sequences as far as they fit; return how many. The others leave their global KV on disk."""
        running = count
        if self.left is not None:
            running = min(count, self.left // (kv + fixed)) if kv + fixed else count
            self.left -= running * (kv + fixed)
        resting = count - running
        for name, each, outside in (("global KV", kv, resting * kv), ("windows and state", fixed, 0)):
            self.parts.append(Part(name=name, num_bytes=count * each, in_memory=running * each, on_disk=outside))
        return running


def place(facts: Facts, context: int, sessions: int, memory: int | None, disk: int | None) -> Placement:
    """Place a model and its sequences.

    Args:
        facts: the model.
        context: tokens of every sequence; none is shared.
        sessions: sequences that are to be kept.
        memory: bytes of memory, None for no limit.
        disk: bytes of disk, None for no limit.
    """
    kv, fixed = facts.kv_bytes(context), facts.window_bytes + facts.state_bytes
    core = sum(part.num_bytes for part in facts.weights if part.kind not in _LAST)
    room = _Room(memory)
    room.take("weights that every token reads", core, splits=True)
    running = room.take_sequences(sessions, kv, fixed)
    resting = sessions - running
    remarks = []
    for kind in _LAST:
        size = facts.num_bytes(kind)
        if size:
            remarks += _remark(kind, size, room.take(kind, size, splits=kind in _SPLITS))
    if resting and running:
        remarks.append(
            f"{running} of {sessions} sequences are in memory at once; the others rest on disk with "
            f"{gigabytes(resting * kv)} of global KV, and their windows are rebuilt or kept apart."
        )
    problems = []
    if memory is not None and core + kv + fixed > memory:
        problems.append(
            f"memory of {gigabytes(memory)} does not hold the weights that every token reads ({gigabytes(core)}) and "
            f"one sequence ({gigabytes(kv + fixed)}); {gigabytes(core + kv + fixed)} is the least."
        )
    disk_needed = facts.weight_bytes + resting * kv
    if disk is not None and disk_needed > disk:
        problems.append(
            f"disk of {gigabytes(disk)} does not hold the checkpoint ({gigabytes(facts.weight_bytes)}) and the global "
            f"KV of {resting} resting sequences ({gigabytes(resting * kv)}); {gigabytes(disk_needed)} is the least."
        )
    return Placement(
        parts=tuple(room.parts),
        sessions=sessions,
        running=running,
        memory=memory,
        disk=disk,
        memory_needed=facts.weight_bytes + sessions * (kv + fixed),
        memory_used=sum(part.in_memory for part in room.parts),
        disk_needed=disk_needed,
        problems=tuple(problems),
        remarks=tuple(remarks),
    )


def _remark(kind: str, size: int, placed: int) -> list[str]:
    """Say what it means that a kind of weights is not in memory whole."""
    if placed == size:
        return []
    if kind in _SPLITS:
        return [
            f"{kind}: {gigabytes(placed)} of {gigabytes(size)} are in memory, the rest is read from disk when a token "
            "needs it."
        ]
    return [f"{kind}: {gigabytes(size)} does not fit into memory and is left unused."]
