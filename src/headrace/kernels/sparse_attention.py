"""Attention with a sink over a sliding window and a set of selected global entries.

Every entry is key and value at once for all heads. Window entries are laid out in tiles that start at multiples of
`QUERY_TILE` positions, so where an entry stands in the sum is a function of positions alone: a query gets the same
bits in a long prefill, in a chunk and in decode. Selected entries fill a fixed number of slots in ascending order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.kernels.attention_gradient import Flow, entry_gradients, window_gradients
from headrace.kernels.entry_products import entry_scores, entry_values
from headrace.kernels.native.attention_gradient import Attended, Gradients, attention_gradients
from headrace.kernels.precision import wide_dtype, widen
from headrace.kernels.product import ROW_TILE

QUERY_TILE = 64
_SMALL_EXPONENT = -80.0
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
    `entries_CH` [C, H] is what it reads from, where that is a tensor that may have a gradient.
    """

    picked_TK: Tensor
    gather: Callable[[Tensor], Tensor]
    entries_CH: Tensor | None = None


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


def _window_mask(first: int, num_rows: int, window: int, floor: int, device: torch.device) -> Tensor:
    """Return [num_rows, window + QUERY_TILE] bool, True where a query from position `first` on may not look."""
    slot = torch.arange(window + QUERY_TILE, device=device)
    query = torch.arange(QUERY_TILE, device=device).unsqueeze(1)
    outside = (slot - window > query) | (slot <= query)  # the same in every tile
    positions = torch.arange(first, first + num_rows, device=device)
    mask = outside.index_select(0, positions % QUERY_TILE)
    early = max(0, min(num_rows, floor + window + QUERY_TILE - first))
    tile_start = torch.div(positions[:early], QUERY_TILE, rounding_mode="floor") * QUERY_TILE - window
    mask[:early] |= tile_start.unsqueeze(1) + slot < floor
    return mask


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
    if num_rows == (high - low) * QUERY_TILE:
        return widen(q_THI).reshape(high - low, QUERY_TILE * num_heads, width), num_rows, 0
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
    shape = _Shape(first, keys.first, keys.floor, window, scale)
    entries_CH = None if selected is None else selected.entries_CH
    tensors = (q_TQH, keys.rows_SH, sink_Q) if entries_CH is None else (q_TQH, keys.rows_SH, sink_Q, entries_CH)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        value: Tensor = _Attend.apply(q_TQH, keys.rows_SH, sink_Q, entries_CH, selected, shape)
        return value
    return _attend(q_TQH, keys, selected, sink_Q, shape, wants_weights=False).value_TQH


@dataclass(frozen=True)
class _Shape:
    """Numbers of one call: positions of the first query and the first key, floor, window, scale of the scores."""

    first: int
    first_key: int
    floor: int
    window: int
    scale: float

    def tiles_of(self, rows_SH: Tensor, num_rows: int) -> tuple[Tensor, int]:
        """Return window tiles of the queries and the row of the first query in the first of them."""
        low, high = _tiles(self.first, self.first + num_rows)
        keys = WindowKeys(rows_SH, self.first_key, self.floor)
        return _window_tiles(keys, low, high, self.window), self.first - low * QUERY_TILE


@dataclass(frozen=True)
class _Attended:
    """Result [T, Q, H], and what its gradient needs: unrounded weights of window and picks, their total, the sink's."""

    value_TQH: Tensor
    window_TQS: Tensor
    picks_TQK: Tensor | None
    total_TQ1: Tensor
    of_sink_TQ1: Tensor


class _Attend(torch.autograd.Function):
    """`attend` with its gradients; they are not differentiable again."""

    @staticmethod
    def forward(
        ctx: Any,
        q_TQH: Tensor,
        rows_SH: Tensor,
        sink_Q: Tensor,
        entries_CH: Tensor | None,
        selected: SelectedEntries | None,
        shape: _Shape,
    ) -> Tensor:
        keys = WindowKeys(rows_SH, shape.first_key, shape.floor)
        found = _attend(q_TQH, keys, selected, sink_Q, shape, wants_weights=True)
        ctx.save_for_backward(
            q_TQH,
            rows_SH,
            entries_CH,
            found.value_TQH,
            found.window_TQS,
            found.picks_TQK,
            found.total_TQ1,
            found.of_sink_TQ1,
        )
        ctx.selected, ctx.shape = selected, shape
        return found.value_TQH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TQH: Tensor) -> tuple[Tensor | None, ...]:
        q_TQH, rows_SH, entries_CH, value_TQH, window_TQS, picks_TQK, total_TQ1, of_sink_TQ1 = ctx.saved_tensors
        selected, shape = ctx.selected, ctx.shape
        given = Attended(
            q=q_TQH,
            gradient=gradient_TQH,
            value=value_TQH,
            total=total_TQ1,
            window_weights=window_TQS,
            rows=rows_SH,
            pick_weights=picks_TQK,
            picked=None if selected is None else selected.picked_TK,
            entries=entries_CH,
            first=shape.first,
            first_row=shape.first_key,
            window=shape.window,
            tile=QUERY_TILE,
            scale=shape.scale,
        )
        is_taught = selected is None or entries_CH is not None
        found = attention_gradients(given) if is_taught else None
        if found is None:
            found = _gradients(given, selected, shape)
        of_entries = None if found.of_entries is None else found.of_entries.to(entries_CH.dtype)
        of_sink = (found.of_weight * of_sink_TQ1.squeeze(-1)).sum(0)
        return found.of_q.to(q_TQH.dtype), found.of_rows.to(rows_SH.dtype), of_sink, of_entries, None, None


def _gradients(given: Attended, selected: SelectedEntries | None, shape: _Shape) -> Gradients:
    of_value = widen(given.gradient) / given.total
    of_weight = (of_value * widen(given.value)).sum(-1, keepdim=True).neg_()
    flow = Flow(given.q, of_value, of_weight, given.scale, given.q.dtype)
    tiles, offset = shape.tiles_of(given.rows, given.q.shape[0])
    of_q, buffer = window_gradients(flow, given.window_weights, tiles, offset, QUERY_TILE)
    of_entries = None
    if selected is not None and given.pick_weights is not None:
        of_entries = entry_gradients(flow, given.pick_weights, selected.picked_TK, given.entries, selected.gather, of_q)
    start = _tiles(given.first, given.first + 1)[0] * QUERY_TILE - given.window
    of_rows = _rows_of_buffer(buffer, given.first_row - start, given.rows)
    return Gradients(of_q, of_weight.squeeze(-1), of_rows, of_entries)


def _rows_of_buffer(buffer: Tensor, offset: int, rows_SH: Tensor) -> Tensor:
    """Return the rows that `_window_tiles` put into the buffer; a row that did not fit gets zeros."""
    if offset >= 0:
        return buffer[offset : offset + rows_SH.shape[0]]
    return torch.cat([buffer.new_zeros((-offset, buffer.shape[1])), buffer[: rows_SH.shape[0] + offset]])


def _attend(
    q_TQH: Tensor,
    keys: WindowKeys,
    selected: SelectedEntries | None,
    sink_Q: Tensor,
    shape: _Shape,
    *,
    wants_weights: bool,
) -> _Attended:
    num_rows, num_heads, _ = q_TQH.shape
    tiles = shape.tiles_of(keys.rows_SH, num_rows)[0]
    tiled, _, offset = _tile_queries(q_TQH, shape.first)
    scores = torch.bmm(tiled, tiles)
    scores = scores.view(-1, scores.shape[-1])[offset * num_heads : (offset + num_rows) * num_heads]
    scores = scores.view(num_rows, num_heads, -1).mul_(shape.scale)
    hidden_TS = _window_mask(shape.first, num_rows, shape.window, shape.floor, q_TQH.device)
    scores = scores.masked_fill_(hidden_TS.unsqueeze(1), float("-inf"))
    if selected is not None:
        return _attend_selected(q_TQH, (scores, hidden_TS), tiles, offset, selected, sink_Q, shape.scale, wants_weights)
    peak = _peak(scores.amax(-1, keepdim=True), sink_Q)
    raw = _raw_weights(scores, peak, hidden_TS)
    of_sink = torch.exp((sink_Q.unsqueeze(-1) - peak).contiguous())
    total = raw.sum(-1, keepdim=True) + of_sink
    value = (_window_values(widen(raw.to(q_TQH.dtype)), tiles, offset) / total).to(q_TQH.dtype)
    return _Attended(value, raw, None, total, of_sink)


def _peak(largest_TQ1: Tensor, sink_Q: Tensor) -> Tensor:
    """Return the largest score, or the sink where a query may look at nothing: its value is then 0, not NaN."""
    return torch.where(largest_TQ1 == float("-inf"), sink_Q.unsqueeze(-1), largest_TQ1)


def _raw_weights(scores: Tensor, peak: Tensor, hidden_TS: Tensor) -> Tensor:
    """Return weights relative to the largest score, in place of the scores; 0 where hidden.

    The library's exponential takes ten times as long over minus infinity, so it sees another number there.
    """
    hidden = hidden_TS.unsqueeze(1).to(scores.dtype)
    floor = torch.full_like(hidden, float("-inf")).masked_fill_(hidden_TS.unsqueeze(1), _SMALL_EXPONENT)
    torch.maximum(scores.sub_(peak), floor, out=scores)
    return scores.exp_().mul_(1.0 - hidden)


def _window_values(weights_TQS: Tensor, tiles: Tensor, offset: int) -> Tensor:
    """Multiply window weights by the entries of their tile; returns [T, Q, H] float32."""
    num_rows, num_heads, span = weights_TQS.shape
    num_tiles = tiles.shape[0]
    rows = num_rows * num_heads
    padded = -(-rows // ROW_TILE) * ROW_TILE if num_tiles == 1 else num_tiles * QUERY_TILE * num_heads
    start = 0 if num_tiles == 1 else offset * num_heads
    tiled = weights_TQS
    if rows != padded:
        tiled = weights_TQS.new_zeros((padded, span))
        tiled[start : start + rows] = weights_TQS.view(rows, span)
    value = torch.bmm(tiled.view(num_tiles, -1, span), tiles.transpose(1, 2))
    return value.view(padded, -1)[start : start + rows].view(num_rows, num_heads, -1)


def _attend_selected(
    q_TQH: Tensor,
    window_scores: tuple[Tensor, Tensor],
    tiles: Tensor,
    offset: int,
    selected: SelectedEntries,
    sink_Q: Tensor,
    scale: float,
    wants_weights: bool,
) -> _Attended:
    (scores, hidden_TS), (num_rows, _, width) = window_scores, q_TQH.shape
    num_slots = selected.picked_TK.shape[1]
    step = max(1, _GATHER_BYTES // (num_slots * width * 4))
    value = torch.empty(q_TQH.shape, dtype=scores.dtype, device=q_TQH.device)
    total, of_sink = scores.new_empty((2, *scores.shape[:2], 1))
    shared, num_shared = _shared_entries(selected)
    picks = []
    for low, high in _pieces(num_shared, num_rows, step):
        rows = slice(low, high)
        picked = selected.picked_TK[rows]
        entries = shared if shared is not None and high <= num_shared else widen(selected.gather(picked))
        pick_scores = entry_scores(widen(q_TQH[rows]), entries).mul_(scale)
        pick_scores = pick_scores.masked_fill_((picked < 0).unsqueeze(1), float("-inf"))
        peaks = scores[rows].amax(-1, keepdim=True), pick_scores.amax(-1, keepdim=True)
        peak = _peak(torch.maximum(*peaks), sink_Q)
        raw, entry_raw = _raw_weights(scores[rows], peak, hidden_TS[rows]), _raw_weights(pick_scores, peak, picked < 0)
        torch.exp((sink_Q.unsqueeze(-1) - peak).contiguous(), out=of_sink[rows])
        torch.add(raw.sum(-1, keepdim=True) + entry_raw.sum(-1, keepdim=True), of_sink[rows], out=total[rows])
        value[rows] = entry_values(widen(entry_raw.to(q_TQH.dtype)), entries)
        if wants_weights:
            picks.append(entry_raw)
    value += _window_values(widen(scores.to(q_TQH.dtype)), tiles, offset)
    kept = torch.cat(picks) if wants_weights else None
    return _Attended(value.div_(total).to(q_TQH.dtype), scores, kept, total, of_sink)


def _pieces(num_shared: int, num_rows: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut rows into pieces of `step`; none straddles `num_shared`."""
    for start, stop in ((0, num_shared), (num_shared, num_rows)):
        for low in range(start, stop, step):
            yield low, min(low + step, stop)


def _shared_entries(selected: SelectedEntries) -> tuple[Tensor | None, int]:
    """Return the slots' entries [1, K, H] of the first rows that agree about them, and how many rows do.

    Rows that see no more entries than there are slots pick slot after slot, so the last of them has all their entries.
    """
    picked_TK = selected.picked_TK
    slots = torch.arange(picked_TK.shape[1], device=picked_TK.device)
    agrees_T = ((picked_TK == slots) | (picked_TK < 0)).all(1)
    num_rows = int(agrees_T.int().cummin(0).values.sum())
    if num_rows < 2:
        return None, 0
    return widen(selected.gather(picked_TK[:num_rows].amax(0, keepdim=True))), num_rows


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
    raw = torch.exp((scores - peak).contiguous())
    weights, total = widen(raw.to(q_XQH.dtype)), raw.sum(-1, keepdim=True)
    value = torch.mm(weights, entries)[:rows] / (total[:rows] + torch.exp((sink - peak[:rows]).contiguous()))
    return value.view(num_rows, num_heads, width).to(q_XQH.dtype)
