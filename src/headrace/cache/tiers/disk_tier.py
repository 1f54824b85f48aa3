"""Blocks on disk: written behind by a thread, never at the cost of a step; read with checks."""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.cache.tiers.files import Files
from headrace.cache.tiers.incidents import Incident, Incidents
from headrace.cache.tiers.index import Place
from headrace.cache.tiers.segment import Kind, Record, digest_of
from headrace.cache.tiers.store import SegmentStore, StoreOptions

_BATCH = 32
QUEUE_BYTES = 64 << 20
"""Bytes that may wait to be written."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """What is to rest on disk: a payload and the fields of `Record` that it does not say itself."""

    key: bytes
    parent: bytes
    kind: Kind
    is_approximate: bool
    num_tokens: int
    tokens: int
    payload: bytes

    def record(self) -> Record:
        """Return the record's header; takes the payload's digest."""
        return Record(
            key=self.key,
            parent=self.parent,
            kind=self.kind,
            is_approximate=self.is_approximate,
            num_tokens=self.num_tokens,
            tokens=self.tokens,
            length=len(self.payload),
            digest=digest_of(self.payload),
        )


class DiskTier:
    """A `SegmentStore` behind a queue. Owns the writing thread and what waits for it, at most `queue_bytes`.

    `put` and `touch` never wait: what finds the queue full is not written, which loses a cache entry and nothing else.
    """

    def __init__(
        self,
        folder: Path,
        namespace: Mapping[str, str],
        options: StoreOptions,
        *,
        files: Files | None = None,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        """Open the directory.

        Raises:
            OSError: it can be neither created nor read.
        """
        self.incidents = Incidents()
        self.store = SegmentStore(folder, namespace, options, incidents=self.incidents, files=files)
        self._queue_bytes = queue_bytes
        self._waiting: deque[Item | tuple[bytes, ...]] = deque()
        self._waiting_bytes = 0
        self._is_writing = self._is_closed = False
        self._wants_clear = self._is_cleared = False
        self._changed = threading.Condition()
        self.written = self.written_bytes = self.dropped = self.loaded = self.loaded_bytes = 0
        self._thread = threading.Thread(target=self._write_behind, name="headrace-disk-tier", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------------- writing

    def put(self, item: Item) -> bool:
        """Let an item be written soon; return whether there was room in the queue."""
        with self._changed:
            if self._is_closed or self.store.is_read_only:
                return False
            if self._waiting_bytes + len(item.payload) > self._queue_bytes:
                self.dropped += 1
                return False
            self._waiting.append(item)
            self._waiting_bytes += len(item.payload)
            self._changed.notify_all()
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note soon that keys, those nearer to the root first, were used."""
        with self._changed:
            if keys and not self._is_closed:
                self._waiting.append(tuple(keys))
                self._changed.notify_all()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything that was put is written or refused; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._is_writing and not self._wants_clear, timeout_s
            )

    def clear(self) -> bool:
        """Forget every record, and what waits to be written; return whether that was possible."""
        with self._changed:
            self._waiting_bytes -= sum(len(one.payload) for one in self._waiting if isinstance(one, Item))
            self._waiting.clear()
            self._wants_clear, self._is_cleared = True, False
            self._changed.notify_all()
        return self.flush() and self._is_cleared

    def close(self) -> None:
        """Write what waits, seal, and let go of the directory."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self.store.close()

    def _write_behind(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._wants_clear or self._is_closed)
                if not self._waiting and not self._wants_clear:
                    return
                wants_clear = self._wants_clear
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
                self._is_writing = True
            items = [one for one in batch if isinstance(one, Item)]
            try:
                if wants_clear:
                    self._is_cleared = self.store.clear()
                self._write(items)
                self.store.touch([key for one in batch if not isinstance(one, Item) for key in one])
            except Exception as problem:  # noqa: BLE001 - whatever it is, it must not end the thread that others wait for
                self.store.refuse_writes(Incident.WRITE_ERROR, repr(problem))
            with self._changed:
                self._waiting_bytes -= sum(len(item.payload) for item in items)
                self._wants_clear = self._wants_clear and not wants_clear

    def _write(self, items: Sequence[Item]) -> None:
        if not items:
            return
        count = self.store.write([(item.record(), item.payload) for item in items])
        self.written += count
        self.written_bytes += sum(len(item.payload) for item in items) if count == len(items) else 0

    # ------------------------------------------------------------------------------------------------------- reading

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Place]:
        """Return the places of the keys that are there."""
        return self.store.find(keys)

    def load(self, key: bytes, place: Place, *, is_approximate: bool) -> bytes | None:
        """Return a payload, None if it cannot be trusted; it is forgotten then."""
        found = self.store.load(key, place, is_approximate=is_approximate)
        if found is not None and found[0].kind is Kind.ALIAS:
            target = found[1]
            at = self.store.find([target]).get(target)
            found = None if at is None else self.store.load(target, at, is_approximate=False)
            self.touch([target])
        if found is None:
            return None
        self.loaded += 1
        self.loaded_bytes += len(found[1])
        return found[1]

    def status(self) -> dict[str, float]:
        """Return what the metrics of this tier are: counts, bytes, and seconds.

        `retention_s` is how long ago the record was used that would be forgotten first: what was used since is here.
        An index that cannot be read knows of nothing.
        """
        rows, times, records = self.store.sums()
        with self._changed:
            waiting, dropped = len(self._waiting), self.dropped
        incidents = {f"incident_{name}": count for name, count in self.incidents.counts.items()}
        return {
            "records": records,
            "segments": len(rows),
            "bytes": sum(row.size for row in rows),
            "live_bytes": sum(row.live for row in rows),
            "written": self.written,
            "dropped": dropped,
            "queued": waiting,
            "loaded": self.loaded,
            "loaded_bytes": self.loaded_bytes,
            "evicted": self.store.evicted,
            "retention_s": 0.0 if times is None else max(0.0, time.time() - times[0] / 1e6),
            "is_read_only": float(self.store.is_read_only),
            **incidents,
        }
