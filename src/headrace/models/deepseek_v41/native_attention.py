"""Attention of one layer on native kernels: about six calls for all sequences of a batch.

What does not change between layers of one pass is made once (`Shared`): rotations, the table of segments and decoded
entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.cache.entry_store import EntryStore
from headrace.kernels.native.attention import SEGMENT_FIELDS, Attention, Planes, entries_room, gather
from headrace.kernels.native.library import Library
from headrace.kernels.native.product import Product
from headrace.kernels.native.room import Room, Rooms
from headrace.kernels.native.rows import WindowRows
from headrace.kernels.native.tiles import Matrix
from headrace.kernels.rope import rotation
from headrace.models.deepseek_v41.attention import Frequencies, Turn
from headrace.models.deepseek_v41.batch import Rows, Work
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.native_index import NativeIndex
from headrace.models.deepseek_v41.parameters import LayerWeights
from headrace.models.deepseek_v41.selection import Published
from headrace.models.deepseek_v41.tiled import TiledAttention

_COLUMN = {name: place for place, name in enumerate(SEGMENT_FIELDS)}


@dataclass(frozen=True)
class Entries:
    """Decoded entries of one segment [.., H] bfloat16: all of its store, or those of every row's slots."""

    rows_CH: Tensor
    is_by_slot: bool


class Shared:
    """What the layers of one pass share over the rows that are alive; begins anew when the rows change."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._rows: Rows | None = None
        self._turns: dict[int, Turn] = {}
        self._entries: dict[tuple[int | None, int | None], list[Entries]] = {}
        self.filled: tuple[int | None, int | None] | None = None
        self.table = np.zeros((0, len(SEGMENT_FIELDS)), dtype=np.int64)
        self._rings = np.zeros((0, 0, 2), dtype=np.int64)

    def begin(self, rows: Rows) -> None:
        """Make the table of segments for these rows, unless it is theirs already."""
        if self._rows is rows:
            return
        self._rows = rows
        self._turns, self._entries, self.filled = {}, {}, None
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
        """Return decoded entries of every segment for a pair of KV source and index source, the newest pair only."""
        if source not in self._entries:
            stores = [segment.state.store_of(source[0]) for segment in rows.segments]
            pairs = zip(stores, picked, strict=True)
            found = [self._decode(library, place, *pair) for place, pair in enumerate(pairs)]
            self._entries = {source: found}
        return self._entries[source]

    def _decode(self, library: Library, place: int, store: EntryStore, picked_TK: Tensor) -> Entries:
        codes, scales, _, _ = store.planes
        room = entries_room(self._rooms, place, 2 * codes.shape[1])
        planes = Planes(codes, scales, *store.block_rows)
        if store.length <= picked_TK.numel():
            return Entries(gather(library, planes, None, store.length, room), is_by_slot=False)
        return Entries(gather(library, planes, picked_TK.view(-1), picked_TK.numel(), room), is_by_slot=True)


@dataclass(frozen=True)
class Projections:
    """The four dense products of attention, of a backbone or draft layer."""

    q_a_kv: Product
    q_b: Product
    o_a: Product
    o_b: Product

    @classmethod
    def build(cls, library: Library, tiled: TiledAttention, rooms: Rooms) -> "Projections":
        """Make them ready; what they return lies in the model's rooms."""

        def room(part: str, matrices: Sequence[Matrix]) -> Room[Tensor]:
            return rooms.tensor(part, sum(matrix.rows for matrix in matrices), torch.bfloat16)

        return cls(
            q_a_kv=Product(library, tiled.q_a_kv, is_quantised=True, room=room("projected", [tiled.q_a_kv])),
            q_b=Product(library, tiled.q_b, is_quantised=True, room=room("queries", [tiled.q_b])),
            o_a=Product(library, tiled.o_a, is_quantised=False, room=room("grouped", tiled.o_a)),
            o_b=Product(library, tiled.o_b, is_quantised=True, room=room("attended", [tiled.o_b])),
        )


class NativeAttention:
    """Attention of one backbone layer."""

    def __init__(
        self,
        library: Library,
        layer: LayerWeights,
        tiled: TiledAttention,
        config: Config,
        frequencies: Frequencies,
        rooms: Rooms,
    ) -> None:
        weights = layer.attention
        self._library, self._plan, self._config = library, layer.plan, config
        self._frequencies = frequencies.of(layer.plan)
        self.products = Projections.build(library, tiled, rooms)
        rotated, eps = config.rope_dim, config.norm_eps
        self._window_rows = WindowRows(library, weights.q_norm, weights.kv_norm, rotated=rotated, eps=eps, rooms=rooms)
        self._attention = Attention(
            library,
            weights.sink,
            width=config.head_dim,
            window=config.window,
            scale=config.head_dim**-0.5,
            rotated=rotated,
            rooms=rooms,
        )
        self._index = NativeIndex(library, layer.plan, tiled, config, rooms)

    def run(
        self, rows: Rows, u_TD: Tensor, published: Published, work: Work, shared: Shared, *, is_fp32_index: bool
    ) -> Tensor:
        """Attend from every row and return [T, D].

        State: stores window rows in the sequences' rings.
        """
        shared.begin(rows)
        turn = shared.turn(rows, self._frequencies)
        products = self.products
        finished = self._window_rows(products.q_a_kv(u_TD), *turn)
        inputs = (u_TD, finished.latent_TR, turn)
        self._index.publish(rows, inputs, published, work, is_fp32=is_fp32_index)
        q = products.q_b(finished.latent_TR)
        self._fill(rows, shared, published.picked)
        value = self._attention(q, turn, finished, shared.table)
        return products.o_b(products.o_a(value))

    def _fill(self, rows: Rows, shared: Shared, picked: list[Tensor]) -> None:
        """Write the layer's columns of the table and move the rings on."""
        layer_id, window, table = self._plan.id, self._config.window, shared.table
        table[:, _COLUMN["ring_codes"] : _COLUMN["ring_scales"] + 1] = shared.rings(layer_id)
        for place, segment in enumerate(rows.segments):
            floor = segment.state.floor(layer_id)
            table[place, _COLUMN["floor"]] = floor
            low = min(segment.first, max(floor, segment.first - window + 1))
            segment.state.rings[layer_id].advance(segment.first, low, segment.count)
        source = (self._plan.kv_source, self._plan.index_source) if self._plan.ratio else None
        if shared.filled == source and source is not None:
            return
        shared.filled = source
        if source is None:
            table[:, _COLUMN["picks"] :] = 0
            return
        for place, entries in enumerate(shared.entries(self._library, rows, source, picked)):
            picks = picked[place]
            table[place, _COLUMN["picks"] :] = (
                picks.data_ptr(),
                picks.shape[1],
                entries.rows_CH.data_ptr(),
                entries.is_by_slot,
            )
