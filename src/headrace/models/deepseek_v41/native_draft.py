"""The draft module's attention on native kernels: context entries from taps; blocks that see them and themselves."""

import numpy as np
import torch
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.kernels.native.attention import SEGMENT_FIELDS, Attention
from headrace.kernels.native.library import Library
from headrace.kernels.native.product import Product
from headrace.kernels.native.room import Rooms
from headrace.kernels.native.rows import WindowRows
from headrace.kernels.native.tiles import Matrix, rows_from
from headrace.models.deepseek_v41.attention import Turn
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.native_attention import Projections
from headrace.models.deepseek_v41.parameters import DraftWeights, LayerWeights
from headrace.models.deepseek_v41.tiled import TiledAttention

_COLUMN = {name: place for place, name in enumerate(SEGMENT_FIELDS)}


class NativeContext:
    """Context entries of committed positions, for every draft layer."""

    def __init__(self, library: Library, weights: DraftWeights, main_proj: Matrix, config: Config) -> None:
        nothing, eps = torch.zeros(0), config.norm_eps
        self._main = Product(library, main_proj, is_quantised=True)
        self._norm = WindowRows(library, weights.main_norm, nothing, rotated=0, eps=eps)
        tiled = [layer.tiled.attention for layer in weights.layers if layer.tiled and layer.tiled.attention]
        self._entries = [
            Product(library, rows_from(one.q_a_kv, config.q_lora_rank), is_quantised=True) for one in tiled
        ]
        self._finish = [
            WindowRows(library, nothing, layer.attention.kv_norm, rotated=config.rope_dim, eps=eps)
            for layer in weights.layers
        ]

    def observe(self, state: SequenceState, first: int, taps: Tensor, turn: Turn) -> None:
        """Store the entries of taps [T, n D] bfloat16 of positions `first` onwards in the draft rings."""
        count = taps.shape[0]
        main = self._norm(self._main(taps), *turn).latent_TR
        kept = min(count, state.draft_rings[0].depth)
        slots = torch.arange(first + count - kept, first + count) % state.draft_rings[0].depth
        for ring, product, finish in zip(state.draft_rings, self._entries, self._finish, strict=True):
            rows = finish(product(main), *turn)
            ring.advance(first, first, count)
            codes, scales = ring.stored_bytes
            codes.index_copy_(0, slots, rows.codes_TH[count - kept :])
            scales.index_copy_(0, slots, rows.scales_TG[count - kept :])


class NativeBlock:
    """Attention of one draft layer over blocks of several sequences."""

    def __init__(
        self, library: Library, layer: LayerWeights, tiled: TiledAttention, stage: int, config: Config, rooms: Rooms
    ) -> None:
        weights = layer.attention
        self._stage = stage
        self._products = Projections.build(library, tiled, rooms)
        rotated, eps = config.rope_dim, config.norm_eps
        self._window_rows = WindowRows(library, weights.q_norm, weights.kv_norm, rotated=rotated, eps=eps, rooms=rooms)
        self._attention = Attention(
            library,
            weights.sink,
            width=config.head_dim,
            window=config.window,
            scale=config.head_dim**-0.5,
            is_block=True,
            rotated=rotated,
            rooms=rooms,
        )

    def attend(self, u_RD: Tensor, turn: Turn, states: tuple[SequenceState, ...]) -> Tensor:
        """Attend from every row of every block and return [R, D]; the rings stay as they are."""
        products = self._products
        rows = self._window_rows(products.q_a_kv(u_RD), *turn)
        q = products.q_b(rows.latent_TR)
        value = self._attention(q, turn, rows, self._table(u_RD.shape[0] // len(states), states))
        return products.o_b(products.o_a(value))

    def _table(self, size: int, states: tuple[SequenceState, ...]) -> np.ndarray:
        table = np.zeros((len(states), len(SEGMENT_FIELDS)), dtype=np.int64)
        for place, state in enumerate(states):
            ring = state.draft_rings[self._stage]
            codes, scales = ring.stored_bytes
            table[place, : _COLUMN["depth"] + 1] = (
                *(place * size, size, ring.end, ring.oldest, codes.data_ptr(), scales.data_ptr(), ring.depth),
            )
        return table
