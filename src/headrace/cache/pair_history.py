"""Tokens of a ratio-2 compressor that wait for their partner, with enough history to go back."""

import torch
from torch import Tensor

from headrace.core.errors import InternalError


class PairHistory:
    """Float32 value and gate of the newest tokens of one KV source, by position.

    Only the last token matters while its pair is open; `depth` tokens are kept so that up to `depth` - 1 tokens can be
    taken back (the half pair that was open then is still here).
    """

    def __init__(self, head_dim: int, depth: int, device: torch.device) -> None:
        self._live_on(torch.zeros((depth, 2, head_dim), dtype=torch.float32, device=device))

    @classmethod
    def on(cls, rows: Tensor) -> "PairHistory":
        """Return an empty history that lives on float32 [depth, 2, H] rows."""
        history = cls.__new__(cls)
        history._live_on(rows)
        return history

    def _live_on(self, rows: Tensor) -> None:
        self.depth = rows.shape[0]
        self.end = 0
        self.oldest = 0
        self._rows = rows

    @property
    def pending_bytes(self) -> int:
        """Bytes of the one open half pair (what a snapshot has to carry)."""
        return self._rows[0].numel() * self._rows.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole history."""
        return self._rows.numel() * self._rows.element_size()

    def store(self, first: int, values_TH: Tensor, gates_TH: Tensor) -> None:
        """Keep the newest rows of positions `first` onwards, float32 [T, H] each."""
        if first != self.end:
            raise InternalError(f"pair row {first} was stored after row {self.end - 1}")
        self.end = first + values_TH.shape[0]
        self.oldest = max(self.oldest, self.end - self.depth)
        kept = min(self.depth, values_TH.shape[0])
        slots = torch.arange(self.end - kept, self.end, device=values_TH.device) % self.depth
        rows = torch.stack((values_TH[-kept:], gates_TH[-kept:]), 1)
        self._rows.index_copy_(0, slots, rows)

    @property
    def rows(self) -> Tensor:
        """The buffer, float32 [depth, 2, H]; it never moves."""
        return self._rows

    def advance(self, first: int, count: int) -> None:
        """Take `count` rows from position `first` on as stored, after an open pair was read.

        The bytes are put in place by whoever calls.

        Raises:
            InternalError: `first` is not the position after the newest row, or the open pair is not held.
        """
        if first != self.end or (first % 2 and first - 1 < self.oldest):
            raise InternalError(f"pair row {first} was stored after row {self.end - 1} of {self.oldest}")
        self.end = first + count
        self.oldest = max(self.oldest, self.end - self.depth)

    def read(self, position: int) -> tuple[Tensor, Tensor]:
        """Return value and gate [1, H] of a position that is still held."""
        if not self.oldest <= position < self.end:
            raise InternalError(f"pair row {position} was read, rows {self.oldest}..{self.end - 1} are held")
        row = self._rows[position % self.depth]
        return row[0:1], row[1:2]

    def restart(self, position: int) -> None:
        """Forget everything; the next row stored is that of `position`."""
        self.oldest = self.end = position

    def stand(self, oldest: int, end: int) -> None:
        """Take rows `oldest` .. `end` - 1 as held: their bytes were put in place from outside."""
        self.oldest, self.end = oldest, end

    def truncate(self, num_tokens: int) -> None:
        """Forget rows at and after position `num_tokens`."""
        self.end = min(self.end, num_tokens)
        self.oldest = min(self.oldest, self.end)
