"""Global entries of one KV source: packed FP4 values and index keys, one row per `ratio` tokens."""

import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels import block_quant

_SHARED_DECODE = 4  # look for shared picks while the store has at most this many rows per pick


class GlobalStore:
    """Append-only rows of global KV and index keys, stored as packed FP4 with their scales.

    Owns its buffers; rows beyond `length` are never read. Rolls back by cutting (`truncate`).

    At the released sizes a row takes 256 + 32 bytes of values and 64 + 4 bytes of index key.
    """

    def __init__(self, head_dim: int, index_head_dim: int, ratio: int, device: torch.device) -> None:
        self.ratio = ratio
        self.length = 0
        self._head_dim = head_dim
        self._index_head_dim = index_head_dim
        widths = (head_dim // 2, head_dim // 16, index_head_dim // 2, index_head_dim // 32)
        self._planes = tuple(torch.zeros((0, width), dtype=torch.uint8, device=device) for width in widths)

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

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows in all; grows by at least half when called late."""
        have = self._planes[0].shape[0]
        if rows <= have:
            return
        capacity = rows if have == 0 else max(rows, have + have // 2)
        grown = []
        for plane in self._planes:
            bigger = plane.new_zeros((capacity, plane.shape[1]))
            bigger[: self.length] = plane[: self.length]
            grown.append(bigger)
        self._planes = tuple(grown)

    def append(self, entries_CH: Tensor, index_keys_CI: Tensor) -> None:
        """Quantise and store new rows: bfloat16 [C, H] values and [C, I] index keys, both already rotated."""
        count = entries_CH.shape[0]
        if count == 0:
            return
        self.reserve(self.length + count)
        rows = slice(self.length, self.length + count)
        encoded = (*block_quant.encode_q4k(entries_CH), *block_quant.encode_q4i(index_keys_CI))
        for plane, part in zip(self._planes, encoded, strict=True):
            plane[rows] = part
        self.length += count

    def truncate(self, num_tokens: int) -> None:
        """Forget every row that needs a token at or after position `num_tokens`."""
        self.length = min(self.length, num_tokens // self.ratio)

    def stored_rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the bytes in use: value codes, value scales, key codes, key scales, each uint8 [length, ...]."""
        codes, scales, key_codes, key_scales = (plane[: self.length] for plane in self._planes)
        return codes, scales, key_codes, key_scales

    def load_rows(self, codes: Tensor, scales: Tensor, key_codes: Tensor, key_scales: Tensor) -> None:
        """Replace the content by bytes that `stored_rows` gave."""
        self.length = 0
        self.reserve(codes.shape[0])
        for plane, part in zip(self._planes, (codes, scales, key_codes, key_scales), strict=True):
            plane[: part.shape[0]] = part
        self.length = codes.shape[0]

    def entries(self, low: int, high: int) -> Tensor:
        """Return stored values `low` .. `high` - 1 as bfloat16 [n, H]."""
        self._check(high)
        codes, scales = self._planes[0], self._planes[1]
        return block_quant.decode_q4k(codes[low:high], scales[low:high])

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

    def _decode(self, rows: Tensor) -> Tensor:
        return block_quant.decode_q4k(self._take(0, rows), self._take(1, rows))

    def index_keys(self, low: int, high: int) -> Tensor:
        """Return index keys `low` .. `high` - 1 as bfloat16 [n, I]."""
        self._check(high)
        codes, scales = self._planes[2], self._planes[3]
        return block_quant.decode_q4i(codes[low:high], scales[low:high])

    def gather_index_keys(self, rows_TK: Tensor) -> Tensor:
        """Return the index keys of rows [T, K] (-1 reads row 0) as bfloat16 [T, K, I].

        Raises:
            InternalError: a row is not stored.
        """
        self._check_picks(rows_TK)
        return block_quant.decode_q4i(self._take(2, rows_TK), self._take(3, rows_TK))

    def _take(self, which: int, rows_TK: Tensor) -> Tensor:
        plane = self._planes[which]
        if plane.shape[0] == 0:
            plane = plane.new_zeros((1, plane.shape[1]))
        taken = torch.index_select(plane, 0, rows_TK.clamp_min(0).view(-1))
        return taken.view(*rows_TK.shape, plane.shape[1])

    def _check_picks(self, rows_TK: Tensor) -> None:
        if rows_TK.numel():
            self._check(int(rows_TK.amax()) + 1)

    def _check(self, high: int) -> None:
        if high > self.length:
            raise InternalError(f"global row {high - 1} was read but only {self.length} rows are stored")
