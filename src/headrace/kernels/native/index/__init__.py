"""The indexer of one layer in one call: queries, scores on FP4 keys, block maxima, top-k; no score matrix.

A row that sees no more entries than there are slots takes them all. Another scans its visible keys 64 at a time, or the
entries of the blocks that the candidate source kept for it; threads share a long scan. The best so far stand in a list
that is cut to K when it is half as long again, and so do the candidate source's blocks: that is all the memory.

Numerics: queries are rotated and rounded to Q4I; a dot product has the order of `product`: groups of 32, each exact, so
that it may be found in integers; it is rounded to bfloat16, negative ones are zero, times the head's weight rounded to
bfloat16, summed over heads in ascending order in float32, rounded to bfloat16. Higher score, then lower position; for
blocks the score alone, then the lower block, and the block of the newest visible entry is always kept. With AVX-512 an
upper bound of each score is found first, in 8-bit integers, and what it excludes from every list is not rounded.
What bounds it: multiply-adds (heads times keys); with one narrow head, reading the keys.
Source: spec sections 3.5 and 3.6.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels.native.library import Library

SEGMENT_FIELDS = ("offset", "count", "first", "codes", "scales", "blocks", "per_block", "picks", "pool")
"""Columns of the table of segments, int64 each; addresses among them."""

_ADDRESSES = ("q", "weights", "cos", "sin", "segments")
_COUNTS = (
    *("num_segments", "heads", "width", "rotated", "ratio", "top_k", "pool_blocks", "block_size", "writes_pool"),
    "scored",
)


class Job(ctypes.Structure):
    """Arguments of one call; `scored` comes back."""

    _fields_ = [(name, ctypes.c_int64) for name in _ADDRESSES + _COUNTS]


@dataclass(frozen=True)
class Shape:
    """Numbers of one layer: heads, key width, rotated dimensions, tokens per entry, slots, the pool (0 for none)."""

    heads: int
    width: int
    rotated: int
    ratio: int
    top_k: int
    pool_blocks: int
    block_size: int
    writes_pool: bool


class Index:
    """Selection of one layer."""

    def __init__(self, library: Library, shape: Shape) -> None:
        self.shape = shape
        self._job = Job(**{name: int(value) for name, value in vars(shape).items()})
        self._address = ctypes.addressof(self._job)
        self._run = library.function("hr_index", 1)

    def __call__(self, query: tuple[Tensor, Tensor, Tensor, Tensor] | None, segments: np.ndarray) -> int:
        """Write picks (and kept blocks) of every segment and return how many scores were computed.

        Args:
            query: queries [T, J * I] bfloat16 (rotated in place), head weights [T, J] bfloat16, cosines and sines; None
                where no row sees more entries than there are slots.
            segments: [S, 9] int64, columns as `SEGMENT_FIELDS`.

        Raises:
            InternalError: there is no memory left.
        """
        job = self._job
        if query is not None:
            job.q, job.weights, job.cos, job.sin = (part.data_ptr() for part in query)
        job.segments, job.num_segments = segments.ctypes.data, len(segments)
        if self._run(self._address):
            raise InternalError("there is no memory left for a selection")
        return int(job.scored)
