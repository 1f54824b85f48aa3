"""Window entries of one layer of one sequence: the newest rows in FP8, older ones overwritten."""

import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels import block_quant


class WindowRing:
    """A ring of `depth` FP8 rows; position p lives in slot p mod depth.

    Owns its buffers, or lives on a slot's, and the range of positions that are valid, `oldest` .. `end` - 1. A ring of
    twice the window goes back up to one window of tokens without losing what the earlier length needs.

    At the released head size a row takes 512 + 16 bytes.
    """

    def __init__(self, head_dim: int, depth: int, device: torch.device) -> None:
        codes = torch.zeros((depth, head_dim), dtype=torch.uint8, device=device)
        self._live_on(codes, codes.new_zeros((depth, head_dim // block_quant.Q8_GROUP)))

    @classmethod
    def on(cls, codes: Tensor, scales: Tensor) -> "WindowRing":
        """Return an empty ring that lives on uint8 [depth, H] codes and [depth, H / 32] scales."""
        ring = cls.__new__(cls)
        ring._live_on(codes, scales)
        return ring

    def _live_on(self, codes: Tensor, scales: Tensor) -> None:
        self.depth = codes.shape[0]
        self.oldest = 0
        self.end = 0
        self._codes = codes
        self._scales = scales

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row, measured from the buffers."""
        return self._codes.shape[1] + self._scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole ring."""
        return self._codes.numel() + self._scales.numel()

    @property
    def stored_bytes(self) -> tuple[Tensor, Tensor]:
        """The buffers themselves, codes uint8 [depth, H] and scales uint8 [depth, H / 32]; they never move."""
        return self._codes, self._scales

    def restart(self, position: int) -> None:
        """Forget everything; the next row stored is that of `position`."""
        self.oldest = self.end = position

    def store(self, first: int, rows_SH: Tensor) -> None:
        """Quantise and store bfloat16 rows [S, H] of positions `first` onwards; only the newest `depth` are kept.

        Raises:
            InternalError: `first` is not the position after the newest row.
        """
        if first != self.end:
            raise InternalError(f"window row {first} was stored after row {self.end - 1}")
        self.end = first + rows_SH.shape[0]
        self.oldest = max(self.oldest, self.end - self.depth)
        kept = rows_SH[max(0, rows_SH.shape[0] - self.depth) :]
        slots = torch.arange(self.end - kept.shape[0], self.end, device=rows_SH.device) % self.depth
        codes, scales = block_quant.encode_q8(kept)
        self._codes.index_copy_(0, slots, codes)
        self._scales.index_copy_(0, slots, scales)

    def advance(self, first: int, low: int, count: int) -> None:
        """Take `count` rows from position `first` on as stored, after rows from `low` on were read.

        The bytes are put in place by whoever calls; only the newest `depth` rows stay.

        Raises:
            InternalError: `first` is not the position after the newest row, or row `low` is not held.
        """
        if first != self.end or low < self.oldest:
            raise InternalError(f"window rows {low}..{first - 1} were read, {self.oldest}..{self.end - 1} are held")
        self.end = first + count
        self.oldest = max(self.oldest, self.end - self.depth)

    def read(self, low: int, high: int) -> Tensor:
        """Return rows `low` .. `high` - 1 as bfloat16 [n, H].

        Raises:
            InternalError: a row is not held; the sentence names it.
        """
        return block_quant.decode_q8(*self.stored_rows(low, high))

    def stored_rows(self, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Return the bytes of rows `low` .. `high` - 1: codes uint8 [n, H] and scales uint8 [n, H / 32].

        Raises:
            InternalError: a row is not held; the sentence names it.
        """
        if low < self.oldest or high > self.end:
            raise InternalError(f"window rows {low}..{high - 1} were read, {self.oldest}..{self.end - 1} are held")
        slots = torch.arange(low, high, device=self._codes.device) % self.depth
        return self._codes[slots], self._scales[slots]

    def load_rows(self, first: int, codes: Tensor, scales: Tensor) -> None:
        """Replace the content by at most `depth` rows of bytes, positions `first` onwards."""
        self.oldest, self.end = first, first + codes.shape[0]
        slots = torch.arange(self.oldest, self.end, device=self._codes.device) % self.depth
        self._codes.index_copy_(0, slots, codes.to(self._codes.device))
        self._scales.index_copy_(0, slots, scales.to(self._scales.device))

    def stand(self, oldest: int, end: int) -> None:
        """Take rows `oldest` .. `end` - 1 as held: their bytes were put in place from outside."""
        self.oldest, self.end = oldest, end

    def truncate(self, num_tokens: int) -> None:
        """Forget rows at and after position `num_tokens`."""
        self.end = min(self.end, num_tokens)
        self.oldest = min(self.oldest, self.end)
