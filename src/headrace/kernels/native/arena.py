"""Memory for matrices in pages of 2 MiB, where the system gives them.

A single row waits for memory, and fetching ahead ends at a page's border: through pages of 4 KiB a product of FP4 reads
about two thirds of what it reads through these.
"""

from typing import Final

import torch
from torch import Tensor

from headrace.core.fresh_memory import LARGE_PAGE, fresh_memory

_CHUNK: Final = 32 * LARGE_PAGE
_ALIGNED: Final = 64


class Arena:
    """Keeps copies of tensors side by side; a chunk of memory stands as long as any tensor in it.

    State: a chunk of 64 MiB is reserved at a time, and counts as memory only as far as it was written to.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor of any strides, aligned to 64 bytes."""
        size = tensor.numel() * tensor.element_size()
        if self._used + size > len(self._chunk):
            whole = size + -size % LARGE_PAGE
            self._chunk, self._used = fresh_memory(max(whole, _CHUNK), in_large_pages=True), 0
        place = self._chunk[self._used : self._used + size]
        self._used += size + -size % _ALIGNED
        copied = place.view(tensor.dtype).view(tensor.shape)
        return copied.copy_(tensor)
