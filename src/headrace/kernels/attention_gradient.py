"""Gradients of attention over window tiles and picked entries, from the weights that the forward pass kept.

With weights w = exp(score - peak), values v and a total of all weights, the output is sum(w v) / total. So the gradient
of a weight is value . gradient / total plus a share that all weights of a query have in common, and that of its score
is w times as much. Entries are key and value at once and get both gradients.

Numerics: float32 (float64 from float64). Sums over queries have one order for any number of threads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.precision import widen
from headrace.kernels.product import COLUMN_TILE

_INNER = 512  # queries summed over by one product, heads counted: a longer inner dimension is split between threads
_TILE_VALUES = 1 << 17  # weights of a dense tile, so that several passes over it stay in cache
_DENSE_SHARE = 8  # entries per slot up to which weights of all entries are cheaper than gathered entries


@dataclass(frozen=True)
class Flow:
    """What comes back to T queries.

    `q_TQH` they themselves, `of_value` [T, Q, H] the gradient of the sum of weighted values, `of_weight` [T, Q, 1] the
    part of every weight's gradient that is the same for all, `scale` of the scores, `dtype` weights are rounded to
    before they multiply values.
    """

    q_TQH: Tensor
    of_value: Tensor
    of_weight: Tensor
    scale: float
    dtype: torch.dtype

    def of_scores(self, of_values: Tensor, raw: Tensor, rows: slice) -> Tensor:
        """Turn value . gradient [R, Q, n] into the gradient of the dot products, in place."""
        return of_values.add_(self.of_weight[rows]).mul_(raw).mul_(self.scale)

    def rounded(self, raw: Tensor) -> Tensor:
        """Return weights as they multiplied values."""
        return widen(raw.to(self.dtype))


def window_gradients(flow: Flow, raw_TQS: Tensor, tiles_NHS: Tensor, offset: int, tile: int) -> tuple[Tensor, Tensor]:
    """Return gradients of queries [T, Q, H] and of the buffer that the tiles are cut from, [(N - 1) * tile + S, H].

    Args:
        flow: of T queries.
        raw_TQS: weights over each query's tile.
        tiles_NHS: window entries of every tile.
        offset: row of the first query in the first tile.
        tile: queries of a tile, which begin `tile` rows apart in the buffer.
    """
    num_rows, num_heads, span = raw_TQS.shape
    num_tiles, width, _ = tiles_NHS.shape

    def tiled(rows: Tensor) -> Tensor:
        if num_rows != num_tiles * tile:
            padded = rows.new_zeros((num_tiles * tile, *rows.shape[1:]))
            padded[offset : offset + num_rows] = rows
            rows = padded
        return rows.reshape(num_tiles, tile * num_heads, -1)

    raw, of_value, q = tiled(raw_TQS), tiled(flow.of_value), tiled(widen(flow.q_TQH))
    of_scores = torch.bmm(of_value, tiles_NHS)
    of_scores.add_(tiled(flow.of_weight)).mul_(raw).mul_(flow.scale)
    of_q = torch.bmm(of_scores, tiles_NHS.transpose(1, 2)).view(-1, num_heads, width)[offset : offset + num_rows]
    of_tiles = torch.bmm(of_scores.transpose(1, 2), q)
    of_tiles.baddbmm_(flow.rounded(raw).transpose(1, 2), of_value)
    pieces = -(-span // tile)
    buffer = of_tiles.new_zeros((num_tiles - 1 + pieces, tile, width))
    for piece in range(pieces):
        part = of_tiles[:, piece * tile : (piece + 1) * tile]
        buffer[piece : piece + num_tiles, : part.shape[1]] += part
    return of_q, buffer.flatten(0, 1)[: (num_tiles - 1) * tile + span]


def entry_gradients(
    flow: Flow,
    raw_TQK: Tensor,
    picked_TK: Tensor,
    entries_CH: Tensor | None,
    gather: Callable[[Tensor], Tensor],
    of_q: Tensor,
) -> Tensor | None:
    """Add to the gradient of queries and return that of the entries, [C, H].

    Args:
        flow: of T queries.
        raw_TQK: weights of the slots; 0 in empty ones.
        picked_TK: entries in the slots, -1 in empty ones.
        entries_CH: all entries; None if nobody asks for their gradient.
        gather: reads entries, see `SelectedEntries`.
        of_q: [T, Q, H], changed in place.
    """
    num_slots = picked_TK.shape[1]
    if entries_CH is not None and entries_CH.shape[0] <= _DENSE_SHARE * num_slots:
        return _dense(flow, raw_TQK, picked_TK, entries_CH, of_q)
    of_entries = None if entries_CH is None else torch.zeros_like(entries_CH, dtype=of_q.dtype)
    step = max(1, _TILE_VALUES * 8 // (num_slots * of_q.shape[2]))
    for low in range(0, of_q.shape[0], step):
        rows = slice(low, low + step)
        entries, raw, of_value = widen(gather(picked_TK[rows])), raw_TQK[rows], flow.of_value[rows]
        of_scores = flow.of_scores(torch.bmm(of_value, entries.transpose(1, 2)), raw, rows)
        of_q[rows] += torch.bmm(of_scores, entries)
        if of_entries is not None:
            left = torch.cat([of_scores, flow.rounded(raw)], 1).transpose(1, 2)
            parts = torch.bmm(left, torch.cat([widen(flow.q_TQH[rows]), of_value], 1))
            of_entries.index_add_(0, picked_TK[rows].clamp_min(0).reshape(-1), parts.flatten(0, 1))
    return of_entries


def _dense(flow: Flow, raw_TQK: Tensor, picked_TK: Tensor, entries_CH: Tensor, of_q: Tensor) -> Tensor:
    """Work with weights of all entries, 0 where one was not picked: products instead of gathered entries."""
    num_rows, num_heads, num_slots = raw_TQK.shape
    num_entries, width = entries_CH.shape
    padded = -(-max(num_entries, num_slots) // COLUMN_TILE) * COLUMN_TILE
    entries = of_q.new_zeros((padded, width))
    entries[:num_entries] = entries_CH
    of_entries = torch.zeros_like(entries)
    seen = picked_TK.amax(1).cummax(0).values + 1
    slots = torch.arange(num_slots, device=picked_TK.device)
    step = max(1, min(_INNER // num_heads, _TILE_VALUES // (num_heads * padded)))
    for low in range(0, num_rows, step):
        rows = slice(low, min(low + step, num_rows))
        picked, raw = picked_TK[rows], raw_TQK[rows]
        if bool(((picked == slots) | (picked < 0)).all()):
            count = num_slots  # slot after slot, as rows that see no more entries than slots have them
        else:
            count = -(-int(seen[rows.stop - 1]) // COLUMN_TILE) * COLUMN_TILE
        of_value, q = flow.of_value[rows].flatten(0, 1), widen(flow.q_TQH[rows]).flatten(0, 1)
        seen_entries = entries[:count]
        weights = _spread(raw, picked, count)
        of_scores = torch.mm(of_value, seen_entries.t()).view(weights.shape)
        of_scores = flow.of_scores(of_scores, weights, rows).flatten(0, 1)
        of_q[rows] += torch.mm(of_scores, seen_entries).view(of_q[rows].shape)
        if flow.dtype != raw.dtype:
            weights = _spread(flow.rounded(raw), picked, count)
        of_entries[:count].addmm_(of_scores.t(), q).addmm_(weights.flatten(0, 1).t(), of_value)
    return of_entries[:num_entries]


def _spread(weights_RQK: Tensor, picked_RK: Tensor, count: int) -> Tensor:
    """Return weights by entry instead of by slot, [R, Q, count]; an entry that was picked twice has their sum."""
    if count == weights_RQK.shape[2]:
        return weights_RQK
    index = picked_RK.clamp_min(0).unsqueeze(1).expand(weights_RQK.shape)
    return weights_RQK.new_zeros((*weights_RQK.shape[:2], count)).scatter_add_(2, index, weights_RQK)
