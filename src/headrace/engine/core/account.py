"""What a forward pass computes, reads and writes for one request: arithmetic on positions, no tensors.

The counts are those of `models.deepseek_v41.batch.Work` for the same rows (a test holds them together), by request and
with bytes. Cheap enough to be always on.
"""

from dataclasses import dataclass

import numpy as np

from headrace.cache.state_shape import StateShape
from headrace.engine.core.trace import RowCounts
from headrace.kernels.block_quant import Q8_GROUP
from headrace.models.deepseek_v41.architecture import Config
from headrace.models.deepseek_v41.plan import LayerPlan, build_plan


@dataclass(frozen=True, kw_only=True)
class Run:
    """Rows of one sequence in one forward pass: positions `start` .. `stop` - 1, `decoder_rows` in the decoder.

    `encoder_floor` and `decoder_floor` are the first positions their windows may look at; entries of tokens below
    `write_from` are not stored.
    """

    start: int
    stop: int
    decoder_rows: int
    encoder_floor: int = 0
    decoder_floor: int = 0
    write_from: int = 0


Positions = range | np.ndarray
_FEW = 8


def _positions(first: int, stop: int) -> Positions:
    """Return the positions of rows: plain numbers where they are few, as in decode."""
    return range(first, stop) if stop - first <= _FEW else np.arange(first, stop)


@dataclass(frozen=True)
class _Kind:
    """Layers that take the same: `pool` is blocks kept and entries of a block, None where every entry is scored."""

    layer_ids: tuple[int, ...]
    is_decoder: bool
    ratio: int
    selects: bool
    stores: bool
    pool: tuple[int, int] | None


def _kinds(config: Config) -> list[_Kind]:
    size, source = config.candidate_block_size, config.candidate_source
    pool = (min(config.candidate_blocks, -(-config.max_positions // size)), size) if size else None
    found: dict[tuple[object, ...], list[LayerPlan]] = {}
    for plan in build_plan(config):
        if not plan.is_draft:
            has_pool = source is not None and plan.role == "reindex" and plan.id > source
            found.setdefault((plan.half, plan.ratio, plan.role, has_pool), []).append(plan)
    return [
        _Kind(
            layer_ids=tuple(plan.id for plan in plans),
            is_decoder=half == "decoder",
            ratio=plans[0].ratio,
            selects=role in {"full", "reindex"},
            stores=role == "full",
            pool=pool if has_pool else None,
        )
        for (half, _, role, has_pool), plans in found.items()
    ]


class Accountant:
    """Knows a model's layers and row sizes; holds nothing that changes."""

    def __init__(self, config: Config, shape: StateShape, ngram_bytes_per_token: int) -> None:
        self._kinds = _kinds(config)
        self._window = config.window
        self._window_row = shape.head_dim + shape.head_dim // Q8_GROUP
        self._entry = shape.head_dim // 2 + shape.head_dim // 16
        self._key = shape.index_head_dim // 2 + shape.index_head_dim // 32
        self._ngram = ngram_bytes_per_token
        self._slots = min(config.index_topk, config.max_positions)

    def count(self, run: Run) -> RowCounts:
        """Return the counts of one run."""
        counts = RowCounts()
        for kind in self._kinds:
            is_decoder = kind.is_decoder
            first = run.stop - run.decoder_rows if is_decoder else run.start
            floor = run.decoder_floor if is_decoder else run.encoder_floor
            if first < run.stop:
                self._count_layers(kind, _positions(first, run.stop), floor, counts)
            if kind.stores:
                self._count_stored(kind, run, counts)
        rows = run.stop - run.start
        counts.producer_rows += rows - run.decoder_rows
        counts.ngram_bytes += self._ngram * rows
        counts.reencoded_rows += max(0, min(run.stop, run.write_from) - run.start)
        return counts

    def _count_layers(self, kind: "_Kind", rows: Positions, floor: int, counts: RowCounts) -> None:
        """Add what layers of one kind take: the same for each."""
        layers, count = len(kind.layer_ids), len(rows)
        counts.layer_rows += layers * count
        counts.window_bytes_written += layers * count * self._window_row
        seen, visible, taken, scored = (self._sums if isinstance(rows, range) else self._array_sums)(kind, rows, floor)
        counts.window_bytes += layers * seen * self._window_row
        if not kind.ratio:
            return
        counts.global_bytes += layers * taken * self._entry
        if not kind.selects:
            return
        counts.index_scored += layers * scored
        for layer_id in kind.layer_ids:
            counts.index_scored_by_layer[layer_id] = scored
        counts.index_skipped += layers * (visible - scored)
        counts.index_bytes += layers * scored * self._key

    def _sums(self, kind: "_Kind", rows: Positions, floor: int) -> tuple[int, int, int, int]:
        """Return window rows, visible entries, those taken and those scored of a layer, over a few rows.

        A row's index scores nothing where all entries are taken, else all, or those of the pool.
        """
        window, slots, ratio, pool = self._window, self._slots, kind.ratio, kind.pool
        seen = total = taken = scored = 0
        for row in rows:
            held = row + 1 - floor
            seen += held if held < window else window
            if not ratio:
                continue
            visible = (row + 1) // ratio
            total += visible
            taken += visible if visible < slots else slots
            if pool is not None and visible > max(pool[0] * pool[1], slots):
                scored += (pool[0] - 1) * pool[1] + (visible - 1) % pool[1] + 1  # the newest block is kept, maybe open
            elif visible > slots:
                scored += visible
        return seen, total, taken, scored

    def _array_sums(self, kind: "_Kind", rows: Positions, floor: int) -> tuple[int, int, int, int]:
        """Return the same over many rows."""
        rows = np.asarray(rows)
        seen = int(np.minimum(rows + 1 - floor, self._window).sum())
        if not kind.ratio:
            return seen, 0, 0, 0
        visible = (rows + 1) // kind.ratio
        scored = np.where(visible > self._slots, visible, 0)
        if kind.pool is not None:
            count, size = kind.pool
            pool = (count - 1) * size + (visible - 1) % size + 1
            scored = np.where(visible > max(count * size, self._slots), pool, scored)
        return seen, int(visible.sum()), int(np.minimum(visible, self._slots).sum()), int(scored.sum())

    def _count_stored(self, kind: "_Kind", run: Run, counts: RowCounts) -> None:
        low = max(run.start, run.write_from) // kind.ratio
        stored = len(kind.layer_ids) * max(0, run.stop // kind.ratio - low)
        counts.global_bytes_written += stored * (self._entry + self._key)
