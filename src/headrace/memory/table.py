"""Reads rows of an n-gram table: E4M3 codes with one E8M0 scale per 32 columns, handed out as exact bfloat16.

A released table is 101 GB with its scales, so it is normally a read-only file mapping of which only the asked rows are
touched, and rows are checked when read, not when opened. Row numbers come from `memory/addressing.py`, mappings from
`checkpoint/reader.py`.
"""

import contextlib
import mmap
from typing import Protocol

import numpy as np
import torch

from headrace.core.errors import CheckpointError, InternalError
from headrace.core.formats import BLOCK
from headrace.memory.row_format import (
    Bytes,
    RowIds,
    check_widths,
    checked_row_ids,
    damage_error,
    damaged_rows,
    dequantise,
)

_SLICE_ROWS = 8192  # rows dequantised at once: bounds the working memory of a long prompt's lookup


class Table(Protocol):
    """One layer's n-gram table.

    Attributes:
        rows: number of rows.
        head_dim: values per row.
    """

    rows: int
    head_dim: int

    def lookup(self, row_ids: RowIds) -> torch.Tensor:
        """Return the rows as [..., head_dim] bfloat16 for `row_ids` of shape [...], usually [T, C]."""
        ...

    def prefetch(self, row_ids: RowIds) -> None:
        """Start bringing these rows into memory where that is possible; never waits, never fails for slow storage."""
        ...


class MemoryTable:
    """A table whose bytes are ordinary memory."""

    def __init__(self, layer_id: int, codes: Bytes, scales: Bytes) -> None:
        """Take over the arrays without copying.

        Args:
            layer_id: the layer that owns the table; used in messages.
            codes: [rows, head_dim] uint8, E4M3 bit patterns.
            scales: [rows, head_dim / 32] uint8, E8M0 bit patterns.

        Raises:
            CheckpointError: the shapes do not fit each other.
        """
        _check_arrays(layer_id, codes, scales)
        self.layer_id = layer_id
        self.rows, self.head_dim = codes.shape
        self._codes = np.asarray(codes)
        self._scales = np.asarray(scales)

    def lookup(self, row_ids: RowIds) -> torch.Tensor:
        """Return rows as bfloat16.

        Args:
            row_ids: [T, C] (or any shape) integers.

        Returns:
            [T, C, head_dim] bfloat16 on the CPU.

        Raises:
            UserError: a row number is outside the table, or a row read holds a NaN code or scale.

        Numerics: code times power-of-two scale, one rounding, exact unless it falls below bfloat16's subnormals.
        State: none.
        """
        ids = self._checked(row_ids)
        self.bring_in(ids)
        out = torch.empty((len(ids), self.head_dim), dtype=torch.bfloat16)
        for start in range(0, len(ids), _SLICE_ROWS):
            part = ids[start : start + _SLICE_ROWS]
            codes, scales = self._codes[part], self._scales[part]
            self._check_numbers(part, codes, scales)
            dequantise(codes, scales, out[start : start + len(part)])
        return out.view(*np.shape(row_ids), self.head_dim)

    def prefetch(self, row_ids: RowIds) -> None:
        """Check the row numbers; the bytes are in memory already.

        Raises:
            UserError: a row number is outside the table.
        """
        self.bring_in(self._checked(row_ids))

    def bring_in(self, row_ids: RowIds) -> None:
        """Announce rows whose numbers are known to be inside the table, [n] int64."""

    def copy_rows(self, row_ids: RowIds, codes: Bytes, scales: Bytes) -> None:
        """Copy the stored bytes of rows, unchecked.

        Args:
            row_ids: [n] int64, each inside the table.
            codes: [n, head_dim] uint8, contiguous; written.
            scales: [n, head_dim / 32] uint8, contiguous; written.
        """
        np.take(self._codes, row_ids, axis=0, out=codes, mode="clip")
        np.take(self._scales, row_ids, axis=0, out=scales, mode="clip")

    def _checked(self, row_ids: RowIds) -> RowIds:
        return checked_row_ids(row_ids, self.layer_id, self.rows)

    def _check_numbers(self, ids: RowIds, codes: Bytes, scales: Bytes) -> None:
        bad = damaged_rows(codes, scales)
        if len(bad):
            raise damage_error(self.layer_id, int(ids[bad[0]]), scales[bad[0]])


class MappedTable(MemoryTable):
    """A table that stays in its file: a lookup announces all its pages at once, then reads them.

    Without the announcement every missing page would be waited for one after the other.
    """

    def __init__(self, layer_id: int, codes: Bytes, scales: Bytes) -> None:
        """Wrap two read-only file mappings; nothing is read.

        Args:
            layer_id: the layer that owns the table; used in messages.
            codes: [rows, head_dim] uint8 memory map, E4M3 bit patterns.
            scales: [rows, head_dim / 32] uint8 memory map, E8M0 bit patterns.

        Raises:
            CheckpointError: the shapes do not fit each other.
            InternalError: an array is not backed by a file mapping.
        """
        super().__init__(layer_id, codes, scales)
        self._pages = (_MappedRows(codes), _MappedRows(scales))

    def bring_in(self, row_ids: RowIds) -> None:
        """Announce the pages of rows, [n] int64, all at once."""
        for pages in self._pages:
            pages.announce(row_ids)


class _MappedRows:
    """Where the rows of one mapped array lie inside its mapping, for advice to the kernel."""

    def __init__(self, array: Bytes) -> None:
        owner: object = array
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if not isinstance(owner, mmap.mmap):
            raise InternalError("a mapped n-gram table needs an array that is backed by a file mapping")
        self._mapping = owner
        self._row_bytes = array.strides[0]
        self._start = array.ctypes.data - np.frombuffer(owner, dtype=np.uint8).ctypes.data
        self._advises = hasattr(owner, "madvise") and hasattr(mmap, "MADV_WILLNEED")
        if self._advises and hasattr(mmap, "MADV_RANDOM"):
            # rows are scattered: reading ahead of a touched page would only fill memory with rows nobody asked for
            with contextlib.suppress(OSError):
                owner.madvise(mmap.MADV_RANDOM)

    def announce(self, ids: RowIds) -> None:
        if not self._advises or not len(ids):
            return
        page = mmap.PAGESIZE
        first = self._start + ids * self._row_bytes
        pages = np.unique(np.concatenate([first // page, (first + self._row_bytes - 1) // page]))
        breaks = np.flatnonzero(np.diff(pages) > 1)
        starts = pages[np.concatenate([[0], breaks + 1])]
        ends = pages[np.concatenate([breaks, [len(pages) - 1]])] + 1
        # advice only: a kernel that refuses it (some file systems do) must not fail the lookup
        with contextlib.suppress(OSError):
            for begin, end in zip((starts * page).tolist(), (ends * page).tolist(), strict=True):
                self._mapping.madvise(mmap.MADV_WILLNEED, begin, end - begin)


def _check_arrays(layer_id: int, codes: Bytes, scales: Bytes) -> None:
    table = f"n-gram table of layer {layer_id}"
    for name, array in (("codes", codes), ("scales", scales)):
        if array.ndim != 2 or array.dtype != np.uint8:
            raise CheckpointError(
                f"{table}: {name} have shape {list(array.shape)} and type {array.dtype}, not rows of bytes"
            )
    check_widths(layer_id, codes.shape[1])
    wanted = (codes.shape[0], codes.shape[1] // BLOCK)
    if scales.shape != wanted:
        raise CheckpointError(
            f"{table}: scales have shape {list(scales.shape)}; codes of this size need {list(wanted)}"
        )
