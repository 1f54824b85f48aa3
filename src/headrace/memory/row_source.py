"""Where rows of an n-gram table come from: one interface, whatever the bytes lie in.

A source is asked for rows in two steps. `start` begins to bring them in and returns at once; the request it returns is
waited for where the bytes are needed. `TableSource` is for tables in memory and for mapped ones, `read_source.py` for
tables that are read from their files. Every source gives the same bytes.
"""

from collections.abc import Mapping
from typing import Protocol

from headrace.core.errors import UserError
from headrace.memory.row_format import Bytes, RowIds
from headrace.memory.table import MemoryTable


class Request(Protocol):
    """Rows that are on their way."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> Mapping[int, UserError]:
        """Fill the buffers and return the error of each row that could not be read, by its place in the request."""
        ...


class RowSource(Protocol):
    """One layer's rows.

    Attributes:
        layer_id: the layer that owns the table.
        rows: number of rows.
        head_dim: values per row.
    """

    layer_id: int
    rows: int
    head_dim: int

    def start(self, row_ids: RowIds, codes: Bytes, scales: Bytes, *, is_urgent: bool) -> Request:
        """Begin to bring rows in.

        Args:
            row_ids: [n] int64, ascending, none twice, each inside the table.
            codes: [n, head_dim] uint8, contiguous; written until `wait` returned, and not to be touched before.
            scales: [n, head_dim / 32] uint8, likewise.
            is_urgent: a layer is about to need them; others may come first where this is not set.
        """
        ...

    def close(self) -> None:
        """Let go of files and threads."""
        ...


class TableSource:
    """A table in memory or a mapped one: `start` announces the rows, `wait` copies them."""

    def __init__(self, table: MemoryTable) -> None:
        self.layer_id, self.rows, self.head_dim = table.layer_id, table.rows, table.head_dim
        self._table = table

    def start(self, row_ids: RowIds, codes: Bytes, scales: Bytes, *, is_urgent: bool) -> Request:
        """Announce the pages of the rows. See `RowSource`."""
        del is_urgent  # the system orders its reads
        self._table.bring_in(row_ids)
        return _Copy(self._table, row_ids, codes, scales)

    def close(self) -> None:
        """Do nothing: the table belongs to the model."""


class _Copy:
    is_done = False  # nobody knows which pages are there; finding out costs as much as the copy

    def __init__(self, table: MemoryTable, row_ids: RowIds, codes: Bytes, scales: Bytes) -> None:
        self._table, self._row_ids, self._codes, self._scales = table, row_ids, codes, scales

    def wait(self) -> Mapping[int, UserError]:
        self._table.copy_rows(self._row_ids, self._codes, self._scales)
        return {}
