"""Selection of one index source on native kernels: one call for all sequences of a batch."""

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.block_quant import fake_q4i
from headrace.kernels.native.index import SEGMENT_FIELDS, Index, Shape
from headrace.kernels.native.library import Library
from headrace.kernels.native.product import Product
from headrace.kernels.native.room import Rooms
from headrace.kernels.rope import rotate
from headrace.models.deepseek_v41.attention import Turn
from headrace.models.deepseek_v41.batch import Rows, Work
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.plan import LayerPlan
from headrace.models.deepseek_v41.selection import Published, QueryRows, select
from headrace.models.deepseek_v41.tiled import TiledAttention


class NativeIndex:
    """Index queries and selection of one layer."""

    def __init__(self, library: Library, plan: LayerPlan, tiled: TiledAttention, config: Config, rooms: Rooms) -> None:
        self._plan, self._config, self._rooms = plan, config, rooms
        self._is_source = tiled.index_q_b is not None and tiled.head_weights is not None
        if tiled.index_q_b is None or tiled.head_weights is None:
            return
        queries, weights = (
            rooms.tensor(part, matrix.rows, torch.bfloat16)
            for part, matrix in (("index queries", tiled.index_q_b), ("head weights", tiled.head_weights))
        )
        self._q_b = Product(library, tiled.index_q_b, is_quantised=True, room=queries)
        self._head_weights = Product(library, tiled.head_weights, is_quantised=False, room=weights)
        self._scale = config.index_head_dim**-0.5 * config.index_heads**-0.5
        size = config.candidate_block_size
        reads_pool = (
            config.candidate_source is not None and plan.role == "reindex" and plan.id > config.candidate_source
        )
        self._has_pool = plan.has_candidates or reads_pool
        shape = Shape(
            heads=config.index_heads,
            width=config.index_head_dim,
            rotated=config.rope_dim,
            ratio=plan.ratio,
            top_k=min(config.index_topk, config.max_positions),
            pool_blocks=min(config.candidate_blocks, -(-config.max_positions // size)) if self._has_pool else 0,
            block_size=size if self._has_pool else 1,
            writes_pool=plan.has_candidates,
        )
        self._shape, self._index = shape, Index(library, shape)

    def publish(
        self, rows: Rows, inputs: tuple[Tensor, Tensor, Turn], published: Published, work: Work, *, is_fp32: bool
    ) -> None:
        """Replace the published picks, at the candidate source the kept blocks too; nothing at other layers.

        Args:
            rows: layout of the batch.
            inputs: the half's input [T, D], the normalised query latent [T, R], rotations of the rows.
            published: picks and kept blocks.
            work: counters.
            is_fp32: float32 scores, which PyTorch computes.
        """
        if not self._is_source:
            return
        u_TD, latent_TR, turn = inputs
        shape = self._shape
        query = None
        if max((segment.first + segment.count) // shape.ratio for segment in rows.segments) > shape.top_k:
            query = (self._q_b(latent_TR), self._head_weights(u_TD), *turn)
            if is_fp32:
                self._select_fp32(rows, query[0], query[1], turn, published, work)
                return
            query[1].mul_(self._scale)
        picked, pools, table = self._table(rows, published)
        scored = self._index(query, table)
        if scored:
            work.add_index(self._plan.id, scored)
        published.picked = picked
        if self._plan.has_candidates:
            published.blocks = pools

    def _table(self, rows: Rows, published: Published) -> tuple[list[Tensor], list[Tensor], np.ndarray]:
        shape = self._shape
        picked = self._outputs("picks", rows, shape.top_k)
        pools = self._outputs("pool", rows, shape.pool_blocks) if shape.writes_pool else published.blocks
        table = np.zeros((len(rows.segments), len(SEGMENT_FIELDS)), dtype=np.int64)
        for place, segment in enumerate(rows.segments):
            store = segment.state.store_of(self._plan.kv_source)
            _, _, codes, scales = store.planes
            blocks, per_block = store.block_rows
            table[place] = (
                *(segment.offset, segment.count, segment.first, codes.data_ptr(), scales.data_ptr()),
                *(0 if blocks is None else blocks.data_ptr(), per_block, picked[place].data_ptr()),
                pools[place].data_ptr() if self._has_pool else 0,
            )
        return picked, pools, table

    def _outputs(self, part: str, rows: Rows, width: int) -> list[Tensor]:
        """Return int64 [n, width] of every segment; it holds until the layer runs again."""
        layer_id, dtype = self._plan.id, torch.int64
        places = enumerate(rows.segments)
        return [self._rooms.tensor((part, layer_id, place), width, dtype).of(one.count) for place, one in places]

    def _select_fp32(
        self, rows: Rows, q: Tensor, head_weights: Tensor, turn: Turn, published: Published, work: Work
    ) -> None:
        config = self._config
        rounded = fake_q4i(rotate(q.view(-1, config.index_heads, config.index_head_dim), *turn))
        query = QueryRows(rounded, head_weights.float() * self._scale)
        select(self._plan, config, rows, query, published, work, is_fp32=True)
