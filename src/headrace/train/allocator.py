"""Keeps freed memory for the next step instead of giving it back to the system.

A training step allocates and frees the same large tensors over and over. The C library maps each anew by default, and
the system then fills every page with zeros again; that took a tenth of a step.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_FROM_HEAP = 32 << 20  # the most that glibc accepts
_KEPT = 1 << 30


def keep_freed_memory() -> bool:
    """Ask the C library to keep up to 1 GiB of freed memory; return whether it does (glibc alone knows how)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT))
