"""Attention with a sink over a sliding window and a set of selected global entries.

Every entry is key and value at once for all heads. Window entries are laid out in tiles that start at multiples of
`QUERY_TILE` positions, so where an entry stands in the sum is a function of positions alone: a query gets the same
bits in a long prefill, in a chunk and in decode. Selected entries fill a fixed number of slots in ascending order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.precision import wide_dtype, widen
from headrace.kernels.product import ROW_TILE

QUERY_TILE = 64
_GATHER_BYTES = 4 << 20  # gathered entries stay in cache; larger tiles were three to ten times slower per row


@dataclass(frozen=True)
class WindowKeys:
    """Window entries of consecutive positions.

    `rows_SH` [S, H] bfloat16 are the entries of positions `first` .. `first + S - 1`; positions below `floor` are
    never attended (start of the sequence, or where a replay started).
    """

    rows_SH: Tensor
    first: int
    floor: int


@dataclass(frozen=True)
class SelectedEntries:
    """Global entries picked for every query.

    `picked_TK` [T, K] int64 ascending, -1 for an empty slot; `gather` turns [R, K] picks into bfloat16 [R, K, H].
    """

    picked_TK: Tensor
    gather: Callable[[Tensor], Tensor]


def _tiles(first: int, last: int) -> tuple[int, int]:
    return first // QUERY_TILE, -(-last // QUERY_TILE)


def _window_tiles(keys: WindowKeys, low_tile: int, high_tile: int, window: int) -> Tensor:
    """Return [tiles, H, window + QUERY_TILE] float32: tile t covers positions t * QUERY_TILE - window onwards."""
    start = low_tile * QUERY_TILE - window
    buffer = keys.rows_SH.new_zeros(
        (high_tile * QUERY_TILE - start, keys.rows_SH.shape[1]), dtype=wide_dtype(keys.rows_SH.dtype)
    )
    offset = keys.first - start
    skip = max(0, -offset)
    buffer[offset + skip : offset + keys.rows_SH.shape[0]] = keys.rows_SH[skip:]
    return buffer.unfold(0, window + QUERY_TILE, QUERY_TILE)


def _window_mask(positions: Tensor, window: int, floor: int) -> Tensor:
    """Return [n, window + QUERY_TILE] bool, True where the query at a position may not look."""
    tile_start = torch.div(positions, QUERY_TILE, rounding_mode="floor") * QUERY_TILE - window
    key = tile_start.unsqueeze(1) + torch.arange(window + QUERY_TILE, device=positions.device)
    query = positions.unsqueeze(1)
    return (key > query) | (key <= query - window) | (key < floor)


def _tile_queries(q_THI: Tensor, first: int) -> tuple[Tensor, int, int]:
    """Return queries as [tiles, rows * heads, H] float32, the rows kept per tile and the offset of the first row."""
    num_rows, num_heads, width = q_THI.shape
    low, high = _tiles(first, first + num_rows)
    if high - low == 1:
        rows = num_rows * num_heads
        padded = -(-rows // ROW_TILE) * ROW_TILE
        tiled = q_THI.new_zeros((1, padded, width), dtype=wide_dtype(q_THI.dtype))
        tiled[0, :rows] = q_THI.reshape(rows, width)
        return tiled, num_rows, 0
    offset = first - low * QUERY_TILE
    tiled = q_THI.new_zeros(((high - low) * QUERY_TILE, num_heads, width), dtype=wide_dtype(q_THI.dtype))
    tiled[offset : offset + num_rows] = q_THI
    return tiled.view(high - low, QUERY_TILE * num_heads, width), num_rows, offset


def attend(
    q_TQH: Tensor,
    first: int,
    keys: WindowKeys,
    selected: SelectedEntries | None,
    sink_Q: Tensor,
    *,
    window: int,
    scale: float,
) -> Tensor:
    """Attend from consecutive positions of one sequence.

    Args:
        q_TQH: [T, Q, H] bfloat16 queries of positions `first` .. `first + T - 1`, already rotated.
        first: position of the first query.
        keys: window entries; must hold every position that a query may look at.
        selected: picked global entries per query, or None in a window-only layer.
        sink_Q: [Q] float32, one logit per head that takes weight and gives no value.
        window: positions a query looks at, itself included.
        scale: factor of the dot products.

    Returns:
        [T, Q, H] bfloat16, not yet de-rotated.

    Numerics: float32 scores; weights relative to the largest score, rounded to bfloat16 before they multiply values;
        the sum of weights is not rounded. Row-invariant by construction (fixed tiles and slots).
    Source: spec section 3.3, step 5.
    """
    num_rows, num_heads, _ = q_TQH.shape
    low, high = _tiles(first, first + num_rows)
    tiles = _window_tiles(keys, low, high, window)
    tiled, _, offset = _tile_queries(q_TQH, first)
    scores = torch.bmm(tiled, tiles)
    scores = scores.view(-1, scores.shape[-1])[offset * num_heads : (offset + num_rows) * num_heads]
    scores = scores.view(num_rows, num_heads, -1).mul_(scale)
    positions = torch.arange(first, first + num_rows, device=q_TQH.device)
    scores = scores.masked_fill_(_window_mask(positions, window, keys.floor).unsqueeze(1), float("-inf"))
    if selected is None:
        peak = _peak(scores.detach().amax(-1, keepdim=True), sink_Q)
        weights, total = _weights(scores, peak, q_TQH.dtype)
        total = total + torch.exp((sink_Q.unsqueeze(-1) - peak).contiguous())
        return (_window_values(weights, tiles, offset) / total).to(q_TQH.dtype)
    return _attend_selected(q_TQH, scores, tiles, offset, selected, sink_Q, scale)


def _peak(largest_TQ1: Tensor, sink_Q: Tensor) -> Tensor:
    """Return the largest score, or the sink where a query may look at nothing: its value is then 0, not NaN."""
    return torch.where(largest_TQ1 == float("-inf"), sink_Q.detach().unsqueeze(-1), largest_TQ1)


def _weights(scores: Tensor, peak: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weights rounded to `dtype` (as float32) and the unrounded sum over the last dimension."""
    raw = torch.exp((scores - peak).contiguous())
    return widen(raw.to(dtype)), raw.sum(-1, keepdim=True)


def _window_values(weights_TQS: Tensor, tiles: Tensor, offset: int) -> Tensor:
    """Multiply window weights by the entries of their tile; returns [T, Q, H] float32."""
    num_rows, num_heads, span = weights_TQS.shape
    num_tiles = tiles.shape[0]
    rows = num_rows * num_heads
    padded = -(-rows // ROW_TILE) * ROW_TILE if num_tiles == 1 else num_tiles * QUERY_TILE * num_heads
    start = 0 if num_tiles == 1 else offset * num_heads
    tiled = weights_TQS.new_zeros((padded, span))
    tiled[start : start + rows] = weights_TQS.view(rows, span)
    value = torch.bmm(tiled.view(num_tiles, -1, span), tiles.transpose(1, 2))
    return value.view(padded, -1)[start : start + rows].view(num_rows, num_heads, -1)


def _attend_selected(
    q_TQH: Tensor, scores: Tensor, tiles: Tensor, offset: int, selected: SelectedEntries, sink_Q: Tensor, scale: float
) -> Tensor:
    num_rows, _, width = q_TQH.shape
    num_slots = selected.picked_TK.shape[1]
    step = max(1, _GATHER_BYTES // (num_slots * width * 4))
    values, window_weights, totals = [], [], []
    for low in range(0, num_rows, step):
        rows = slice(low, min(low + step, num_rows))
        picked = selected.picked_TK[rows]
        entries = widen(selected.gather(picked))
        entry_scores = torch.bmm(widen(q_TQH[rows]), entries.transpose(1, 2)).mul_(scale)
        entry_scores = entry_scores.masked_fill_((picked < 0).unsqueeze(1), float("-inf"))
        peaks = scores[rows].detach().amax(-1, keepdim=True), entry_scores.detach().amax(-1, keepdim=True)
        peak = _peak(torch.maximum(*peaks), sink_Q)
        weights, total = _weights(scores[rows], peak, q_TQH.dtype)
        entry_weights, entry_total = _weights(entry_scores, peak, q_TQH.dtype)
        totals.append(total + entry_total + torch.exp((sink_Q.unsqueeze(-1) - peak).contiguous()))
        window_weights.append(weights)
        values.append(torch.bmm(entry_weights, entries))
    value = torch.cat(values) + _window_values(torch.cat(window_weights), tiles, offset)
    return (value / torch.cat(totals)).to(q_TQH.dtype)


def attend_block(q_XQH: Tensor, entries_SH: Tensor, sink_Q: Tensor, *, scale: float) -> Tensor:
    """Attend from every query to every entry (a draft block: bidirectional, no mask).

    Args:
        q_XQH: [X, Q, H] bfloat16.
        entries_SH: [S, H] bfloat16, context entries then the block's own.
        sink_Q: [Q] float32.
        scale: factor of the dot products.

    Returns:
        [X, Q, H] bfloat16.

    Numerics: as `attend`.
    Source: spec section 3.11, step 2.
    """
    num_rows, num_heads, width = q_XQH.shape
    rows = num_rows * num_heads
    padded = q_XQH.new_zeros((-(-rows // ROW_TILE) * ROW_TILE, width), dtype=wide_dtype(q_XQH.dtype))
    padded[:rows] = q_XQH.reshape(rows, width)
    entries = widen(entries_SH)
    scores = torch.mm(padded, entries.t()).mul_(scale)
    sink = sink_Q.repeat(num_rows).unsqueeze(-1)
    peak = scores.detach().amax(-1, keepdim=True)
    weights, total = _weights(scores, peak, q_XQH.dtype)
    value = torch.mm(weights, entries)[:rows] / (total[:rows] + torch.exp((sink - peak[:rows]).contiguous()))
    return value.view(num_rows, num_heads, width).to(q_XQH.dtype)
