"""Memory taken from the system for one purpose, which goes back to it as soon as nothing lies in it any more.

An allocator keeps much of what it is given back, between pieces that are still in use; a model that is loaded and laid
out anew tensor by tensor would need its size twice.
"""

import contextlib
import mmap
from typing import Final

import torch
from torch import Tensor

LARGE_PAGE: Final = 1 << 21
_SMALLEST: Final = 1 << 14  # below, whole pages would be a waste


def fresh_memory(size: int, *, in_large_pages: bool = False) -> Tensor:
    """Return uninitialised bytes, [size] uint8.

    Args:
        size: of 16 KiB or more to be memory of its own; less comes from the allocator.
        in_large_pages: ask for pages of 2 MiB; their memory counts from the first byte that is written to each.
    """
    if size < _SMALLEST or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(size, dtype=torch.uint8)
    try:
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # too many mappings
        return torch.empty(size, dtype=torch.uint8)
    if in_large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without such pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)
