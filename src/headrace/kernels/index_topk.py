"""The indexer: scores of queries against index keys, candidate blocks, top-k with one tie rule.

Keys are read in tiles and the best entries so far are kept, so memory grows neither with rows times context nor with
the context. Ties go to the lower position everywhere: a score and its position are packed in one integer, which makes
the order total, so the result does not depend on tiles.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.product import default_linear

KEY_TILE = 4096
_SCORE_BYTES = 8 << 20
_HIDDEN = -(1 << 63)
_LOW_32 = 0xFFFFFFFF
_HIDDEN_32 = -(1 << 31)
_LOW_16 = 0xFFFF
_NARROW_TILE = 1 << 16


@dataclass(frozen=True)
class IndexQuery:
    """Index queries of consecutive rows of one sequence.

    `q_TJI` [T, J, I] bfloat16 (already rounded to FP4 values), `weights_TJ` [T, J] bfloat16, `visible_T` [T] int64:
    how many entries each row may see (never decreasing). `is_fp32`: float32 scores instead of the vendor's rounding.
    """

    q_TJI: Tensor
    weights_TJ: Tensor
    visible_T: Tensor
    is_fp32: bool

    def rows(self, low: int, high: int) -> "IndexQuery":
        """Return rows `low` to `high`."""
        return IndexQuery(self.q_TJI[low:high], self.weights_TJ[low:high], self.visible_T[low:high], self.is_fp32)


def index_scores(query: IndexQuery, keys_CI: Tensor) -> Tensor:
    """Score every key for every row, visible or not.

    Args:
        query: T rows.
        keys_CI: [C, I] bfloat16.

    Returns:
        [T, C], bfloat16, or float32 if the query says so.

    Numerics: bfloat16 mode rounds each dot product, each weighted term and the float32 sum over heads to bfloat16,
        as the vendor's code does; float32 mode rounds nothing.
    Source: spec sections 3.5 and 5.8.
    """
    return _weigh(_dots(query, keys_CI), query)[:, : keys_CI.shape[0]]


def _dots(query: IndexQuery, keys_CI: Tensor) -> Tensor:
    """Return dot products [T, J, C], C rounded up to a multiple of 64, in the dtype of the scores."""
    num_rows, num_heads, width = query.q_TJI.shape
    dtype = torch.float32 if query.is_fp32 else torch.bfloat16
    flat = query.q_TJI.reshape(num_rows * num_heads, width)
    return default_linear(flat.to(dtype), _pad_keys(keys_CI).to(dtype)).view(num_rows, num_heads, -1)


def own_dots(query: IndexQuery, keys_TCI: Tensor) -> Tensor:
    """Return dot products [T, J, C] of rows with keys of their own, in the dtype of the scores.

    Numerics: the bits of `_dots` row by row (a test holds them together at released widths); one batched product where
        that is so, 20 times as fast for many rows.
    """
    if query.is_fp32:
        rows = range(len(keys_TCI))
        return torch.cat([_dots(query.rows(row, row + 1), keys_TCI[row]) for row in rows])[..., : keys_TCI.shape[1]]
    return torch.bmm(query.q_TJI.to(torch.bfloat16), keys_TCI.to(torch.bfloat16).transpose(1, 2))


def _weigh(dots_TJC: Tensor, query: IndexQuery) -> Tensor:
    """Return scores [T, C] of dot products, which are overwritten."""
    if query.is_fp32:
        return _head_sum(dots_TJC.relu_().mul_(query.weights_TJ.float().unsqueeze(-1)))
    return _head_sum(dots_TJC.relu_().mul_(query.weights_TJ.unsqueeze(-1))).to(torch.bfloat16)


def _pad_keys(keys_CI: Tensor) -> Tensor:
    missing = -keys_CI.shape[0] % 64
    return torch.cat([keys_CI, keys_CI.new_zeros((missing, keys_CI.shape[1]))]) if missing else keys_CI


def _head_sum(terms_TJC: Tensor) -> Tensor:
    """Sum over heads one after the other in float32, so that the order is the same for every shape."""
    total = terms_TJC[:, 0].float()
    for head in range(1, terms_TJC.shape[1]):
        total += terms_TJC[:, head]
    return total


def order_keys(scores_TC: Tensor, positions: Tensor) -> Tensor:
    """Pack scores and positions in int64 so that a larger key is a higher score, then a lower position.

    Args:
        scores_TC: [T, C] bfloat16 or float32, finite.
        positions: [C] or [T, C] int64, below 2 ** 32.
    """
    scores = scores_TC.float() + 0.0  # -0 becomes +0: they tie
    bits = scores.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (_LOW_32 - positions)


def _order_narrow(scores_TC: Tensor, is_hidden: Tensor) -> Tensor:
    """Pack bfloat16 scores and places in a tile in int32, in the order of `order_keys`; at most 65,536 places.

    Half the bytes of packed keys make the tile's top-k and block maxima about twice as fast.
    """
    bits = (scores_TC + 0.0).view(torch.int16).to(torch.int32)  # -0 becomes +0: they tie
    ordered = bits.bitwise_xor_((bits >> 15).bitwise_and_(0x7FFF))
    places = _LOW_16 - torch.arange(scores_TC.shape[1], dtype=torch.int32, device=scores_TC.device)
    return ordered.bitwise_left_shift_(16).bitwise_or_(places).masked_fill_(is_hidden, _HIDDEN_32)


def _widen_keys(keys_TK: Tensor, low: int) -> Tensor:
    """Return int32 keys of a tile that begins at position `low` as int64 keys; they compare with each other."""
    places = _LOW_16 - (keys_TK & _LOW_16)
    wide = ((keys_TK >> 16).long() << 32) | (_LOW_32 - (places.long() + low))
    return wide.masked_fill_(keys_TK == _HIDDEN_32, _HIDDEN)


def unpack_positions(keys_TK: Tensor) -> Tensor:
    """Return the positions of packed keys in ascending order, -1 (at the end) for slots that hold nothing."""
    empty = 1 << 40
    positions = torch.where(keys_TK > _HIDDEN, _LOW_32 - (keys_TK & _LOW_32), empty).sort(-1).values
    return torch.where(positions == empty, -1, positions)


def best(keys_TC: Tensor, count: int) -> Tensor:
    """Return the `count` largest packed keys of each row (all, if there are fewer), in no promised order."""
    if keys_TC.shape[1] <= count:
        return keys_TC
    return torch.topk(keys_TC, count, dim=1, sorted=False).values


def all_visible(visible_T: Tensor, num_slots: int) -> Tensor:
    """Return [T, num_slots] picks for rows that see at most `num_slots` entries: all of them, ascending, -1 after."""
    slots = torch.arange(num_slots, device=visible_T.device)
    return torch.where(slots < visible_T.unsqueeze(1), slots, -1)


@dataclass(frozen=True)
class Selection:
    """What a scan found: `picked_TK` [T, K] int64 ascending, -1 padded; `blocks_TB` kept candidate blocks or None."""

    picked_TK: Tensor
    blocks_TB: Tensor | None


def scan(
    query: IndexQuery,
    read_keys: Callable[[int, int], Tensor],
    *,
    top_k: int,
    candidate_blocks: int = 0,
    block_size: int = 1,
) -> Selection:
    """Scan all visible entries in tiles.

    Args:
        query: T rows.
        read_keys: `read_keys(low, high)` gives index keys `low` .. `high` - 1 as bfloat16 [n, I].
        top_k: entries to pick per row.
        candidate_blocks: blocks to keep per row; 0 keeps none.
        block_size: entries per candidate block.

    Returns:
        A `Selection`; `blocks_TB` [T, candidate_blocks] is None without candidates.

    Numerics: see `index_scores`; selection is exact and independent of tiles.
    Source: spec section 3.6.
    """
    num_rows = query.q_TJI.shape[0]
    parts = []
    row_step = _row_step(query, int(query.visible_T[-1]) // block_size if candidate_blocks else 0)
    for low in range(0, num_rows, row_step):
        rows = query.rows(low, min(low + row_step, num_rows))
        parts.append(_scan_rows(rows, read_keys, top_k, candidate_blocks, block_size))
    picked = torch.cat([part.picked_TK for part in parts])
    if not candidate_blocks:
        return Selection(picked, None)
    return Selection(picked, torch.cat([part.blocks_TB for part in parts if part.blocks_TB is not None]))


def _row_step(query: IndexQuery, num_blocks: int) -> int:
    """Return how many rows to score at once: scores of one tile, and block peaks of the whole scan, stay small."""
    scores = KEY_TILE * (query.q_TJI.shape[1] * (4 if query.is_fp32 else 2) + 8)  # per head, and one packed key
    return max(1, _SCORE_BYTES // (scores + 8 * num_blocks))


def _scan_rows(
    query: IndexQuery, read_keys: Callable[[int, int], Tensor], top_k: int, candidate_blocks: int, block_size: int
) -> Selection:
    num_entries = int(query.visible_T[-1])
    visible = query.visible_T.unsqueeze(1)
    running = query.visible_T.new_full((query.visible_T.shape[0], 0), 0)
    peaks = []
    tile = max(1, KEY_TILE // block_size) * block_size  # whole blocks, so that none straddles two tiles
    for low in range(0, num_entries, tile):
        high = min(low + tile, num_entries)
        positions = torch.arange(low, high, device=visible.device)
        scores = index_scores(query, read_keys(low, high))
        hidden = positions >= visible
        if scores.dtype == torch.bfloat16 and tile <= _NARROW_TILE:
            narrow = _order_narrow(scores, hidden)
            found = _widen_keys(best(narrow, top_k), low)
            tops = _widen_keys(_block_peaks(narrow, block_size, _HIDDEN_32), low) if candidate_blocks else None
        else:
            keys = order_keys(scores, positions).masked_fill_(hidden, _HIDDEN)
            found, tops = best(keys, top_k), _block_peaks(keys, block_size, _HIDDEN) if candidate_blocks else None
        running = best(torch.cat([running, found], 1), top_k)
        if tops is not None:
            peaks.append(tops)
    blocks = None
    if candidate_blocks:
        blocks = keep_blocks(torch.cat(peaks, 1), query.visible_T, candidate_blocks, block_size)
    return Selection(_pad_slots(unpack_positions(running), top_k), blocks)


def _pad_slots(picked_TK: Tensor, num_slots: int) -> Tensor:
    missing = num_slots - picked_TK.shape[1]
    return picked_TK if missing == 0 else torch.nn.functional.pad(picked_TK, (0, missing), value=-1)


def _block_peaks(keys_TC: Tensor, block_size: int, hidden: int) -> Tensor:
    """Return the largest packed key of every block; a block that is not visible at all keeps the hidden key."""
    missing = -keys_TC.shape[1] % block_size
    padded = torch.nn.functional.pad(keys_TC, (0, missing), value=hidden) if missing else keys_TC
    return padded.view(keys_TC.shape[0], -1, block_size).amax(-1)


def keep_blocks(peaks_TB: Tensor, visible_T: Tensor, count: int, block_size: int) -> Tensor:
    """Choose candidate blocks: the block of the newest visible entry always, then the highest scores.

    Args:
        peaks_TB: [T, blocks] packed key of each block's best visible entry, hidden where none is visible.
        visible_T: [T] entries each row sees, at least 1.
        count: blocks to keep.
        block_size: entries per block.

    Returns:
        [T, count] int64 block indices, ascending, -1 padded.

    Numerics: only the score part of a packed key counts; equal scores go to the lower block.
    """
    block_ids = torch.arange(peaks_TB.shape[1], device=peaks_TB.device)
    keys = torch.where(peaks_TB > _HIDDEN, ((peaks_TB >> 32) << 32) | (_LOW_32 - block_ids), _HIDDEN)
    newest = torch.div(visible_T - 1, block_size, rounding_mode="floor").unsqueeze(1)
    keys = keys.scatter(1, newest, (0x7FFFFFFF << 32) | (_LOW_32 - newest))
    return _pad_slots(unpack_positions(best(keys, count)), count)


def rescan(
    query: IndexQuery, blocks_TB: Tensor, gather_keys: Callable[[Tensor], Tensor], *, top_k: int, block_size: int
) -> Tensor:
    """Score only the entries of kept blocks and pick the best.

    Args:
        query: T rows.
        blocks_TB: [T, B] kept blocks, -1 padded.
        gather_keys: turns entry indices [R, n] (-1 reads anything) into bfloat16 keys [R, n, I].
        top_k: entries to pick per row.
        block_size: entries per block.

    Returns:
        [T, top_k] int64 ascending, -1 padded.
    """
    num_rows, num_blocks = blocks_TB.shape
    per_row = num_blocks * block_size * (query.q_TJI.shape[2] * 2 + query.q_TJI.shape[1] * 4 + 16)
    step = max(1, _SCORE_BYTES // per_row)
    parts = [
        _rescan_rows(query.rows(low, low + step), blocks_TB[low : low + step], gather_keys, top_k, block_size)
        for low in range(0, num_rows, step)
    ]
    return torch.cat(parts)


def _rescan_rows(
    query: IndexQuery, blocks_TB: Tensor, gather_keys: Callable[[Tensor], Tensor], top_k: int, block_size: int
) -> Tensor:
    """Do so for rows whose keys fit in memory together; each has keys of its own, so each has a product of its own."""
    num_rows, num_blocks = blocks_TB.shape
    offsets = torch.arange(block_size, device=blocks_TB.device)
    entries = (blocks_TB.unsqueeze(-1) * block_size + offsets).view(num_rows, -1)
    hidden = (blocks_TB < 0).unsqueeze(-1).expand(num_rows, num_blocks, block_size).reshape(num_rows, -1)
    hidden = hidden | (entries >= query.visible_T.unsqueeze(1))
    entries = entries.masked_fill(hidden, -1)
    keys = gather_keys(entries)
    scores = _weigh(own_dots(query, keys), query)[:, : entries.shape[1]]
    ordered = order_keys(scores, entries.clamp_min(0)).masked_fill_(hidden, _HIDDEN)
    return _pad_slots(unpack_positions(best(ordered, top_k)), top_k)
