"""Gradients of attention over a window and picked entries, query by query, from the weights of the forward pass.

The same mathematics as `kernels/attention_gradient.py`, its reference; empty and hidden slots cost nothing.

Numerics: float32, multiply-adds that round once. A dot product over H: lane j of 16 sums values 16 i + j in ascending
i, lanes are added as a tree (8, 4, 2, 1 apart). What a query gets is summed over its window in ascending position, then
over its picks in ascending slot. What an entry gets is summed over the queries of a chunk and their heads, then over
chunks, in order; chunks depend on the number of queries only, so threads change no bit.
What bounds it: multiply-adds, eight per dimension and pair of query and entry.
Source: spec section 3.3, step 5.
"""

import ctypes
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from headrace.kernels.native.library import Library, best_library

WIDTHS: Final = (16, 32, 64, 128)
"""Widths of heads that have a kernel."""

_CHUNK = 256  # queries whose gradients of entries are summed apart, at least
_MOST_CHUNKS = 8
_TENSORS = ("q", "gradient", "value", "total", "window_weights", "rows", "pick_weights", "picked", "entries")
_RESULTS = ("of_q", "of_weight", "of_rows", "of_entries")
_COUNTS = (
    *("num_queries", "num_heads", "width", "window", "span", "tile", "num_rows", "num_slots", "num_entries", "chunk"),
    *("first", "first_row"),
)


class _Job(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int64) for name in _TENSORS + _RESULTS + _COUNTS), ("scale", ctypes.c_double)]


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What a forward pass kept, float32 but for `picked`, contiguous.

    `q`, `gradient` (of the result), `value` (the result) [T, Q, H]; `total` [T, Q, 1] of all weights;
    `window_weights` [T, Q, S] over each query's tile, `rows` [R, H] window entries from position `first_row` on;
    `pick_weights` [T, Q, K], `picked` [T, K] int64 and `entries` [C, H], or None; `first` position of the first query;
    `window`; `tile` queries of a tile; `scale` of the scores.
    """

    q: Tensor
    gradient: Tensor
    value: Tensor
    total: Tensor
    window_weights: Tensor
    rows: Tensor
    pick_weights: Tensor | None
    picked: Tensor | None
    entries: Tensor | None
    first: int
    first_row: int
    window: int
    tile: int
    scale: float


@dataclass(frozen=True)
class Gradients:
    """Of queries [T, Q, H], window entries [R, H] and entries [C, H]; `of_weight` [T, Q], what all weights share."""

    of_q: Tensor
    of_weight: Tensor
    of_rows: Tensor
    of_entries: Tensor | None


def attention_gradients(given: Attended, library: Library | None = None) -> Gradients | None:
    """Return all gradients, by default from the best instruction set; None where there is no kernel."""
    library = library or best_library()
    tensors = {name: getattr(given, name) for name in _TENSORS if getattr(given, name) is not None}
    is_plain = all(
        one.dtype == (torch.int64 if name == "picked" else torch.float32) and one.device.type == "cpu"
        for name, one in tensors.items()
    )
    if library is None or not is_plain or given.q.shape[2] not in WIDTHS:
        return None
    tensors = {name: one.contiguous() for name, one in tensors.items()}
    num_queries, num_heads, width = given.q.shape
    chunk = max(_CHUNK, -(-num_queries // _MOST_CHUNKS))
    chunks = -(-num_queries // chunk)
    reach = chunk + given.window - 1
    num_entries = 0 if given.entries is None else given.entries.shape[0]
    of_q, of_weight = torch.empty_like(tensors["q"]), given.q.new_empty((num_queries, num_heads))
    of_rows, of_entries = given.q.new_empty((chunks, reach, width)), given.q.new_empty((chunks, num_entries, width))
    job = _Job(
        **{name: one.data_ptr() for name, one in tensors.items()},
        **dict(zip(_RESULTS, (one.data_ptr() for one in (of_q, of_weight, of_rows, of_entries)), strict=True)),
        num_queries=num_queries,
        num_heads=num_heads,
        width=width,
        window=given.window,
        span=given.window_weights.shape[2],
        tile=given.tile,
        num_rows=given.rows.shape[0],
        num_slots=0 if given.picked is None else given.picked.shape[1],
        num_entries=num_entries,
        chunk=chunk,
        first=given.first,
        first_row=given.first_row,
        scale=given.scale,
    )
    library.use_threads(torch.get_num_threads())
    library.function("hr_train_attention_back", 1)(ctypes.addressof(job))
    total = given.rows.new_zeros(given.rows.shape)
    for place in range(chunks):
        low = given.first + place * chunk - given.window + 1 - given.first_row  # row of the chunk's first
        start, stop = max(0, low), min(len(total), low + reach)
        if start < stop:
            total[start:stop] += of_rows[place, start - low : stop - low]
    return Gradients(of_q, of_weight, total, _sum(of_entries) if num_entries else None)


def _sum(parts_NCH: Tensor) -> Tensor:
    """Return the sum over chunks in order."""
    total = parts_NCH[0]
    for part in parts_NCH[1:]:
        total += part
    return total
