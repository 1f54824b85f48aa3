"""Global entries of one KV source: packed FP4 values and index keys, one row per `ratio` tokens, wherever they lie."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels import block_quant

_SHARED_DECODE = 4  # look for shared picks while the store has at most this many rows per pick


def plane_widths(head_dim: int, index_head_dim: int) -> tuple[int, int, int, int]:
    """Return the bytes a row has in each plane: value codes, value scales, key codes, key scales."""
    return (
        head_dim // 2,
        head_dim // block_quant.Q4K_GROUP,
        index_head_dim // 2,
        index_head_dim // block_quant.Q4I_GROUP,
    )


class EntryStore(ABC):
    """Append-only rows of global KV and index keys, stored as packed FP4 with their scales.

    Knows what a row is; a subclass knows where it lies: in planes (uint8 [rows, width]), at the place it gives.
    Rows beyond `length` are never read. Rolls back by cutting (`truncate`).

    At the released sizes a row takes 256 + 32 bytes of values and 64 + 4 bytes of index key.
    """

    def __init__(self, head_dim: int, index_head_dim: int, ratio: int, planes: tuple[Tensor, ...]) -> None:
        self.ratio = ratio
        self.length = 0
        self._head_dim = head_dim
        self._index_head_dim = index_head_dim
        self._planes = planes

    @abstractmethod
    def reserve(self, rows: int) -> None:
        """Make sure that there is room for `rows` rows in all."""

    @abstractmethod
    def _skipped(self, count: int) -> int:
        """Make sure that `count` rows can follow; return how many of them are there already."""

    @abstractmethod
    def _write(self, first: int, encoded: tuple[Tensor, ...]) -> None:
        """Store the encoded rows `first` onwards, one part per plane."""

    @abstractmethod
    def _places(self, rows: Tensor) -> Tensor:
        """Return where rows [n] lie in the planes, [n] int64."""

    @abstractmethod
    def _run(self, which: int, low: int, high: int) -> Tensor:
        """Return rows `low` .. `high` - 1 of a plane, uint8 [n, width]."""

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """The buffers as they are now: value codes, value scales, key codes, key scales, uint8 [places, width]."""
        return self._planes

    @property
    def block_rows(self) -> tuple[Tensor | None, int]:
        """Block numbers int64 and rows per block; None where row j lies at place j."""
        return None, 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row, measured from the buffers."""
        return sum(plane.shape[1] * plane.element_size() for plane in self._planes)

    @property
    def taught(self) -> Tensor | None:
        """Entries that may have a gradient: stored bytes have none."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in use."""
        return self.length * self.row_bytes

    def append(self, entries_CH: Tensor, index_keys_CI: Tensor) -> None:
        """Quantise and store new rows: bfloat16 [C, H] values and [C, I] index keys, both already rotated."""
        count = entries_CH.shape[0]
        if count == 0:
            return
        skipped = self._skipped(count)
        if skipped < count:
            encoded = (
                *block_quant.encode_q4k(entries_CH[skipped:]),
                *block_quant.encode_q4i(index_keys_CI[skipped:]),
            )
            self._write(self.length + skipped, encoded)
        self.length += count

    def admit(self, count: int) -> int:
        """Take `count` new rows as stored and return how many of them are there already.

        The bytes of the others are put into `planes` by whoever calls.
        """
        if count == 0:
            return 0
        skipped = self._skipped(count)
        if skipped < count:
            self._check_writable(self.length + skipped, self.length + count)
        self.length += count
        return skipped

    @abstractmethod
    def _check_writable(self, low: int, high: int) -> None:
        """Refuse to write rows `low` .. `high` - 1 where that is not allowed."""

    def truncate(self, num_tokens: int) -> None:
        """Forget every row that needs a token at or after position `num_tokens`."""
        self.length = min(self.length, num_tokens // self.ratio)

    def stored_rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the bytes in use: value codes, value scales, key codes, key scales, each uint8 [length, ...]."""
        codes, scales, key_codes, key_scales = (self._run(which, 0, self.length) for which in range(4))
        return codes, scales, key_codes, key_scales

    def entries(self, low: int, high: int) -> Tensor:
        """Return stored values `low` .. `high` - 1 as bfloat16 [n, H]."""
        self._check(high)
        return block_quant.decode_q4k(self._run(0, low, high), self._run(1, low, high))

    def gather(self, rows_TK: Tensor) -> Tensor:
        """Return the values of rows [T, K] (-1 reads row 0; its weight must be zero) as float32 [T, K, H], exact.

        Rows that several queries picked are decoded once.

        Raises:
            InternalError: a row is not stored.
        """
        self._check_picks(rows_TK)
        picks = rows_TK.clamp_min(0).view(-1)
        if self.length == 0 or self.length > _SHARED_DECODE * picks.shape[0]:
            return self._decode(picks).float().view(*rows_TK.shape, self._head_dim)
        is_picked = torch.zeros(self.length, dtype=torch.bool, device=picks.device)
        is_picked[picks] = True
        place = is_picked.cumsum(0) - 1
        distinct = self._decode(is_picked.nonzero().view(-1)).float()  # what attention computes with: widened once
        return distinct.index_select(0, place[picks]).view(*rows_TK.shape, self._head_dim)

    def index_keys(self, low: int, high: int) -> Tensor:
        """Return index keys `low` .. `high` - 1 as bfloat16 [n, I]."""
        self._check(high)
        return block_quant.decode_q4i(self._run(2, low, high), self._run(3, low, high))

    def gather_index_keys(self, rows_TK: Tensor) -> Tensor:
        """Return the index keys of rows [T, K] (-1 reads row 0) as bfloat16 [T, K, I].

        Raises:
            InternalError: a row is not stored.
        """
        self._check_picks(rows_TK)
        codes, scales = self._take((2, 3), rows_TK.clamp_min(0).view(-1))
        return block_quant.decode_q4i(codes, scales).view(*rows_TK.shape, self._index_head_dim)

    def _decode(self, rows: Tensor) -> Tensor:
        return block_quant.decode_q4k(*self._take((0, 1), rows))

    def _take(self, which: tuple[int, int], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows [n] of two planes; zeros while nothing is stored."""
        first, second = (self._planes[index] for index in which)
        if self.length == 0:
            return first.new_zeros((rows.shape[0], first.shape[1])), second.new_zeros((rows.shape[0], second.shape[1]))
        places = self._places(rows)
        return first.index_select(0, places), second.index_select(0, places)

    def _check_picks(self, rows_TK: Tensor) -> None:
        if rows_TK.numel():
            self._check(int(rows_TK.amax()) + 1)

    def _check(self, high: int) -> None:
        if high > self.length:
            raise InternalError(f"global row {high - 1} was read but only {self.length} rows are stored")
