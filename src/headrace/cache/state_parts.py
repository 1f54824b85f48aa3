"""What a sequence's state is made of: buffers of its own, or a slot and blocks."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from headrace.cache.block_table import BlockTable
from headrace.cache.entry_store import EntryStore
from headrace.cache.global_store import GlobalStore
from headrace.cache.paged_store import PagedStore
from headrace.cache.pair_history import PairHistory
from headrace.cache.slot_pool import Slot
from headrace.cache.state_shape import StateShape
from headrace.cache.window_ring import WindowRing


@dataclass(frozen=True)
class StateParts:
    """Stores and pair histories by KV source, rings by layer; `slot` and `table` where those live on pools."""

    stores: Mapping[int, EntryStore]
    pairs: Mapping[int, PairHistory]
    rings: list[WindowRing]
    draft_rings: list[WindowRing]
    slot: Slot | None = None
    table: BlockTable | None = None


@dataclass(frozen=True)
class StateMarks:
    """The numbers of a state that say which of its bytes are valid.

    `rings`, `draft_rings` and `pairs` are (oldest, end) each; `lowest` is the length below which nothing can be taken
    back; `compressed` [W + lookback] int64 are the newest n-gram ids.
    """

    length: int
    decoder_floor: int
    encoder_floor: int
    lowest: int
    rings: tuple[tuple[int, int], ...]
    draft_rings: tuple[tuple[int, int], ...]
    pairs: tuple[tuple[int, int], ...]
    compressed: np.ndarray


def own_parts(shape: StateShape, device: torch.device) -> StateParts:
    """Return empty parts with buffers of their own."""
    head, depth = shape.head_dim, shape.ring_depth
    return StateParts(
        stores={
            layer_id: GlobalStore(head, shape.index_head_dim, ratio, device)
            for layer_id, ratio in shape.source_ratios.items()
        },
        pairs={layer_id: PairHistory(head, shape.window + 1, device) for layer_id in shape.pair_sources},
        rings=[WindowRing(head, depth, device) for _ in range(shape.num_layers)],
        draft_rings=[WindowRing(head, depth, device) for _ in range(shape.num_draft_layers)],
    )


def pooled_parts(slot: Slot, table: BlockTable) -> StateParts:
    """Return empty parts that live on a slot and on the blocks of a table."""
    shape = slot.shape
    return StateParts(
        stores={layer_id: PagedStore(layer_id, table) for layer_id in shape.source_ratios},
        pairs={
            layer_id: PairHistory.on(rows) for layer_id, rows in zip(shape.pair_sources, slot.pair_rows, strict=True)
        },
        rings=_rings(slot.ring_codes, slot.ring_scales),
        draft_rings=_rings(slot.draft_codes, slot.draft_scales),
        slot=slot,
        table=table,
    )


def _rings(codes: torch.Tensor, scales: torch.Tensor) -> list[WindowRing]:
    return [WindowRing.on(*layer) for layer in zip(codes, scales, strict=True)]
