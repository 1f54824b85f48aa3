"""What an engine's memory is spent on, stated before it starts."""

import ctypes
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.cache.block_pool import BLOCK_TOKENS
from headrace.cache.snapshot import snapshot_bytes
from headrace.cache.state_shape import StateShape
from headrace.cache.tiers.disk_tier import QUEUE_BYTES
from headrace.core.errors import CapacityError
from headrace.engine.core.options import EngineOptions, free_memory
from headrace.engine.core.request_memory import ANSWER_BYTES, request_budget
from headrace.kernels.block_quant import Q8_GROUP

_DEFAULT_CONTEXTS = 4
_DEFAULT_SHARE = 0.25  # of the free memory, for blocks, where no limit is given
_SNAPSHOT_SHARE = 0.1
_MIN_SNAPSHOTS = 64
_LIBRARY_CACHES = 192 << 20  # oneDNN keeps up to 1,024 compiled products, 0.1 to 0.16 MB each
_GUARDED_SHARE = 0.95
_LOOK_EVERY = 8
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose. The process stays within their sum.

    Attributes:
        process: interpreter and libraries, measured before loading.
        libraries: what PyTorch's libraries keep for products of shapes they have met.
        weights: the model, measured after loading; n-gram tables included unless their rows are read one by one, and
            the row cache before them.
        scratch: what one step of `max_rows` rows needs while it runs, measured.
        blocks: `num_blocks` blocks of 128 tokens.
        slots: fixed-size states of running sequences.
        snapshots: window states kept for reuse, at most.
        host: states of preempted requests, at most.
        tiers: cached blocks in host memory, at most, and those on their way to disk.
        requests: prompts and log-probabilities asked for (`request_budget`), and the values of tokens in the blocks.
    """

    process: int
    libraries: int
    weights: int
    scratch: int
    blocks: int
    slots: int
    snapshots: int
    host: int
    tiers: int
    requests: int
    num_blocks: int
    block_bytes: int
    slot_bytes: int

    @property
    def total(self) -> int:
        """All of it."""
        before = self.process + self.libraries + self.weights + self.scratch
        return before + self.blocks + self.slots + self.snapshots + self.host + self.tiers + self.requests


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Bytes that were measured: process, weights, scratch."""

    process: int
    weights: int
    scratch: int


def block_bytes(shape: StateShape) -> int:
    """Return the bytes of one block of all sources."""
    row = shape.head_dim // 2 + shape.head_dim // 16 + shape.index_head_dim // 2 + shape.index_head_dim // 32
    return sum(BLOCK_TOKENS // ratio * row for ratio in shape.source_ratios.values())


def slot_bytes(shape: StateShape) -> int:
    """Return the bytes of one slot."""
    rings = (
        (shape.num_layers + shape.num_draft_layers) * shape.ring_depth * (shape.head_dim + shape.head_dim // Q8_GROUP)
    )
    return rings + len(shape.pair_sources) * (shape.window + 1) * 2 * shape.head_dim * 4


def plan_memory(shape: StateShape, options: EngineOptions, max_context: int, measured: Measured) -> MemoryPlan:
    """Divide memory.

    Args:
        shape: sizes of a sequence's state.
        options: budgets.
        max_context: tokens of the longest sequence.
        measured: what is spent already.

    Raises:
        CapacityError: the limit leaves no room for one sequence of the longest kind; the numbers are in the sentence.
    """
    per_block, per_slot = block_bytes(shape), slot_bytes(shape)
    longest = -(-max_context // BLOCK_TOKENS)
    slots = options.num_slots * per_slot
    host = options.host_bytes if options.host_bytes is not None else per_slot + longest * per_block
    budget, values = request_budget(max_context), BLOCK_TOKENS * ANSWER_BYTES
    tiers = options.host_cache_bytes + (0 if options.cache_dir is None else QUEUE_BYTES)
    fixed = measured.process + _LIBRARY_CACHES + measured.weights + measured.scratch + slots + host + tiers + budget
    if options.cache_tokens is not None:
        count = -(-options.cache_tokens // BLOCK_TOKENS)
    elif options.max_memory is not None:
        left = options.max_memory - fixed - (options.snapshot_bytes or 0)
        share = _SNAPSHOT_SHARE if options.snapshot_bytes is None else 0
        count = int(left / (per_block * (1 + share) + values))
    else:
        count = max(longest, min(_DEFAULT_CONTEXTS * longest, int(free_memory() * _DEFAULT_SHARE) // per_block))
    least = _MIN_SNAPSHOTS * snapshot_bytes(shape) if options.max_memory is None else 0
    snapshots = options.snapshot_bytes
    if snapshots is None:
        snapshots = max(least, int(_SNAPSHOT_SHARE * max(0, count) * per_block))
    plan = MemoryPlan(
        process=measured.process,
        libraries=_LIBRARY_CACHES,
        weights=measured.weights,
        scratch=measured.scratch,
        blocks=count * per_block,
        slots=slots,
        snapshots=snapshots,
        host=host,
        tiers=tiers,
        requests=budget + max(0, count) * values,
        num_blocks=count,
        block_bytes=per_block,
        slot_bytes=per_slot,
    )
    _check(plan, options, longest)
    return plan


def _check(plan: MemoryPlan, options: EngineOptions, longest: int) -> None:
    if options.max_memory is not None and plan.num_blocks >= 1 and plan.total > options.max_memory:
        raise CapacityError(
            f"the plan needs {plan.total:,} bytes and max_memory is {options.max_memory:,}; a smaller cache_tokens or "
            "a larger limit is accepted",
            param="max_memory",
        )
    if plan.num_blocks < 1:
        least = plan.total - plan.blocks - plan.snapshots + longest * plan.block_bytes
        raise CapacityError(
            f"max_memory is {options.max_memory:,} bytes; one sequence of the longest kind needs {least:,} "
            f"({plan.process + plan.libraries + plan.weights:,} for process, libraries and weights, "
            f"{plan.scratch:,} scratch, {plan.slots:,} slots, {plan.host:,} for preempted requests, "
            f"{plan.requests:,} for prompts and answers, "
            f"{longest} blocks of {plan.block_bytes:,})",
            param="max_memory",
        )


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory now."""
    return _status("VmRSS") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def peak_bytes() -> int:
    """Return the most bytes that this process had in memory since the last `reset_peak`, or since its start."""
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def reset_peak() -> None:
    """Begin a new peak, where the system lets a process do so."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def measure_scratch(run: Callable[[], object]) -> int:
    """Return how much more memory a call needs while it runs than there is in use before it."""
    before = resident_bytes()
    reset_peak()
    run()
    return max(0, peak_bytes() - before)


def _status(name: str) -> int:
    try:
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    except OSError:
        return 0
    return 0


class MemoryGuard:
    """Gives freed memory back to the system before the process grows past its plan. Owns when it last looked."""

    def __init__(self, plan: MemoryPlan) -> None:
        self._limit = int(_GUARDED_SHARE * plan.total)
        self._steps = 0
        self._trim: Callable[[int], int] | None = None
        try:
            self._trim = ctypes.CDLL(None).malloc_trim
        except (OSError, AttributeError):
            return  # another C library: it keeps no such heap

    def after_step(self) -> None:
        """Look every few steps."""
        self._steps += 1
        if self._steps % _LOOK_EVERY == 0 and self._trim is not None and resident_bytes() > self._limit:
            self._trim(0)
