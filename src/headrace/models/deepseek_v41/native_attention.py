"""Attention of one layer on native kernels: about six calls for all sequences of a batch.

What does not change between layers of one pass is made once (`Shared`): rotations, the table of segments, decoded
entries, and the picks of rows that see few entries.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.cache.entry_store import EntryStore
from headrace.kernels.block_quant import fake_q4i
from headrace.kernels.index_topk import all_visible
from headrace.kernels.native.attention import SEGMENT_FIELDS, Attention, Planes, gather
from headrace.kernels.native.library import Library
from headrace.kernels.native.product import Product
from headrace.kernels.native.rows import WindowRows
from headrace.kernels.rope import rotate, rotation
from headrace.models.deepseek_v41.attention import Frequencies, Turn
from headrace.models.deepseek_v41.batch import Rows, Work
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.parameters import LayerWeights
from headrace.models.deepseek_v41.selection import Published, QueryRows, select
from headrace.models.deepseek_v41.tiled import TiledAttention

_COLUMN = {name: place for place, name in enumerate(SEGMENT_FIELDS)}


@dataclass(frozen=True)
class Entries:
    """Decoded entries of one segment [.., H] bfloat16: all of its store, or those of every row's slots."""

    rows_CH: Tensor
    is_by_slot: bool


class Shared:
    """What the layers of one pass share over the rows that are alive; begins anew when the rows change."""

    def __init__(self) -> None:
        self._rows: Rows | None = None
        self._turns: dict[int, Turn] = {}
        self._entries: dict[tuple[int | None, int | None], list[Entries]] = {}
        self.visible: dict[int, list[Tensor]] = {}
        self.easy: dict[tuple[int, int], list[Tensor]] = {}
        self.table = np.zeros((0, len(SEGMENT_FIELDS)), dtype=np.int64)
        self._rings = np.zeros((0, 0, 2), dtype=np.int64)

    def begin(self, rows: Rows) -> None:
        """Make the table of segments for these rows, unless it is theirs already."""
        if self._rows is rows:
            return
        self._rows = rows
        self._turns, self._entries, self.visible, self.easy = {}, {}, {}, {}
        self.table = np.zeros((len(rows.segments), len(SEGMENT_FIELDS)), dtype=np.int64)
        for place, segment in enumerate(rows.segments):
            self.table[place, :3] = segment.offset, segment.count, segment.first
            self.table[place, _COLUMN["depth"]] = segment.state.shape.ring_depth
        self._rings = np.stack([segment.state.ring_addresses for segment in rows.segments], 1)

    def turn(self, rows: Rows, frequencies: Tensor) -> Turn:
        """Return cosines and sines of the rows, made once per table of frequencies."""
        key = id(frequencies)
        if key not in self._turns:
            self._turns[key] = rotation(rows.positions, frequencies)
        return self._turns[key]

    def rings(self, layer_id: int) -> np.ndarray:
        """Return the addresses of the layer's rings, [S, 2]."""
        found: np.ndarray = self._rings[layer_id]
        return found

    def entries(
        self, library: Library, rows: Rows, source: tuple[int | None, int | None], picked: list[Tensor]
    ) -> list[Entries]:
        """Return decoded entries of every segment for a pair of KV source and index source."""
        if source not in self._entries:
            stores = [segment.state.store_of(source[0]) for segment in rows.segments]
            self._entries[source] = [self._decode(library, *pair) for pair in zip(stores, picked, strict=True)]
        return self._entries[source]

    def _decode(self, library: Library, store: EntryStore, picked_TK: Tensor) -> Entries:
        codes, scales, _, _ = store.planes
        planes = Planes(codes, scales, *store.block_rows)
        if store.length <= picked_TK.numel():
            return Entries(gather(library, planes, None, store.length), is_by_slot=False)
        return Entries(gather(library, planes, picked_TK.view(-1), picked_TK.numel()), is_by_slot=True)


@dataclass
class _Index:
    """Query side of the indexer."""

    q_b: Product
    head_weights: Product
    scale: float = field(default=1.0)


class NativeAttention:
    """Attention of one backbone layer."""

    def __init__(
        self, library: Library, layer: LayerWeights, tiled: TiledAttention, config: Config, frequencies: Frequencies
    ) -> None:
        weights = layer.attention
        self._library, self._plan, self._config = library, layer.plan, config
        self._frequencies = frequencies.of(layer.plan)
        self._q_a_kv = Product(library, tiled.q_a_kv, is_quantised=True)
        self._q_b = Product(library, tiled.q_b, is_quantised=True)
        self._o_a = Product(library, tiled.o_a, is_quantised=False)
        self._o_b = Product(library, tiled.o_b, is_quantised=True)
        shape = {"rotated": config.rope_dim}
        self._window_rows = WindowRows(library, weights.q_norm, weights.kv_norm, eps=config.norm_eps, **shape)
        self._attention = Attention(
            library,
            weights.sink,
            width=config.head_dim,
            window=config.window,
            scale=config.head_dim**-0.5,
            **shape,
        )
        self._index: _Index | None = None
        if tiled.index_q_b is not None and tiled.head_weights is not None:
            scale = config.index_head_dim**-0.5 * config.index_heads**-0.5
            query = Product(library, tiled.index_q_b, is_quantised=True)
            self._index = _Index(query, Product(library, tiled.head_weights, is_quantised=False), scale)

    def run(
        self, rows: Rows, u_TD: Tensor, published: Published, work: Work, shared: Shared, *, is_fp32_index: bool
    ) -> Tensor:
        """Attend from every row and return [T, D].

        State: stores window rows in the sequences' rings.
        """
        shared.begin(rows)
        turn = shared.turn(rows, self._frequencies)
        finished = self._window_rows(self._q_a_kv(u_TD), *turn)
        if self._index is not None:
            self._select(self._index, rows, u_TD, finished.latent_TR, turn, (published, work, shared), is_fp32_index)
        q = self._q_b(finished.latent_TR)
        self._fill(rows, shared, published.picked)
        value = self._attention(q, turn, finished, shared.table)
        return self._o_b(self._o_a(value))

    def _fill(self, rows: Rows, shared: Shared, picked: list[Tensor]) -> None:
        """Write the layer's columns of the table and move the rings on."""
        layer_id, window, table = self._plan.id, self._config.window, shared.table
        table[:, _COLUMN["ring_codes"] : _COLUMN["ring_scales"] + 1] = shared.rings(layer_id)
        for place, segment in enumerate(rows.segments):
            floor = segment.state.floor(layer_id)
            table[place, _COLUMN["floor"]] = floor
            low = min(segment.first, max(floor, segment.first - window + 1))
            segment.state.rings[layer_id].advance(segment.first, low, segment.count)
        if not self._plan.ratio:
            table[:, _COLUMN["picks"] :] = 0
            return
        source = (self._plan.kv_source, self._plan.index_source)
        for place, entries in enumerate(shared.entries(self._library, rows, source, picked)):
            picks = picked[place]
            table[place, _COLUMN["picks"] :] = (
                picks.data_ptr(),
                picks.shape[1],
                entries.rows_CH.data_ptr(),
                entries.is_by_slot,
            )

    def _select(
        self,
        index: _Index,
        rows: Rows,
        u_TD: Tensor,
        latent_TR: Tensor,
        turn: Turn,
        state: tuple[Published, Work, Shared],
        is_fp32: bool,
    ) -> None:
        """Publish the rows' picks; nothing is scored while every row sees no more entries than there are slots."""
        published, work, shared = state
        config, ratio = self._config, self._plan.ratio
        top_k = min(config.index_topk, config.max_positions)
        most = max((segment.first + segment.count) // ratio for segment in rows.segments)
        if most <= top_k:
            self._publish_all(rows, published, shared, top_k)
            return
        q = index.q_b(latent_TR).view(-1, config.index_heads, config.index_head_dim)
        head_weights = index.head_weights(u_TD)
        head_weights = head_weights.float() if is_fp32 else head_weights
        query = QueryRows(fake_q4i(rotate(q, *turn)), head_weights * index.scale)
        select(self._plan, config, rows, query, published, work, is_fp32)

    def _publish_all(self, rows: Rows, published: Published, shared: Shared, top_k: int) -> None:
        ratio = self._plan.ratio
        key = (ratio, top_k)
        if key not in shared.easy:
            visible = [
                torch.div(rows.positions[segment.rows] + 1, ratio, rounding_mode="floor") for segment in rows.segments
            ]
            shared.easy[key] = [all_visible(one, top_k) for one in visible]
        published.picked = shared.easy[key]
        if self._plan.has_candidates:
            config = self._config
            count = min(config.candidate_blocks, -(-config.max_positions // config.candidate_block_size))
            published.blocks = [torch.full((segment.count, count), -1) for segment in rows.segments]
