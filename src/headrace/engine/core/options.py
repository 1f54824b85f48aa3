"""How an engine is set up, checked once."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from headrace.core.errors import UserError
from headrace.engine.threads import check_threads
from headrace.kernels.native.choice import choose, wanted_kernels
from headrace.memory.source_name import SCALES_NAMES, SOURCE_NAMES, ScalesName, SourceName

Resume = Literal["exact", "replay"]
PolicyName = Literal["none", "periodic", "full"]
_SMALL_HIDDEN_SIZE = 2048
_CHUNKS = (256, 1024)  # small chunks leave more states to go on from; large ones read weights less often

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "mode": ("replay", "full"),
    "resume": ("exact", "replay"),
    "window_policy": get_args(PolicyName),
    "drafting": ("auto", "always", "off"),
    "drafter": (None, "model", "lookup"),
    "ngram_source": (None, *SOURCE_NAMES),
    "ngram_scales": (None, *SCALES_NAMES),
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of one engine.

    Answers depend on `mode` and, by their length, on `max_context`; with `resume="replay"` also on what is cached.

    Attributes:
        mode: "replay" runs the decoder on the last window of a prompt, "full" on all of it; a request may choose.
        resume: what a request does that finds tokens in the prefix cache but no window state: "exact" encodes again
            from the nearest state, "replay" rebuilds the windows approximately; a request may choose.
        chunk: prefill rows of one request in a step, from 1; None takes 256 for small models, 1,024 for others.
        max_rows: rows of a step, all requests together; None takes a chunk, a window and the slots together.
        num_slots: sequences that run at once.
        max_context: tokens of the longest sequence; None is the model's.
        cache_tokens: tokens that the block pool holds; None takes what `max_memory` leaves, or four of the longest
            sequences within a quarter of the free memory.
        max_memory: bytes of the whole process, stated in the plan; None sets no limit.
        snapshot_bytes: window states kept for reuse; None is a tenth of the blocks' bytes, at least 64 states where no
            `max_memory` is given.
        snapshot_every: tokens between the states kept inside a long prompt, at least 1.
        snapshot_ttl_s: seconds after which a state that nobody used is let go, above 0; None keeps it.
        host_bytes: memory for preempted requests; None is one slot and its longest sequence.
        max_waiting: requests that may wait; one more is refused.
        headroom_blocks: blocks per running request that a start must leave; fewer start more and preempt more.
        has_prefix_cache: whether prompts are reused at all.
        threads: PyTorch threads; None chooses.
        is_audited: check all books at every step and poison freed blocks (tests).
        host_cache_bytes: memory for cached blocks that had to leave the pool; 0 keeps none.
        cache_dir: directory in which cached blocks outlive the engine; None keeps none. Several engines may share one.
        cache_disk_bytes: bytes of all its files.
        min_free_disk: bytes of its file system that are left free.
        window_policy: which window rows rest there too: "none", "periodic" (those that one place needs, every
            `checkpoint_every` tokens) or "full" (all).
        checkpoint_every: see there; at least 128.
        drafting: "off" does not draft, "auto" does where the checkpoint has a draft module and as long as that is
            faster, "always" never pauses. It changes no answer; a single stream gains most.
        drafter: "model" is the checkpoint's draft module, "lookup" looks for the newest tokens earlier in the text;
            None takes the module if there is one.
        ngram_source: where rows of n-gram tables come from: "memory" loads the tables, "mmap" maps their files, "read"
            reads rows with threads, for tables larger than memory. None is "mmap", or "read" where the tables are
            larger than half of the memory.
        ngram_scales: of the source "read": all scales, a 33rd of the tables, in "memory", so that a row is one read of
            the disk, or read from the "file" too; None takes memory for scales up to an eighth of the machine's.
        ngram_cache_bytes: row cache before the tables; None is 256 MiB or the tables' size for "read", else none.
        ngram_workers: threads of the source "read"; None is 4. None of the four changes an answer.
        kernels: which operations native kernels do: "torch", "native", "auto", or "native:" with operations between
            commas; None takes the environment's HEADRACE_KERNELS, else "torch". Part of the numerics: answers are the
            same bits only for the same choice.
        trace_steps: steps whose trace is kept in memory; 0 keeps none.
        trace_file: JSON lines of every step are appended here; None writes none.
    """

    mode: Literal["full", "replay"] = "replay"
    resume: Resume = "exact"
    chunk: int | None = None
    max_rows: int | None = None
    num_slots: int = 16
    max_context: int | None = None
    cache_tokens: int | None = None
    max_memory: int | None = None
    snapshot_bytes: int | None = None
    snapshot_every: int = 256
    snapshot_ttl_s: float | None = 600.0
    host_bytes: int | None = None
    max_waiting: int = 1024
    headroom_blocks: int = 1
    has_prefix_cache: bool = True
    threads: int | None = None
    is_audited: bool = False
    host_cache_bytes: int = 0
    cache_dir: str | None = None
    cache_disk_bytes: int = 64 << 30
    min_free_disk: int = 4 << 30
    window_policy: PolicyName = "none"
    checkpoint_every: int = 2048
    drafting: Literal["auto", "always", "off"] = "off"
    drafter: Literal["model", "lookup"] | None = None
    ngram_source: SourceName | None = None
    ngram_scales: ScalesName | None = None
    ngram_cache_bytes: int | None = None
    ngram_workers: int | None = None
    kernels: str | None = None
    trace_steps: int = 256
    trace_file: str | None = None

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            UserError: a value is out of range.
        """
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                wanted = ", ".join(map(repr, choices))
                raise UserError(f"{name} is {getattr(self, name)!r}; accepted are {wanted}", param=name)
        for name in ("num_slots", "max_waiting", "snapshot_every"):
            _whole(name, getattr(self, name), 1)
        for name in ("max_rows", "max_context", "cache_tokens", "max_memory", "ngram_workers"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        _whole("checkpoint_every", self.checkpoint_every, 128)
        _whole("cache_disk_bytes", self.cache_disk_bytes, 16 << 20)
        for name in ("host_cache_bytes", "min_free_disk"):
            _whole(name, getattr(self, name), 0)
        for name in ("snapshot_bytes", "host_bytes", "trace_steps", "headroom_blocks", "ngram_cache_bytes"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0)
        _seconds("snapshot_ttl_s", self.snapshot_ttl_s)
        if self.chunk is not None and self.chunk < 1:
            raise UserError(f"a chunk of {self.chunk} tokens is not possible; accepted is 1 or more", param="chunk")
        if self.threads is not None:
            check_threads(self.threads)
        choose(wanted_kernels(self.kernels))


def chunk_of(options: EngineOptions, hidden_size: int) -> int:
    """Return the prefill rows of one request in a step."""
    return options.chunk or _CHUNKS[hidden_size >= _SMALL_HIDDEN_SIZE]


def _seconds(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"{name} is {value!r}; accepted are a number of seconds above 0 and None", param=name)


def _whole(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UserError(f"{name} is {value!r}; accepted is a whole number from {low}", param=name)


def free_memory() -> int:
    """Return the bytes of memory that this machine could give now."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
