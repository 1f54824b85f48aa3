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


class Accountant:
    """Knows a model's layers and row sizes; holds nothing that changes."""

    def __init__(self, config: Config, shape: StateShape, ngram_bytes_per_token: int) -> None:
        self._config = config
        self._layers = [plan for plan in build_plan(config) if not plan.is_draft]
        self._window_row = shape.head_dim + shape.head_dim // Q8_GROUP
        self._entry = shape.head_dim // 2 + shape.head_dim // 16
        self._key = shape.index_head_dim // 2 + shape.index_head_dim // 32
        self._ngram = ngram_bytes_per_token
        self._slots = min(config.index_topk, config.max_positions)

    def count(self, run: Run) -> RowCounts:
        """Return the counts of one run."""
        encoder = np.arange(run.start, run.stop)
        decoder = encoder[len(encoder) - run.decoder_rows :]
        counts = RowCounts()
        for plan in self._layers:
            is_decoder = plan.half == "decoder"
            rows = decoder if is_decoder else encoder
            self._count_layer(plan, rows, run.decoder_floor if is_decoder else run.encoder_floor, counts)
            if plan.role == "full":
                self._count_stored(plan, run, counts)
        counts.producer_rows += len(encoder) - len(decoder)
        counts.ngram_bytes += self._ngram * len(encoder)
        counts.reencoded_rows += max(0, min(run.stop, run.write_from) - run.start)
        return counts

    def _count_layer(self, plan: LayerPlan, rows: np.ndarray, floor: int, counts: RowCounts) -> None:
        count = len(rows)
        if not count:
            return
        counts.layer_rows += count
        counts.window_bytes_written += count * self._window_row
        counts.window_bytes += int(np.minimum(rows + 1 - floor, self._config.window).sum()) * self._window_row
        if not plan.ratio:
            return
        visible = (rows + 1) // plan.ratio
        counts.global_bytes += int(np.minimum(visible, self._slots).sum()) * self._entry
        if plan.role in {"full", "reindex"}:
            scored = int(self._scored(plan, visible).sum())
            counts.index_scored += scored
            counts.index_scored_by_layer[plan.id] = counts.index_scored_by_layer.get(plan.id, 0) + scored
            counts.index_skipped += int(visible.sum()) - scored
            counts.index_bytes += scored * self._key

    def _scored(self, plan: LayerPlan, visible: np.ndarray) -> np.ndarray:
        """Return the entries that each row's index scores: none where all are taken, else all, or those of the pool."""
        config = self._config
        scored = np.where(visible > self._slots, visible, 0)
        source = config.candidate_source
        if source is None or plan.role != "reindex" or plan.id <= source:
            return scored
        size = config.candidate_block_size
        count = min(config.candidate_blocks, -(-config.max_positions // size))
        pool = (count - 1) * size + (visible - 1) % size + 1  # the newest block is always kept and may be open
        return np.where(visible > max(count * size, self._slots), pool, scored)

    def _count_stored(self, plan: LayerPlan, run: Run, counts: RowCounts) -> None:
        low = max(run.start, run.write_from) // plan.ratio
        counts.global_bytes_written += max(0, run.stop // plan.ratio - low) * (self._entry + self._key)
