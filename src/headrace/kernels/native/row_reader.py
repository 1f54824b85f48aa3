"""Threads outside the interpreter that read rows of n-gram tables, where the package was built with a compiler."""

import ctypes
import os
from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import InternalError
from headrace.kernels.native.library import plain_function

CLOSED = "rows of an n-gram table were asked for after their reader was closed"
_ENDED = -1  # the error of a row that the file ends before
_FUNCTIONS = {"open": 1, "start": 3, "wait": 2, "close": 1}


@dataclass(frozen=True)
class Stretch:
    """Rows of `row_bytes` each from byte `offset` of the open file number `file` on."""

    file: int
    offset: int
    row_bytes: int


class NativeRead:
    """Rows on their way. Threads write into the buffers and errors that it holds until it is done."""

    def __init__(self, reader: "RowReader", fields: list[int], kept: tuple[NDArray[Any], ...], count: int) -> None:
        self._reader, self._kept = reader, kept
        self._errors = np.zeros(count, dtype=np.int64)
        # errors, part_rows, left: see row_reader.cpp
        self._fields = np.array([*fields, self._errors.ctypes.data, reader.part_rows, 0], dtype=np.int64)

    @property
    def address(self) -> int:
        """Where the request lies."""
        return int(self._fields.ctypes.data)

    @property
    def is_done(self) -> bool:
        """Whether every row is read or has failed."""
        return bool(self._fields[-1] == 0)

    def wait(self) -> dict[int, OSError | EOFError]:
        """Wait for the last row and return the error of each that could not be read, by place."""
        self._reader.wait(self)
        return {int(place): _error(int(self._errors[place])) for place in np.flatnonzero(self._errors)}


class RowReader:
    """Owns the threads, and keeps what they write into alive. One thread uses it."""

    def __init__(self, functions: dict[str, Any], address: int, part_rows: int) -> None:
        self._functions, self._address = functions, address
        self.part_rows = part_rows
        self._under_way: deque[NativeRead] = deque()

    def start(
        self,
        row_ids: NDArray[np.int64],
        codes: tuple[Stretch, NDArray[np.uint8]],
        scales: tuple[Stretch, NDArray[np.uint8]],
        resident: NDArray[np.uint8] | None,
        *,
        is_urgent: bool,
    ) -> NativeRead:
        """Queue reads and return at once.

        Args:
            row_ids: [n] int64, contiguous.
            codes: where the codes lie, and [n, row_bytes] uint8 to write them into, contiguous.
            scales: likewise; of the place only the size counts where they are resident.
            resident: [rows, row_bytes] uint8, all scales of the table; None reads them.
            is_urgent: goes before what is not.

        Raises:
            InternalError: the reader was closed.
        """
        self._check_open()
        while self._under_way and self._under_way[0].is_done:
            self._under_way.popleft()
        fields = [row_ids.ctypes.data, len(row_ids)]
        for stretch, out in (codes, scales):
            fields += [stretch.file, stretch.offset, stretch.row_bytes, out.ctypes.data]
        fields.append(0 if resident is None else resident.ctypes.data)
        kept = (row_ids, codes[1], scales[1], *(() if resident is None else (resident,)))
        request = NativeRead(self, fields, kept, len(row_ids))
        self._under_way.append(request)
        self._functions["start"](self._address, request.address, is_urgent)
        return request

    def wait(self, request: NativeRead) -> None:
        """Wait for a request.

        Raises:
            InternalError: the reader was closed before it was done.
        """
        if not request.is_done:
            self._check_open()
            self._functions["wait"](self._address, request.address)

    def close(self) -> None:
        """End the threads after what they are at; what is queued is forgotten and must not be waited for."""
        if self._address:
            self._functions["close"](self._address)
        self._address = 0
        self._under_way.clear()

    def _check_open(self) -> None:
        if not self._address:
            raise InternalError(CLOSED)

    def __del__(self) -> None:
        """Close: threads must not write into what is gone."""
        self.close()


def open_reader(num_threads: int, part_rows: int) -> RowReader | None:
    """Start threads; None where the library or the system has none to give.

    Args:
        num_threads: at least 1.
        part_rows: rows that a thread reads at once.
    """
    functions = _functions()
    if functions is None:
        return None
    address = functions["open"](num_threads)
    return RowReader(functions, address, part_rows) if address else None


def _error(number: int) -> OSError | EOFError:
    return EOFError("the file has become shorter") if number == _ENDED else OSError(number, os.strerror(number))


@cache
def _functions() -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for name, num_arguments in _FUNCTIONS.items():
        function = plain_function(f"hr_row_reader_{name}")
        if function is None:
            return None
        function.argtypes, function.restype = [ctypes.c_int64] * num_arguments, ctypes.c_int64
        found[name] = function
    return found
