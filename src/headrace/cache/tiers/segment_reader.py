"""Reads segments: one record, checked, or all that are whole."""

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from threading import RLock

from headrace.cache.tiers.files import Files
from headrace.cache.tiers.segment import (
    RECORD_HEADER_BYTES,
    RECORD_MAGIC,
    SEGMENT_HEADER_BYTES,
    Damaged,
    Record,
    digest_of,
    unpack_record,
    unpack_segment,
)

_SEARCHED = 1 << 16


class SegmentReader:
    """Reads records of the segments in one folder. Owns at most `most_open` descriptors; any thread may call it."""

    def __init__(self, files: Files, folder: Path, most_open: int = 32) -> None:
        self._files = files
        self._folder = folder
        self._most = most_open
        self._open: OrderedDict[str, tuple[int, bytes]] = OrderedDict()
        self._lock = RLock()

    def read(self, name: str, offset: int, length: int, namespace: bytes) -> tuple[Record, bytes]:
        """Return a record and its payload.

        Raises:
            Damaged: it is not what its header and its segment's header must say.
            OSError: it cannot be read.
        """
        with self._lock:
            descriptor, found = self._of(name)
            if found != namespace:
                raise Damaged("the segment is of another namespace")
            content = self._files.read(descriptor, RECORD_HEADER_BYTES + length, offset)
        record = unpack_record(content[:RECORD_HEADER_BYTES])
        payload = content[RECORD_HEADER_BYTES:]
        if record.length != length or len(payload) != length:
            raise Damaged("a record's payload is cut off")
        if digest_of(payload) != record.digest:
            raise Damaged("a record's payload does not fit its digest")
        return record, payload

    def forget(self, name: str) -> None:
        """Close a segment, so that it is opened anew where it is read again."""
        with self._lock:
            found = self._open.pop(name, None)
            if found is not None:
                self._files.close(found[0])

    def close(self) -> None:
        """Close everything."""
        for name in list(self._open):
            self.forget(name)

    def _of(self, name: str) -> tuple[int, bytes]:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        descriptor = self._files.open(self._folder / name)
        try:
            namespace, _ = unpack_segment(self._files.read(descriptor, SEGMENT_HEADER_BYTES, 0))
        except BaseException:
            self._files.close(descriptor)
            raise
        self._open[name] = descriptor, namespace
        if len(self._open) > self._most:
            self.forget(next(iter(self._open)))
        return descriptor, namespace


class Scan:
    """What a walk over a segment found besides its records: bytes that are no record, and where the last one ends."""

    def __init__(self) -> None:
        self.end = SEGMENT_HEADER_BYTES
        self.damage: list[str] = []


def scan(files: Files, descriptor: int, start: int, found: Scan) -> Iterator[tuple[int, Record]]:
    """Yield offset and header of every record from `start` on whose payload is there to its end; payloads are not read.

    After damage the walk goes on at the next valid header.

    Raises:
        OSError: the file cannot be read.

    State: `found` is complete when the walk is.
    """
    offset, size = max(start, SEGMENT_HEADER_BYTES), files.size(descriptor)
    found.end = min(offset, size)
    while offset < size:
        try:
            record = unpack_record(files.read(descriptor, RECORD_HEADER_BYTES, offset))
            if offset + record.nbytes > size:
                raise Damaged("a record's payload is cut off")
        except Damaged as damage:
            found.damage.append(damage.what)
            following = _next_header(files, descriptor, offset + 1, size)
            if following is None:
                return
            offset = following
            continue
        yield offset, record
        offset += record.nbytes
        found.end = offset


def _next_header(files: Files, descriptor: int, offset: int, size: int) -> int | None:
    """Return the place of the next valid header whose payload is there, None if there is none."""
    while offset < size:
        part = files.read(descriptor, _SEARCHED + len(RECORD_MAGIC) - 1, offset)
        place = part.find(RECORD_MAGIC)
        while place >= 0:
            try:
                record = unpack_record(files.read(descriptor, RECORD_HEADER_BYTES, offset + place))
                if offset + place + record.nbytes <= size:
                    return offset + place
            except Damaged:
                pass
            place = part.find(RECORD_MAGIC, place + 1)
        offset += _SEARCHED
    return None
