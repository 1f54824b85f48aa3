"""Rows of an n-gram table read from its file by a pool of threads, a batch at a time.

A thread first tells the system every place of its part of a batch (`posix_fadvise`, which starts the reads and does not
wait), then reads the places one by one with positioned reads. So the disk sees the whole batch at once, however few
threads there are. Codes and scales lie apart, so a row is two reads of the disk; scales are a 33rd of the bytes, and
where they are resident a row is one. Nothing is mapped: a table larger than memory leaves the process small, and a
failing disk gives an error where a mapping would end the process.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.core.errors import CheckpointError, UserError
from headrace.kernels.native.row_reader import NativeRead, Stretch
from headrace.memory.read_pool import PART_ROWS, ReadPool
from headrace.memory.row_format import Bytes, RowIds, check_widths
from headrace.memory.row_source import Request

_PIECE_BYTES = 16 << 20  # of scales that become resident, read at once
_MAX_READ_ROWS = 64  # neighbouring rows in one read
_HAS_ADVICE = hasattr(os, "posix_fadvise")


@dataclass(frozen=True)
class StoredRows:
    """Where the rows of a matrix lie: `rows` of `row_bytes` each, from byte `offset` of `file` on."""

    file: Path
    offset: int
    rows: int
    row_bytes: int


class ReadSource:
    """A table in a file. Owns two open files (codes and scales may lie in different shards); shares the pool."""

    def __init__(
        self,
        layer_id: int,
        codes: StoredRows,
        scales: StoredRows,
        pool: ReadPool,
        *,
        has_resident_scales: bool = False,
    ) -> None:
        """Open the files; read all scales where they are to be resident.

        Raises:
            CheckpointError: a file cannot be opened, codes and scales do not fit each other, or resident scales cannot
                be read.
        """
        check_widths(layer_id, codes.row_bytes)
        if (scales.rows, scales.row_bytes * 32) != (codes.rows, codes.row_bytes):
            raise CheckpointError(
                f"n-gram table of layer {layer_id}: {scales.rows} rows of {scales.row_bytes} scales do not fit "
                f"{codes.rows} rows of {codes.row_bytes} codes"
            )
        self.layer_id, self.rows, self.head_dim = layer_id, codes.rows, codes.row_bytes
        self._parts = (codes, scales)
        self._pool = pool
        self._files: list[int] = []
        for part in self._parts:
            self._files.append(self._open(part.file))
        self._stretches = [
            Stretch(file, part.offset, part.row_bytes) for file, part in zip(self._files, self._parts, strict=True)
        ]
        self._resident = self._read_scales() if has_resident_scales else None

    @property
    def resident_bytes(self) -> int:
        """Bytes of the scales that are kept in memory."""
        return 0 if self._resident is None else self._resident.nbytes

    def start(self, row_ids: RowIds, codes: Bytes, scales: Bytes, *, is_urgent: bool) -> Request:
        """Queue reads. See `RowSource`."""
        if self._pool.native is not None:
            code_rows, scale_rows = self._stretches
            where = ((code_rows, codes), (scale_rows, scales))
            ids = np.ascontiguousarray(row_ids)
            return NativeRequest(self, ids, self._pool.native.start(ids, *where, self._resident, is_urgent=is_urgent))
        starts = range(0, len(row_ids), PART_ROWS)
        request = ReadRequest(self, row_ids, (codes, scales), len(starts))
        for start in starts:
            self._pool.add(request.job(start, min(start + PART_ROWS, len(row_ids))), is_urgent=is_urgent)
        return request

    def close(self) -> None:
        """Close the files; no request may be on its way."""
        while self._files:
            os.close(self._files.pop())

    def read(self, part: int, row_ids: RowIds, out: Bytes) -> None:
        """Read the rows of one of the two matrices, 0 codes and 1 scales, into `out`.

        Raises:
            OSError: the file cannot be read.
            EOFError: it ends before a row does.
        """
        if part == 1 and self._resident is not None:
            np.take(self._resident, row_ids, axis=0, out=out, mode="clip")
            return
        stored, file = self._parts[part], self._files[part]
        size = stored.row_bytes
        places = (stored.offset + row_ids * size).tolist()
        breaks = np.flatnonzero(np.diff(row_ids) != 1) + 1
        firsts = np.concatenate([[0], breaks, [len(row_ids)]]).tolist()
        if _HAS_ADVICE:
            for low, high in itertools.pairwise(firsts):
                # advice only: a file system that refuses it must not fail the read
                with contextlib.suppress(OSError):
                    os.posix_fadvise(file, places[low], (high - low) * size, os.POSIX_FADV_WILLNEED)
        view = out.reshape(-1).data
        for low, high in itertools.pairwise(firsts):
            for start in range(low, high, _MAX_READ_ROWS):
                stop = min(start + _MAX_READ_ROWS, high)
                _read_whole(file, view[start * size : stop * size], places[start])

    def _read_scales(self) -> Bytes:
        """Read all scales, [rows, row_bytes], and let the system forget its own copy."""
        stored, file = self._parts[1], self._files[1]
        resident = np.empty((stored.rows, stored.row_bytes), dtype=np.uint8)
        view = resident.reshape(-1).data
        try:
            for start in range(0, len(view), _PIECE_BYTES):
                _read_whole(file, view[start : start + _PIECE_BYTES], stored.offset + start)
        except (OSError, EOFError) as problem:
            self.close()
            why = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
            raise CheckpointError(
                f"n-gram table of layer {self.layer_id}: the scales cannot be read from {stored.file}: {why}"
            ) from None
        if _HAS_ADVICE:
            with contextlib.suppress(OSError):
                os.posix_fadvise(file, stored.offset, len(view), os.POSIX_FADV_DONTNEED)
        return resident

    def _open(self, path: Path) -> int:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as problem:
            self.close()
            raise CheckpointError(f"cannot read {path}: {problem.strerror or problem}.") from None
        if _HAS_ADVICE:
            # rows are scattered: reading ahead of them would only fill memory with rows nobody asked for
            with contextlib.suppress(OSError):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        return file

    def explain(self, row_id: int, problem: Exception) -> UserError:
        """Return the error of a row that cannot be read."""
        why = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        return CheckpointError(
            f"n-gram table of layer {self.layer_id}: row {row_id} cannot be read from {self._parts[0].file}: {why}"
        )


class NativeRequest:
    """Rows of one batch that compiled threads are reading."""

    def __init__(self, source: ReadSource, row_ids: RowIds, read: NativeRead) -> None:
        self._source, self._row_ids, self._read = source, row_ids, read

    @property
    def is_done(self) -> bool:
        """Whether all rows are read."""
        return self._read.is_done

    def wait(self) -> Mapping[int, UserError]:
        """Wait for the last row. See `Request`."""
        failed = self._read.wait()
        return {place: self._source.explain(int(self._row_ids[place]), problem) for place, problem in failed.items()}


class ReadRequest:
    """Rows of one batch that are being read. The threads write into its buffers and errors; `wait` takes them over."""

    def __init__(self, source: ReadSource, row_ids: RowIds, buffers: tuple[Bytes, Bytes], num_parts: int) -> None:
        self._source, self._row_ids, self._buffers = source, row_ids, buffers
        self._left = num_parts
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._errors: dict[int, UserError] = {}
        if num_parts == 0:
            self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether all rows are read."""
        return self._done.is_set()

    def wait(self) -> Mapping[int, UserError]:
        """Wait for the last row. See `Request`."""
        self._done.wait()
        return self._errors

    def job(self, start: int, stop: int) -> "_Part":
        """Return the work of reading places `start` .. `stop` - 1."""
        return _Part(self, start, stop)

    def read_part(self, start: int, stop: int) -> None:
        """Read some rows; where that fails, one at a time, so that each error belongs to its row."""
        try:
            try:
                self._read(start, stop)
            except (OSError, EOFError):
                self._read_one_by_one(start, stop)
        except Exception as problem:  # noqa: BLE001 (whoever waits must be told, whatever it was)
            self._errors.update(
                {place: self._source.explain(int(self._row_ids[place]), problem) for place in range(start, stop)}
            )
        finally:
            with self._lock:
                self._left -= 1
                if self._left == 0:
                    self._done.set()

    def _read(self, start: int, stop: int) -> None:
        for part, buffer in enumerate(self._buffers):
            self._source.read(part, self._row_ids[start:stop], buffer[start:stop])

    def _read_one_by_one(self, start: int, stop: int) -> None:
        for place in range(start, stop):
            try:
                self._read(place, place + 1)
            except (OSError, EOFError) as problem:
                self._errors[place] = self._source.explain(int(self._row_ids[place]), problem)


@dataclass(frozen=True)
class _Part:
    request: ReadRequest
    start: int
    stop: int

    def __call__(self) -> None:
        self.request.read_part(self.start, self.stop)


def _read_whole(file: int, view: memoryview, place: int) -> None:
    done = os.preadv(file, [view], place)
    while done < len(view):
        got = os.preadv(file, [view[done:]], place + done)
        if got == 0:
            raise EOFError("the file has become shorter")
        done += got
