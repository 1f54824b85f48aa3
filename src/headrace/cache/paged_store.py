"""Global entries of one KV source in the blocks of a table."""

import torch
from torch import Tensor

from headrace.cache.block_pool import BLOCK_TOKENS
from headrace.cache.block_table import BlockTable
from headrace.cache.entry_store import EntryStore
from headrace.core.errors import InternalError


class PagedStore(EntryStore):
    """An `EntryStore` over blocks: row j of ratio r lies in block (j r) // 128 of the table.

    Never allocates. Rows whose tokens all lie below the table's write floor are there already: appending them moves
    `length` and writes nothing.
    """

    def __init__(self, source: int, table: BlockTable) -> None:
        shape = table.pool.shape
        ratio = shape.source_ratios[source]
        super().__init__(shape.head_dim, shape.index_head_dim, ratio, table.pool.planes(source))
        self._table = table

    @property
    def block_rows(self) -> tuple[Tensor | None, int]:
        """The table's blocks and how many rows each holds."""
        return self._table.index, BLOCK_TOKENS // self.ratio

    def reserve(self, rows: int) -> None:
        """Check that the table's blocks hold `rows` rows in all.

        Raises:
            InternalError: they hold fewer.
        """
        if rows * self.ratio > self._table.capacity:
            raise InternalError(
                f"{rows} rows of ratio {self.ratio} do not fit blocks for {self._table.capacity} tokens"
            )

    def resume(self, num_tokens: int) -> None:
        """Take the rows that `num_tokens` tokens complete as stored: the blocks hold them."""
        self.reserve(num_tokens // self.ratio)
        self.length = num_tokens // self.ratio

    def _skipped(self, count: int) -> int:
        self.reserve(self.length + count)
        return min(max(self._table.write_floor // self.ratio - self.length, 0), count)

    def _write(self, first: int, encoded: tuple[Tensor, ...]) -> None:
        last = first + encoded[0].shape[0]
        self._check_writable(first, last)
        places = self._places(torch.arange(first, last, device=encoded[0].device))
        for plane, part in zip(self._planes, encoded, strict=True):
            plane.index_copy_(0, places, part)

    def _check_writable(self, low: int, high: int) -> None:
        self._table.check_writable(low * self.ratio, high * self.ratio)

    def _places(self, rows: Tensor) -> Tensor:
        return self._table.places(rows, self.ratio)

    def _run(self, which: int, low: int, high: int) -> Tensor:
        blocks, first = self._table.blocks_of(low, high, self.ratio)
        plane = self._planes[which]
        width = plane.shape[1]
        whole = plane.view(-1, (BLOCK_TOKENS // self.ratio) * width).index_select(0, blocks)  # whole blocks: long runs
        return whole.view(-1, width)[low - first : high - first]
