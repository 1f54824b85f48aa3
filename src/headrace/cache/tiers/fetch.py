"""Reads what the tiers have of a prompt, beside the engine's steps: in a thread, checked, as far as it pays."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.cache.block_pool import BLOCK_TOKENS
from headrace.cache.chain import Chain
from headrace.cache.resume_rule import exact_row, rebuilt_row, replayed_row
from headrace.cache.snapshot import Snapshot
from headrace.cache.state_shape import StateShape
from headrace.cache.tiers.disk_tier import DiskTier
from headrace.cache.tiers.host_tier import HostTier
from headrace.cache.tiers.incidents import Incident
from headrace.cache.tiers.index import Place
from headrace.cache.tiers.rates import LoadRule
from headrace.cache.tiers.segment import Damaged
from headrace.cache.tiers.windows import best_window, unpack_rows, window_key

STAGED_BYTES = 128 << 20
"""Bytes of one prompt that are held until they are in the pool; a longer prompt is read in several turns."""


@dataclass(frozen=True)
class Wish:
    """A prompt in one lineage, and what the device has of it: `blocks` whole ones, and the `row` it would begin at."""

    chain: Chain
    is_approximate: bool
    blocks: int
    row: int


@dataclass
class Job:
    """A prompt that waits until what the tiers have of it was read.

    Of all `wishes` the one that lets the prompt begin latest is `chosen`; `blocks` are the contents of its whole blocks
    from number `first` on, `tiers` says where each came from, `snapshot` are windows that end within it.
    `is_partial`: there is more than is held at once, to be asked for again. `taken` counts blocks that became cached by
    tier, those of the jobs before it included. `is_settled`: whoever asked has taken what there was.
    """

    num_tokens: int
    can_replay: bool
    wishes: Sequence[Wish]
    chosen: Wish | None = None
    first: int = 0
    blocks: list[bytes] = field(default_factory=list)
    tiers: list[str] = field(default_factory=list)
    snapshot: Snapshot | None = None
    taken: dict[str, int] = field(default_factory=dict)
    num_taken: int = 0
    is_partial: bool = False
    is_ready: bool = False
    is_settled: bool = False


@dataclass(frozen=True)
class _Found:
    """What the tiers have of a wish: whole blocks in a row, where they are, and where windows end."""

    end: int
    host: set[bytes]
    disk: dict[bytes, Place]
    window_ends: dict[int, tuple[bytes, Place]]


class Fetcher:
    """Works through jobs in order of arrival. Owns the thread, and the jobs until they are settled."""

    def __init__(
        self, host: HostTier | None, disk: DiskTier | None, rule: LoadRule, shape: StateShape, block_bytes: int
    ) -> None:
        self._host, self._disk, self._rule = host, disk, rule
        self._window, self._step, self._layers = shape.window, shape.largest_ratio, shape.decoder_start
        self._block_bytes = block_bytes
        self._waiting: deque[Job] = deque()
        self._jobs: list[Job] = []  # those that are not settled
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="headrace-tier-fetch", daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        """Take a job."""
        with self._changed:
            self._waiting.append(job)
            self._jobs.append(job)
            self._changed.notify_all()

    def ready(self) -> list[Job]:
        """Return the jobs that are read and not settled, in order."""
        with self._changed:
            self._jobs = [job for job in self._jobs if not job.is_settled]
            return [job for job in self._jobs if job.is_ready]

    def wait(self, timeout_s: float) -> bool:
        """Wait until a job is ready, for a while; say whether there is one at all."""
        with self._changed:
            self._changed.wait_for(lambda: any(job.is_ready for job in self._jobs), timeout_s if self._jobs else 0)
            return bool(self._jobs)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                job = self._waiting.popleft()
            try:
                self._fetch(job)
            except Exception as problem:  # noqa: BLE001 - whatever it is, the prompt that waits must go on without
                job.chosen = None
                if self._disk is not None:
                    self._disk.incidents.note(Incident.READ_ERROR, "fetch", repr(problem))
            with self._changed:
                job.is_ready = True
                self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------- one job

    def _fetch(self, job: Job) -> None:
        best: tuple[int, Wish, _Found, Snapshot | None, int] | None = None
        for wish in job.wishes:
            found = self._look(wish, job.num_tokens)
            row, end, snapshot = self._start(job, wish, found, found.end)
            if row > wish.row and (best is None or row > best[0]):
                best = row, wish, found, snapshot, end
        if best is None:
            return
        row, wish, found, snapshot, end = best
        nbytes = (end - wish.blocks) * self._block_bytes + (0 if snapshot is None else snapshot.nbytes)
        if not self._rule.pays(nbytes, row - max(one.row for one in job.wishes)):
            return
        self._read(job, wish, found, end)
        have = wish.blocks + len(job.blocks)
        if have < end and not job.is_partial:  # something could not be trusted: begin earlier, if possible
            _, _, snapshot = self._start(job, wish, found, have)
        job.chosen, job.first, job.snapshot = wish, wish.blocks, None if job.is_partial else snapshot

    def _look(self, wish: Wish, num_tokens: int) -> _Found:
        keys = wish.chain.keys[1 : num_tokens // BLOCK_TOKENS + 1]
        missing = keys[wish.blocks :]
        host = set() if self._host is None else self._host.find(missing)
        disk = {} if self._disk is None else self._disk.find([key for key in missing if key not in host])
        end = wish.blocks
        while end < len(keys) and (keys[end] in host or keys[end] in disk):
            end += 1
        window_ends = {}
        if self._disk is not None:
            names = {window_key(key): place + 1 for place, key in enumerate(keys[:end])}
            places = self._disk.find(list(names))
            window_ends = {names[key] * BLOCK_TOKENS: (key, place) for key, place in places.items()}
        return _Found(end, host, disk, window_ends)

    def _start(self, job: Job, wish: Wish, found: _Found, end: int) -> tuple[int, int, Snapshot | None]:
        """Return the first row with `end` whole blocks, how many of them that needs, and windows if they serve it."""
        matched = end * BLOCK_TOKENS
        replayed = replayed_row(job.num_tokens, matched, self._window, self._step) if job.can_replay else 0
        target = exact_row(job.num_tokens, matched, self._window, self._step)
        ends = [place for place in found.window_ends if place <= matched]
        best = best_window(ends, target, self._window, self._step, lambda at: self._rows(wish, found, at))
        rebuilt = rebuilt_row(job.num_tokens, matched, self._window, self._step, self._layers)
        if best is not None and best[1] >= max(rebuilt, replayed):
            return best[1], end if job.can_replay else best[0].num_tokens // BLOCK_TOKENS, best[0]
        return max(rebuilt, replayed), end, None

    def _rows(self, wish: Wish, found: _Found, end: int) -> Snapshot | None:
        if self._disk is None or end not in found.window_ends:
            return None
        key, place = found.window_ends[end]
        payload = self._disk.load(key, place, is_approximate=wish.is_approximate)
        if payload is None:
            return None
        try:
            return unpack_rows(payload)
        except Damaged:
            return None

    def _read(self, job: Job, wish: Wish, found: _Found, end: int) -> None:
        began, nbytes = time.perf_counter(), 0
        for key in wish.chain.keys[wish.blocks + 1 : end + 1]:
            if nbytes >= STAGED_BYTES:
                job.is_partial = True
                break
            payload, tier = None, "host"
            if self._host is not None and key in found.host:
                payload = self._host.get(key)
            if payload is None and self._disk is not None and key in found.disk:
                payload, tier = self._disk.load(key, found.disk[key], is_approximate=wish.is_approximate), "disk"
            if payload is None or len(payload) != self._block_bytes:
                break
            job.blocks.append(payload)
            job.tiers.append(tier)
            nbytes += len(payload)
        self._rule.load_bytes.note(nbytes, time.perf_counter() - began)
