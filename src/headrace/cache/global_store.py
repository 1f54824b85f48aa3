"""Global entries of one KV source in buffers of their own, which grow."""

import torch
from torch import Tensor

from headrace.cache.entry_store import EntryStore, plane_widths


class GlobalStore(EntryStore):
    """An `EntryStore` that owns its buffers: row j lies at place j."""

    def __init__(self, head_dim: int, index_head_dim: int, ratio: int, device: torch.device) -> None:
        widths = plane_widths(head_dim, index_head_dim)
        planes = tuple(torch.zeros((0, width), dtype=torch.uint8, device=device) for width in widths)
        super().__init__(head_dim, index_head_dim, ratio, planes)

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

    def load_rows(self, codes: Tensor, scales: Tensor, key_codes: Tensor, key_scales: Tensor) -> None:
        """Replace the content by bytes that `stored_rows` gave."""
        self.length = 0
        self.reserve(codes.shape[0])
        self._write(0, (codes, scales, key_codes, key_scales))
        self.length = codes.shape[0]

    def _skipped(self, count: int) -> int:
        self.reserve(self.length + count)
        return 0

    def _check_writable(self, low: int, high: int) -> None:
        """All rows are the store's own."""

    def _write(self, first: int, encoded: tuple[Tensor, ...]) -> None:
        for plane, part in zip(self._planes, encoded, strict=True):
            plane[first : first + part.shape[0]] = part

    def _places(self, rows: Tensor) -> Tensor:
        return rows

    def _run(self, which: int, low: int, high: int) -> Tensor:
        return self._planes[which][low:high]
