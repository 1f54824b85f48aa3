"""A directory of segments: opened whatever state it is in, read with checks, appended to, kept within its bytes."""

import errno
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.cache.tiers import lock
from headrace.cache.tiers.files import Files
from headrace.cache.tiers.incidents import Incident, Incidents
from headrace.cache.tiers.index import INDEX_NAME, Place, SegmentIndex, SegmentRow
from headrace.cache.tiers.reclaim import Limits, Reclaim
from headrace.cache.tiers.recover import Recovery
from headrace.cache.tiers.segment import Damaged, Record, namespace_digest
from headrace.cache.tiers.segment_reader import SegmentReader
from headrace.cache.tiers.segment_writer import SegmentWriter

_LOCK_NAME = "directory.lock"
_CLOCK_SLACK_US = 1_000_000
_LOCK_WAIT_S = 10.0
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How a directory is used.

    Attributes:
        max_bytes: of all its files, the index included.
        min_free: bytes of the file system to leave free.
        segment_bytes: a segment is sealed once it has as many; at most an eighth of `max_bytes`.
    """

    max_bytes: int
    min_free: int = 1 << 30
    segment_bytes: int = 64 << 20

    @property
    def segment_limit(self) -> int:
        """Bytes after which a segment is sealed."""
        return max(1, min(self.segment_bytes, self.max_bytes // 8))


class SegmentStore:
    """Records by key, on disk. Owns the index, the segments it writes, and whether it may write.

    Several processes may have one directory open: each appends to segments of its own, all share the index, and who
    holds the directory's lock recovers and reclaims. One thread writes; `find` and `load` may come from another.
    """

    def __init__(
        self,
        folder: Path,
        namespace: Mapping[str, str],
        options: StoreOptions,
        *,
        incidents: Incidents,
        files: Files | None = None,
    ) -> None:
        """Open a directory, and recover what a killed writer left.

        Raises:
            OSError: it can be neither created nor read.
        """
        self.folder, self.options, self.incidents = folder, options, incidents
        self.files = Files() if files is None else files
        self.is_read_only = False
        self._namespaces = {
            lineage: namespace_digest({**namespace, "lineage": "approximate" if lineage else "exact"})
            for lineage in (False, True)
        }
        self._writers: dict[bytes, SegmentWriter] = {}
        self._is_blind = False  # the index is no database any more: it is not asked again
        self._lost: set[str] = set()  # files that are gone: what the index says of them is not tried again
        self._newest = 0
        try:
            self.files.make_folder(folder)
        except OSError:
            self.files.names(folder, "")  # a folder that is there can be read
        self.index = self._open_index()
        self._reader = SegmentReader(self.files, folder)
        limits = Limits(max_bytes=options.max_bytes - options.segment_limit // 2, min_free=options.min_free)
        self._reclaim = Reclaim(self.files, folder, self.index, limits, self._reader.forget)

    @property
    def evicted(self) -> int:
        """Records that were forgotten to make room."""
        return self._reclaim.evicted

    # ------------------------------------------------------------------------------------------------------- opening

    def _open_index(self) -> SegmentIndex:
        try:
            with lock.held(self.files, self.folder / _LOCK_NAME, _LOCK_WAIT_S) as is_mine:
                index, is_rebuilt = self._database()
                if is_mine:
                    self._recover(index, is_rebuilt=is_rebuilt)
                return index
        except (OSError, sqlite3.Error) as problem:
            self.refuse_writes(Incident.READ_ONLY, f"it can only be read: {problem}")
        index = SegmentIndex(None)
        self._recover(index, is_rebuilt=True)
        return index

    def _database(self) -> tuple[SegmentIndex, bool]:
        """Open the index; one that is no database is thrown away."""
        path = self.folder / INDEX_NAME
        is_new = not path.exists()
        self.files.close(self.files.open_or_create(path))  # for its owner alone, as is what belongs to it
        try:
            return SegmentIndex(path), is_new
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as problem:
            self.incidents.note(Incident.BAD_INDEX, INDEX_NAME, f"{problem}; it is built again")
        for suffix in ("", "-wal", "-shm"):
            self.files.remove(path.with_name(INDEX_NAME + suffix))
        return SegmentIndex(path), True

    def _recover(self, index: SegmentIndex, *, is_rebuilt: bool) -> None:
        times = index.times()
        now = time.time_ns() // 1000
        if times is not None:
            self._newest = times[1]
            if now < times[1] - _CLOCK_SLACK_US:
                seconds = (times[1] - now) // 1_000_000
                self.incidents.note(Incident.CLOCK, "clock", f"it was set back by {seconds} s; uses are ordered anyway")
        Recovery(self.files, self.folder, index, self.incidents, is_rebuilt=is_rebuilt, used=self.now()).run()

    def now(self) -> int:
        """Return the time in microseconds, later at every call even if the clock is not."""
        self._newest = max(time.time_ns() // 1000, self._newest + 1)
        return self._newest

    # ------------------------------------------------------------------------------------------------------- reading

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Place]:
        """Return the places of the keys that are there; nothing where the index cannot be read."""
        if self._is_blind:
            return {}
        try:
            found = self.index.find(keys)
            return {key: place for key, place in found.items() if place.segment not in self._lost}
        except sqlite3.Error as problem:
            self._is_blind = _is_broken(problem)
            self._note_index(problem)
            return {}

    def load(self, key: bytes, place: Place, *, is_approximate: bool) -> tuple[Record, bytes] | None:
        """Return a record and its payload, None if it is not what it must be; it is forgotten then."""
        if place.segment in self._lost:
            return None
        try:
            try:
                record, payload = self._read(place, is_approximate=is_approximate)
            except FileNotFoundError:  # another process moved it since it was found
                moved = self.find([key]).get(key)
                if moved is None or moved == place:
                    raise
                record, payload = self._read(moved, is_approximate=is_approximate)
            if record.key != key or record.digest != place.digest:
                raise Damaged("a record is not the one that the index names")
        except Damaged as damage:
            kind = Incident.BAD_PAYLOAD if "payload" in damage.what else Incident.BAD_HEADER
            kind = Incident.WRONG_NAMESPACE if "namespace" in damage.what else kind
            self._forget(key, kind, place, damage.what)
        except FileNotFoundError:
            self._lose(place.segment)
        except OSError as problem:
            self._forget(key, Incident.READ_ERROR, place, problem.strerror or str(problem))
        else:
            return record, payload
        return None

    def _read(self, place: Place, *, is_approximate: bool) -> tuple[Record, bytes]:
        return self._reader.read(place.segment, place.offset, place.length, self._namespaces[is_approximate])

    def _lose(self, segment: str) -> None:
        """Forget a segment whose file is gone; if it is being written here, whoever writes begins another."""
        self.incidents.note(Incident.MISSING_PAYLOAD, segment, "the file is gone")
        self._reader.forget(segment)
        self._lost.add(segment)
        if self.is_open(segment):
            return
        try:
            self.index.drop(segment)
        except sqlite3.Error as problem:
            self._note_index(problem)

    def _note_index(self, problem: sqlite3.Error) -> None:
        """Count what the index did not do; without space nothing more is written."""
        if _is_full(problem):
            self.refuse_writes(Incident.NO_SPACE, f"nothing more is written to it: {problem}")
        else:
            self.incidents.note(Incident.BUSY if _is_busy(problem) else Incident.BAD_INDEX, INDEX_NAME, str(problem))

    def _forget(self, key: bytes, kind: Incident, place: Place, what: str) -> None:
        self.incidents.note(kind, place.segment, what)
        self._reader.forget(place.segment)
        self._quietly_remove(key)

    def sums(self) -> tuple[list[SegmentRow], tuple[int, int] | None, int]:
        """Return the segments, the times of the oldest and newest use, and how many records; nothing if unreadable."""
        try:
            return self.index.segments(), self.index.times(), self.index.count()
        except sqlite3.Error:
            return [], None, 0

    # ------------------------------------------------------------------------------------------------------- writing

    def write(self, items: Sequence[tuple[Record, bytes]]) -> int:
        """Append records that are not there yet; return how many were. Those that are count as used.

        What cannot be written is lost as a cache entry, and after an error nothing more is written.
        """
        if self.is_read_only:
            return 0
        known = self.find([record.key for record, _ in items])
        fresh: dict[bytes, tuple[Record, bytes]] = {}
        for record, payload in items:
            other = known[record.key].digest if record.key in known else None
            other = fresh[record.key][0].digest if record.key in fresh else other
            if other is None:
                fresh[record.key] = record, payload
            elif other != record.digest and not record.is_approximate:
                self.incidents.note(Incident.CONFLICT, record.key.hex(), "a key has two contents; none is believed")
                fresh.pop(record.key, None)
                known.pop(record.key, None)
                self._quietly_remove(record.key)
        self.touch(list(known))
        try:
            return self._append_fresh(list(fresh.values()))
        except (OSError, sqlite3.Error) as problem:
            if _is_busy(problem):
                self.incidents.note(Incident.BUSY, INDEX_NAME, "another process kept it locked")
                return 0
            kind = Incident.NO_SPACE if _is_full(problem) else Incident.WRITE_ERROR
            self.refuse_writes(kind, f"nothing more is written to it: {problem}")
            return 0

    def _append_fresh(self, fresh: list[tuple[Record, bytes]]) -> int:
        needed = sum(record.nbytes for record, _ in fresh)
        if not fresh:
            return 0
        if self._reclaim.excess(needed) > 0:
            with lock.held(self.files, self.folder / _LOCK_NAME, 0) as is_mine:
                if not is_mine or not self._reclaim.make_room(needed, self):
                    self.incidents.note(Incident.NO_SPACE, "room", f"{needed} bytes have no room within its limits")
                    return 0
        for lineage in (False, True):
            mine = [one for one in fresh if one[0].is_approximate == lineage]
            if mine:
                self.append(self._namespaces[lineage], mine, is_moved=False)
        return len(fresh)

    def append(self, namespace: bytes, records: list[tuple[Record, bytes]], *, is_moved: bool) -> None:
        """Write records to the open segment of a namespace and index them.

        Raises:
            OSError: a file could not be written; records that were written whole are indexed.
            sqlite3.Error: the index could not be written.
        """
        rest = list(records)
        while rest:
            writer = self._writer(namespace)
            part = [rest.pop(0)]
            size = writer.size + part[0][0].nbytes
            while rest and size < self.options.segment_limit:
                size += rest[0][0].nbytes
                part.append(rest.pop(0))
            self._append(writer, part, is_moved=is_moved)
            if writer.size >= self.options.segment_limit:
                self._seal(namespace)

    def _writer(self, namespace: bytes) -> SegmentWriter:
        if namespace in self._writers and self._writers[namespace].name in self._lost:
            gone = self._writers.pop(namespace)
            gone.abandon()
            self.index.drop(gone.name)
        if namespace not in self._writers:
            writer = SegmentWriter(self.files, self.folder, namespace, self.now())
            self._writers[namespace] = writer
            self.index.begin(writer.name, namespace, writer.size)
        return self._writers[namespace]

    def _append(self, writer: SegmentWriter, records: list[tuple[Record, bytes]], *, is_moved: bool) -> None:
        written: list[tuple[int, Record]] = []
        try:
            for record, payload in records:
                written.append((writer.append(record, payload), record))
        finally:
            if is_moved:
                self.index.move(writer.name, writer.size, written)
            else:
                conflicts = self.index.add(writer.name, writer.size, written, self.now())
                for record in conflicts:
                    self.incidents.note(Incident.CONFLICT, record.key.hex(), "a key has two contents")
                    self._quietly_remove(record.key)

    def is_open(self, name: str) -> bool:
        """Say whether a segment is being written by this process; any thread may ask."""
        return any(writer.name == name for writer in list(self._writers.values()))

    def seal_all(self) -> None:
        """End every segment that is being written."""
        for namespace in list(self._writers):
            self._seal(namespace)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that keys, those nearer to the root first, were used."""
        if not keys or self.is_read_only:
            return
        try:
            self.index.touch(keys, self.now())
        except sqlite3.Error as problem:
            self._note_index(problem)

    def close(self) -> None:
        """Seal what is open and let go of everything."""
        try:
            self.seal_all()
        except (OSError, sqlite3.Error) as problem:
            self.incidents.note(Incident.WRITE_ERROR, str(self.folder), str(problem))
        self._reader.close()
        self.index.close()

    def _seal(self, namespace: bytes) -> None:
        writer = self._writers.pop(namespace)
        writer.seal()
        self.index.seal(writer.name, writer.size)

    def clear(self) -> bool:
        """Forget every record of this namespace, in both lineages; return whether that was possible."""
        try:
            with lock.held(self.files, self.folder / _LOCK_NAME, _LOCK_WAIT_S) as is_mine:
                if is_mine:
                    self._reclaim.clear(set(self._namespaces.values()), self)
        except (OSError, sqlite3.Error) as problem:
            self.incidents.note(Incident.WRITE_ERROR, str(self.folder), f"it could not be cleared: {problem}")
            return False
        return is_mine

    def _quietly_remove(self, key: bytes) -> None:
        try:
            self.index.remove([key])
        except sqlite3.Error as problem:
            self._note_index(problem)

    def refuse_writes(self, kind: Incident, what: str) -> None:
        """Write nothing more, and say why."""
        if not self.is_read_only:
            self.is_read_only = True
            self.incidents.note(kind, str(self.folder), what)


def _code(problem: Exception) -> int:
    """Return SQLite's primary code: extended ones, such as of a log that another process recovers, lie above it."""
    return int(getattr(problem, "sqlite_errorcode", 0)) & 0xFF


def _is_broken(problem: sqlite3.Error) -> bool:
    return _code(problem) in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def _is_busy(problem: Exception) -> bool:
    return _code(problem) == sqlite3.SQLITE_BUSY


def _is_full(problem: Exception) -> bool:
    if isinstance(problem, OSError):
        return problem.errno in _FULL
    return _code(problem) == sqlite3.SQLITE_FULL
