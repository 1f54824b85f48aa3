"""The index of a directory of segments: an SQLite database in WAL mode, which can be thrown away and built again.

Why SQLite: it comes with Python, survives a killed process at any byte, and lets several processes read while one
writes.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from headrace.cache.tiers.segment import RECORD_HEADER_BYTES, Kind, Record

INDEX_NAME = "index.sqlite"
_VERSION = 1
_BUSY_MS = 2000
_AT_ONCE = 500  # keys of one statement
_PAGE_BYTES = 1024  # small, so that a small directory has a small index
_WAL_PAGES = 256
LOG_BYTES = (_WAL_PAGES + 64) * _PAGE_BYTES
"""Bytes that the database's log and its shared memory may take beside it."""
_SCHEMA = """
CREATE TABLE segments (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, namespace BLOB NOT NULL,
    size INTEGER NOT NULL, live INTEGER NOT NULL, is_sealed INTEGER NOT NULL
);
CREATE TABLE records (
    key BLOB PRIMARY KEY, segment INTEGER NOT NULL, place INTEGER NOT NULL, length INTEGER NOT NULL,
    parent BLOB NOT NULL, kind INTEGER NOT NULL, digest BLOB NOT NULL, used INTEGER NOT NULL, below INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX by_parent ON records (parent);
CREATE INDEX leaves_by_use ON records (used) WHERE below = 0;
"""


@dataclass(frozen=True)
class Place:
    """Where a record lies, and what it must be."""

    segment: str
    offset: int
    length: int
    kind: Kind
    digest: bytes


@dataclass(frozen=True)
class SegmentRow:
    """A segment as the index knows it: bytes that are indexed, and bytes of records that are of use."""

    name: str
    namespace: bytes
    size: int
    live: int
    is_sealed: bool


class SegmentIndex:
    """Maps keys to places. Owns one connection; any thread may call it, one at a time.

    Every method may raise `sqlite3.Error`.
    """

    def __init__(self, path: Path | None) -> None:
        """Open or create the database; None keeps it in memory.

        Raises:
            sqlite3.Error: the file is no database, is of another version, or cannot be written.
        """
        self._lock = RLock()
        where = ":memory:" if path is None else str(path)
        self._db = sqlite3.connect(where, timeout=_BUSY_MS / 1000, isolation_level=None, check_same_thread=False)
        try:
            if path is not None:
                self._db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
                self._db.execute(f"PRAGMA journal_size_limit = {_WAL_PAGES * _PAGE_BYTES}")
            self._db.execute("PRAGMA synchronous = NORMAL")
            with self._change():
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    for statement in filter(str.strip, _SCHEMA.split(";")):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {_VERSION}")
                elif version != _VERSION:
                    raise sqlite3.DatabaseError(f"the index is of version {version}; accepted is {_VERSION}")
            self._db.execute("SELECT count(*) FROM segments").fetchone()
        except BaseException:
            self._db.close()
            raise

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Do everything in the block, or nothing."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def shrink(self) -> None:
        """Let the database's log be no larger than need be."""
        with self._lock:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Let go of the database."""
        with self._lock:
            self._db.close()

    # ------------------------------------------------------------------------------------------------------- records

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Place]:
        """Return the places of the keys that are known."""
        found = {}
        with self._lock:
            for first in range(0, len(keys), _AT_ONCE):
                part = keys[first : first + _AT_ONCE]
                marks = ",".join("?" * len(part))
                rows = self._db.execute(
                    "SELECT key, name, place, length, kind, digest FROM records JOIN segments ON segment = id "
                    f"WHERE key IN ({marks})",
                    part,
                )
                for key, name, place, length, kind, digest in rows:
                    found[key] = Place(name, place, length, Kind(kind), digest)
        return found

    def add(self, name: str, size: int, records: Iterable[tuple[int, Record]], used: int) -> list[Record]:
        """Note records of a segment and how far it is indexed.

        Returns:
            Records that were not taken because their key is known with another digest. One that is known with the same
            digest stays where it is, as does one of the approximate lineage, whose content is not given by its key.
        """
        conflicts = []
        with self._change():
            segment = self._segment(name)
            live = 0
            for place, record in records:
                known = self._db.execute("SELECT digest FROM records WHERE key = ?", (record.key,)).fetchone()
                if known is not None:
                    if known[0] != record.digest and not record.is_approximate:
                        conflicts.append(record)
                    continue
                row = (record.key, segment, place, record.length, record.parent, record.kind, record.digest, used)
                self._db.execute(
                    "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, "
                    "(SELECT count(*) FROM records WHERE parent = ?))",
                    (*row, record.key),
                )
                self._db.execute("UPDATE records SET below = below + 1 WHERE key = ?", (record.parent,))
                live += record.nbytes
            self._db.execute("UPDATE segments SET size = ?, live = live + ? WHERE id = ?", (size, live, segment))
        return conflicts

    def move(self, name: str, size: int, moved: Iterable[tuple[int, Record]]) -> None:
        """Let records that are known lie in another segment from now on."""
        with self._change():
            segment = self._segment(name)
            live = 0
            for place, record in moved:
                was = self._db.execute("SELECT segment FROM records WHERE key = ?", (record.key,)).fetchone()
                if was is None:
                    continue
                self._db.execute("UPDATE segments SET live = live - ? WHERE id = ?", (record.nbytes, was[0]))
                self._db.execute(
                    "UPDATE records SET segment = ?, place = ? WHERE key = ?", (segment, place, record.key)
                )
                live += record.nbytes
            self._db.execute("UPDATE segments SET size = ?, live = live + ? WHERE id = ?", (size, live, segment))

    def remove(self, keys: Iterable[bytes]) -> int:
        """Forget keys; return the bytes of their records."""
        with self._change():
            return sum(self._remove(key) for key in keys)

    def _remove(self, key: bytes) -> int:
        row = self._db.execute("SELECT segment, length, parent FROM records WHERE key = ?", (key,)).fetchone()
        if row is None:
            return 0
        nbytes = int(row[1]) + RECORD_HEADER_BYTES
        self._db.execute("DELETE FROM records WHERE key = ?", (key,))
        self._db.execute("UPDATE records SET below = below - 1 WHERE key = ?", (row[2],))
        self._db.execute("UPDATE segments SET live = live - ? WHERE id = ?", (nbytes, row[0]))
        return nbytes

    def touch(self, keys: Sequence[bytes], used: int) -> None:
        """Note that keys, those nearer to the root first, were used."""
        with self._change():
            rows = [(used - place, key) for place, key in enumerate(keys)]
            self._db.executemany("UPDATE records SET used = max(used, ?) WHERE key = ?", rows)

    def evict(self, nbytes: int) -> int:
        """Forget records that nothing follows, the least recently used first, until so many bytes are; return how many.

        What a forgotten one followed is the next one's rival, so an old chain goes before a younger one's end.
        """
        count = freed = 0
        with self._change():
            while freed < nbytes:
                row = self._db.execute("SELECT key FROM records WHERE below = 0 ORDER BY used LIMIT 1").fetchone()
                if row is None:
                    break
                freed += self._remove(row[0])
                count += 1
        return count

    def times(self) -> tuple[int, int] | None:
        """Return the oldest and the newest last use of what nothing follows, None if there is no record."""
        with self._lock:
            ends = [
                self._db.execute(f"SELECT {end}(used) FROM records WHERE below = 0").fetchone()[0]
                for end in ("min", "max")
            ]
        return None if ends[0] is None else (ends[0], ends[1])

    def count(self) -> int:
        """Return how many records there are."""
        with self._lock:
            return int(self._db.execute("SELECT count(*) FROM records").fetchone()[0])

    # ------------------------------------------------------------------------------------------------------ segments

    def begin(self, name: str, namespace: bytes, size: int) -> None:
        """Note a segment."""
        with self._change():
            self._db.execute(
                "INSERT OR IGNORE INTO segments (name, namespace, size, live, is_sealed) VALUES (?, ?, ?, 0, 0)",
                (name, namespace, size),
            )

    def seal(self, name: str, size: int) -> None:
        """Note that nothing more is written to a segment."""
        with self._change():
            self._db.execute("UPDATE segments SET is_sealed = 1, size = ? WHERE name = ?", (size, name))

    def drop(self, name: str) -> int:
        """Forget a segment and its records; return how many these were."""
        with self._change():
            row = self._db.execute("SELECT id, live FROM segments WHERE name = ?", (name,)).fetchone()
            if row is None:
                return 0
            find = "SELECT key FROM records WHERE segment = ?"
            keys = self._db.execute(find, row[:1]).fetchall() if row[1] else []
            for (key,) in keys:
                self._remove(key)
            self._db.execute("DELETE FROM segments WHERE id = ?", row[:1])
        return len(keys)

    def cut(self, name: str, size: int) -> int:
        """Forget the records of a segment that do not lie within its first `size` bytes; return how many."""
        with self._lock:
            rows = self._db.execute(
                "SELECT key FROM records JOIN segments ON segment = id WHERE name = ? AND place + length + ? > ?",
                (name, RECORD_HEADER_BYTES, size),
            ).fetchall()
        self.remove(key for (key,) in rows)
        return len(rows)

    def segments(self) -> list[SegmentRow]:
        """Return all segments, the oldest name first."""
        with self._lock:
            rows = self._db.execute("SELECT name, namespace, size, live, is_sealed FROM segments ORDER BY name")
            return [SegmentRow(name, space, size, live, bool(sealed)) for name, space, size, live, sealed in rows]

    def _segment(self, name: str) -> int:
        row = self._db.execute("SELECT id FROM segments WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise sqlite3.DatabaseError(f"segment {name} is not in the index")
        return int(row[0])
