"""Index side of one layer: scores, top-k and candidate pool, per sequence of the batch.

Rows that see few entries take them all without a score. The rest scan every visible entry (KV sources, and reindex
layers while the pool still holds everything) or only the entries of candidate blocks.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.cache.entry_store import EntryStore
from headrace.kernels.index_topk import IndexQuery, all_visible, rescan, scan
from headrace.models.deepseek_v41.batch import Rows, Segment, Work
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.plan import LayerPlan


@dataclass
class Published:
    """What index sources hand to later layers in one pass: picks and kept blocks per segment.

    `picked[i]` is [n, K] int64, -1 padded; `blocks[i]` is [n, B] int64, where row -1 everywhere means that the pool
    holds every entry. Replaced as a whole by each index source; `blocks` only by the candidate source.
    """

    picked: list[Tensor] = field(default_factory=list)
    blocks: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class QueryRows:
    """Index queries of a flat batch: `q_TJI` bfloat16 in FP4 values, `weights_TJ` bfloat16."""

    q_TJI: Tensor
    weights_TJ: Tensor


def select(
    plan: LayerPlan, config: Config, rows: Rows, query: QueryRows, published: Published, work: Work, is_fp32: bool
) -> None:
    """Pick entries for every row of an index source and publish them.

    State: replaces `published.picked`, at the candidate source also `published.blocks`; adds to `work`.
    Source: spec section 3.6.
    """
    picked, blocks = [], []
    use_pool = config.candidate_source is not None and plan.role == "reindex" and plan.id > config.candidate_source
    for place, segment in enumerate(rows.segments):
        visible = torch.div(rows.positions[segment.rows] + 1, plan.ratio, rounding_mode="floor")
        one = IndexQuery(query.q_TJI[segment.rows], query.weights_TJ[segment.rows], visible, is_fp32)
        store = segment.state.store_of(plan.kv_source)
        pool = published.blocks[place] if use_pool else None
        found = _select_segment(plan, config, segment, one, store, pool, work)
        picked.append(found[0])
        blocks.append(found[1])
    published.picked = picked
    if plan.has_candidates:
        published.blocks = blocks


def _rows_up_to(visible: Tensor, limit: int) -> int:
    return int(torch.searchsorted(visible, limit, right=True))


def _select_segment(
    plan: LayerPlan,
    config: Config,
    segment: Segment,
    query: IndexQuery,
    store: EntryStore,
    pool: Tensor | None,
    work: Work,
) -> tuple[Tensor, Tensor]:
    """Return picks [n, K] and kept blocks [n, B] of one segment."""
    size = config.candidate_block_size
    # as many slots as there can be entries: a configuration may allow more
    top_k = min(config.index_topk, config.max_positions)
    count = min(config.candidate_blocks, -(-config.max_positions // size))
    visible = query.visible_T
    blocks = visible.new_full((segment.count, count if plan.has_candidates else 0), -1)
    easy = _rows_up_to(visible, top_k)
    has_pool = plan.has_candidates or pool is not None
    open_rows = max(easy, _rows_up_to(visible, count * size)) if has_pool else segment.count
    parts = [all_visible(visible[:easy], top_k)]
    if easy < open_rows:
        parts.append(scan(query.rows(easy, open_rows), store.index_keys, top_k=top_k).picked_TK)
        work.add_index(plan.id, int(visible[easy:open_rows].sum()))
    if open_rows < segment.count:
        rest = query.rows(open_rows, segment.count)
        if pool is None:
            found = scan(rest, store.index_keys, top_k=top_k, candidate_blocks=count, block_size=size)
            parts.append(found.picked_TK)
            if found.blocks_TB is not None:
                blocks[open_rows:] = found.blocks_TB
            work.add_index(plan.id, int(rest.visible_T.sum()))
        else:
            kept = pool[open_rows:]
            parts.append(rescan(rest, kept, store.gather_index_keys, top_k=top_k, block_size=size))
            work.add_index(plan.id, _entries_in(kept, rest.visible_T, size))
    return torch.cat(parts), blocks


def _entries_in(blocks_TB: Tensor, visible_T: Tensor, size: int) -> int:
    """Count the visible entries of kept blocks."""
    left = visible_T.unsqueeze(1) - blocks_TB * size
    return int(torch.where(blocks_TB >= 0, left.clamp(0, size), 0).sum())
