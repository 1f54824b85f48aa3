"""Keeps a directory within its bytes: forgets what was used least recently, leaves first, and frees whole segments."""

from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.cache.tiers.files import Files
from headrace.cache.tiers.index import INDEX_NAME, LOG_BYTES, SegmentIndex, SegmentRow
from headrace.cache.tiers.segment import RECORD_HEADER_BYTES, SEGMENT_HEADER_BYTES, Damaged, Record
from headrace.cache.tiers.segment_reader import Scan, scan

_SPARSE = 0.5  # copy forward what lives in a segment that is less full


class Appender(Protocol):
    """Writes records to the segment of a namespace that is open now."""

    def append(self, namespace: bytes, records: list[tuple[Record, bytes]], *, is_moved: bool) -> None:
        """Write records and index them."""

    def is_open(self, name: str) -> bool:
        """Say whether a segment is being written by this process."""

    def seal_all(self) -> None:
        """End every segment that is being written."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Hard limits: bytes of all files of the directory, and bytes of the file system left free."""

    max_bytes: int
    min_free: int


class Reclaim:
    """Makes room. The caller holds the directory's lock, so nobody else removes files meanwhile."""

    def __init__(
        self,
        files: Files,
        folder: Path,
        index: SegmentIndex,
        limits: Limits,
        forget: Callable[[str], None],
    ) -> None:
        self._files = files
        self._folder = folder
        self._index = index
        self._limits = limits
        self._close = forget
        self.evicted = 0

    def excess(self, needed: int) -> int:
        """Return how many bytes too many there would be with `needed` more; 0 or less if there is room."""
        used = sum(row.size for row in self._index.segments()) + self._index_bytes()
        over = used + needed - self._limits.max_bytes
        return max(over, self._limits.min_free + needed - self._files.free_bytes(self._folder))

    def make_room(self, needed: int, appender: Appender) -> bool:
        """Free files until `needed` bytes fit; return whether they do."""
        has_sealed = False
        self._index.shrink()
        while self.excess(needed) > 0:
            if self._free_dead(appender) or self._copy_sparse(appender):
                continue
            evicted = self._index.evict(self.excess(needed))
            if evicted:
                self.evicted += evicted
            elif has_sealed:
                return False
            else:
                appender.seal_all()
                has_sealed = True
        return True

    def clear(self, namespaces: Container[bytes], appender: Appender) -> None:
        """Forget every record of some namespaces; the files go, but for those that another process is writing."""
        appender.seal_all()
        for row in self._index.segments():
            if row.namespace not in namespaces:
                continue
            if self._is_ours(row, appender):
                self._remove(row)
            else:
                self._index.cut(row.name, 0)
        self._index.shrink()

    def _free_dead(self, appender: Appender) -> bool:
        dead = [row for row in self._index.segments() if row.live <= 0 and self._is_ours(row, appender)]
        for row in dead:
            self._remove(row)
        return bool(dead)

    def _copy_sparse(self, appender: Appender) -> bool:
        """Copy what lives in the emptiest segment forward, if it is empty enough and the copies have room."""
        rows = [row for row in self._index.segments() if self._is_ours(row, appender) and row.size > 0]
        rows = [row for row in rows if row.live < _SPARSE * (row.size - SEGMENT_HEADER_BYTES)]
        if not rows:
            return False
        row = min(rows, key=lambda one: one.live / one.size)
        if self._files.free_bytes(self._folder) >= row.live:
            with suppress(OSError, Damaged):  # what could not be read goes with its segment
                self._copy(row, appender)
        self._remove(row)
        return True

    def _copy(self, row: SegmentRow, appender: Appender) -> None:
        descriptor = self._files.open(self._folder / row.name)
        try:
            for offset, record in scan(self._files, descriptor, 0, Scan()):
                place = self._index.find([record.key]).get(record.key)
                if place is None or (place.segment, place.offset) != (row.name, offset):
                    continue
                payload = self._files.read(descriptor, record.length, offset + RECORD_HEADER_BYTES)
                appender.append(row.namespace, [(record, payload)], is_moved=True)
        finally:
            self._files.close(descriptor)

    def _remove(self, row: SegmentRow) -> None:
        """Let go of a segment: first nobody finds it, then it is gone."""
        self._index.drop(row.name)
        self._close(row.name)
        self._files.remove(self._folder / row.name)

    def _is_ours(self, row: SegmentRow, appender: Appender) -> bool:
        return row.is_sealed and not appender.is_open(row.name)

    def _index_bytes(self) -> int:
        """Return the bytes of the index; its log counts as if it were as long as it may get."""
        path = self._folder / INDEX_NAME
        return (path.stat().st_size if path.exists() else 0) + LOG_BYTES
