"""Brings an index in line with the segments that are really there, whatever ended the writers before."""

from pathlib import Path

from headrace.cache.tiers.files import Files
from headrace.cache.tiers.incidents import Incident, Incidents
from headrace.cache.tiers.index import SegmentIndex, SegmentRow
from headrace.cache.tiers.segment import SEGMENT_HEADER_BYTES, SUFFIX, Damaged, Record, unpack_segment
from headrace.cache.tiers.segment_reader import Scan, scan

_BATCH = 512


class Recovery:
    """One walk over a directory. Segments that another process is writing (it holds their lock) are left alone."""

    def __init__(
        self, files: Files, folder: Path, index: SegmentIndex, incidents: Incidents, *, is_rebuilt: bool, used: int
    ) -> None:
        self._files = files
        self._folder = folder
        self._index = index
        self._incidents = incidents
        self._is_rebuilt = is_rebuilt
        self._used = used

    def run(self) -> None:
        """Index what is there and not known, forget what is known and not there, cut torn ends.

        Raises:
            OSError: the folder cannot be read.
            sqlite3.Error: the index cannot be used.
        """
        known = {row.name: row for row in self._index.segments()}
        present = self._files.names(self._folder, SUFFIX)
        for name in sorted(set(known) - set(present)):
            count = self._index.drop(name)
            if count:
                self._note(Incident.MISSING_PAYLOAD, name, f"the file is gone and {count} records were in it")
        for name in present:
            try:
                self._one(name, known.get(name))
            except OSError as problem:
                self._index.drop(name)
                self._note(Incident.READ_ERROR, name, problem.strerror or str(problem))

    def _one(self, name: str, row: SegmentRow | None) -> None:
        try:
            descriptor, is_writable = self._files.open(self._folder / name, is_writable=True), True
        except OSError:
            descriptor, is_writable = self._files.open(self._folder / name), False
        try:
            size = self._files.size(descriptor)
            if row is not None and row.is_sealed and row.size == size:
                return
            if not self._files.try_lock(descriptor):
                return
            self._check(name, descriptor, row, size, is_writable=is_writable)
        finally:
            self._files.close(descriptor)

    def _check(self, name: str, descriptor: int, row: SegmentRow | None, size: int, *, is_writable: bool) -> None:
        try:
            namespace, _ = unpack_segment(self._files.read(descriptor, SEGMENT_HEADER_BYTES, 0))
        except Damaged as damage:
            kind = Incident.EMPTY_FILE if size == 0 else Incident.SHORT_FILE
            kind = Incident.TORN_END if row is None else kind  # its writer was killed when it began the file
            self._note(Incident.BAD_HEADER if size >= SEGMENT_HEADER_BYTES else kind, name, damage.what)
            self._index.drop(name)
            if is_writable:
                self._files.remove(self._folder / name)
            return
        start = SEGMENT_HEADER_BYTES if row is None else row.size
        if size < start:
            count = self._index.cut(name, size)
            self._note(Incident.SHORT_FILE, name, f"{size} bytes are left of {start}, without {count} records")
        self._index.begin(name, namespace, SEGMENT_HEADER_BYTES)
        found = Scan()
        count = self._add(name, descriptor, min(start, size), found)
        if row is None and count and not self._is_rebuilt:
            self._note(Incident.UNINDEXED, name, f"{count} records were not in the index; they are now")
        for what in found.damage[:1]:
            is_end = len(found.damage) == 1 and found.end < size
            self._note(Incident.TORN_END if is_end else Incident.BAD_HEADER, name, what)
        end = min(size, found.end)
        if is_writable and end < size:
            self._files.truncate(descriptor, end)
        self._index.seal(name, end if is_writable else size)

    def _add(self, name: str, descriptor: int, start: int, found: Scan) -> int:
        count = 0
        batch: list[tuple[int, Record]] = []
        for item in scan(self._files, descriptor, start, found):
            batch.append(item)
            if len(batch) == _BATCH:
                count += self._flush(name, batch, found.end)
                batch = []
        return count + self._flush(name, batch, found.end)

    def _flush(self, name: str, batch: list[tuple[int, Record]], end: int) -> int:
        conflicts = self._index.add(name, end, batch, self._used)
        if conflicts:
            self._index.remove(record.key for record in conflicts)
            self._note(Incident.CONFLICT, name, f"{len(conflicts)} keys have two contents; none is believed")
        return len(batch) - len(conflicts)

    def _note(self, kind: Incident, name: str, what: str) -> None:
        self._incidents.note(kind, name, what)
