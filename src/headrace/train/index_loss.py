"""Teaches index sources to rank global entries as attention weighs them; nothing else gets a gradient from it.

V4.1's own objective is not published. This is the V3.2 one, KL(teacher || student) per query row, with the teacher of
a full softmax: window keys, global entries and the sink share one sum per head. A teacher over global entries alone
would give a head that looks at its window only as much say as one that looks far back. Source: training.md 2.4, 2.5.

The student is softmax of the index scores. Its inputs are detached, and index keys are made of detached latents, so
that only `wq_b`, `weights_proj` (of the source) and `wk`, `k_norm` (of the KV owner, from its full source and every
reindex source behind it) learn.
"""

from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels.block_quant import fake_q4i
from headrace.kernels.precision import widen
from headrace.kernels.product import linear, linear_fp32, pad_columns, pad_rows
from headrace.kernels.rope import rotate, rotation
from headrace.models.deepseek_v41.batch import Segment
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.parameters import IndexerWeights
from headrace.models.deepseek_v41.plan import LayerPlan
from headrace.train.data.draws import Draws
from headrace.train.document_state import DocumentState
from headrace.train.graph import GraphOptions, GraphOutput, LayerRecord, TrainGraph
from headrace.train.losses import ordered_sum
from headrace.train.quantise import choose

Pool = Literal["visible", "picked"]
_SCORES = 1 << 24  # attention scores computed at once


@dataclass(frozen=True, kw_only=True)
class IndexLossSettings:
    """Where student and teacher compete, and on how many rows.

    Attributes:
        pool: "visible" compares all entries that the source may pick from: every visible one, or those of the
            candidate pool where the source is restricted to it. "picked" compares the picked ones only.
        max_rows: query rows per source and pass, drawn without replacement; None takes all.
    """

    pool: Pool = "visible"
    max_rows: int | None = 128


@dataclass
class SourceLoss:
    """Loss of one index source over the rows looked at.

    Attributes:
        numerator: [] sum of divergences in nats, with gradient; zeros are present where `count` is 0.
        count: rows looked at.
        eligible: rows that could have been.
        sums: sums over those rows. Of the attention that the served layers would pay to all visible entries: `kept`
            is the share of the picked ones and `pool` that of the candidate pool; `recall` is the share of the best
            entries by unrestricted score that the pool holds. Without a pool the last two are 1 per row.
    """

    numerator: Tensor
    count: int
    eligible: int
    sums: dict[str, float] = field(default_factory=lambda: {"kept": 0.0, "pool": 0.0, "recall": 0.0})


def index_loss(
    graph: TrainGraph,
    output: GraphOutput,
    options: GraphOptions,
    settings: IndexLossSettings,
    key: tuple[int, ...],
) -> dict[int, SourceLoss]:
    """Return the loss of every index source of one pass.

    Args:
        graph: what made `output`.
        output: of a pass with `has_records`.
        options: those of the pass.
        settings: see `IndexLossSettings`.
        key: seed, step and place of the pass; together they decide the rows.

    Raises:
        InternalError: the pass kept no records.

    Numerics: float32 scores and softmax; the same bits for any number of threads.
    State: none.
    """
    found = {}
    for plan in graph.plan[: graph.config.num_layers]:
        if plan.index_source != plan.id:
            continue
        if plan.id not in output.records:
            raise InternalError(f"the pass kept no record of index source {plan.id}")
        draws = Draws(key[0], "index rows", *key[1:], plan.id)
        found[plan.id] = _Source(graph, output, options, settings, plan).loss(draws)
    return found


def first_eligible(config: Config, ratio: int) -> int:
    """Return the first position whose choice is not vacuous: it sees more entries behind its window than it picks."""
    return config.window + ratio * config.index_topk


@dataclass(frozen=True)
class _Rows:
    """Chosen rows of one segment, the one at `place`: `flat` [R] rows of the pass and their `positions` [R]."""

    place: int
    segment: Segment
    flat: Tensor
    positions: Tensor

    @property
    def local(self) -> Tensor:
        """Rows of the segment."""
        return self.flat - self.segment.offset

    @property
    def document(self) -> DocumentState:
        return cast("DocumentState", self.segment.state)

    def part(self, low: int, high: int) -> "_Rows":
        return _Rows(self.place, self.segment, self.flat[low:high], self.positions[low:high])


class _Source:
    """One index source of one pass."""

    def __init__(
        self,
        graph: TrainGraph,
        output: GraphOutput,
        options: GraphOptions,
        settings: IndexLossSettings,
        plan: LayerPlan,
    ) -> None:
        self._config, self._output, self._settings, self._plan = graph.config, output, settings, plan
        self._record = output.records[plan.id]
        self._quantise = choose(options.quant.index, fake_q4i)
        self._frequencies = graph.frequencies.of(plan)
        self._served = [one.id for one in graph.plan[: graph.config.num_layers] if one.index_source == plan.id]
        source = graph.config.candidate_source
        self._is_restricted = source is not None and plan.role == "reindex" and plan.id > source

    def loss(self, draws: Draws) -> SourceLoss:
        """Compare student and teacher on drawn rows."""
        positions = self._record.rows.positions
        eligible = torch.nonzero(positions >= first_eligible(self._config, self._plan.ratio)).squeeze(1)
        chosen, limit = eligible, self._settings.max_rows
        if limit is not None and len(eligible) > limit:
            drawn = torch.from_numpy(draws.distinct(len(eligible), limit)).to(eligible.device)
            chosen = eligible[drawn.sort().values]
        found = SourceLoss(self._untouched(), len(chosen), len(eligible))
        divergences = []
        for place, segment in enumerate(self._record.rows.segments):
            flat = chosen[(chosen >= segment.offset) & (chosen < segment.offset + segment.count)]
            rows = _Rows(place, segment, flat, positions[flat])
            step = self._rows_at_once(rows)
            divergences += [
                self._divergence(rows.part(low, low + step), found.sums) for low in range(0, len(flat), step)
            ]
        if divergences:
            found.numerator = found.numerator + ordered_sum(torch.cat(divergences))
        return found

    def _rows_at_once(self, rows: _Rows) -> int:
        entries = rows.document.store_of(self._plan.kv_source).length
        return max(1, _SCORES // max(1, self._config.num_heads * entries))

    @property
    def _weights(self) -> IndexerWeights:
        weights = self._output.layers[self._plan.id].indexer
        if weights is None:
            raise InternalError(f"layer {self._plan.id} selects without an indexer")
        return weights

    def _untouched(self) -> Tensor:
        """Return a zero whose gradient is zeros in everything the loss trains."""
        parts = [self._weights.q_b, self._weights.head_weights]
        owner = self._output.layers[cast("int", self._plan.kv_source)].compressor
        if owner is not None:
            parts += [owner.index_key, owner.index_key_norm]
        zero = widen(self._record.u_TD.new_zeros(()))
        for part in parts:
            zero = zero + widen(part[:0]).sum()
        return zero

    def _divergence(self, rows: _Rows, sums: dict[str, float]) -> Tensor:
        """Return KL(teacher || student) of rows of one segment, [R]; add to `sums`."""
        visible = torch.div(rows.positions + 1, self._plan.ratio, rounding_mode="floor")
        store = rows.document.store_of(self._plan.kv_source)
        num_entries = int(visible.max())
        is_visible = torch.arange(num_entries, device=visible.device) < visible.unsqueeze(1)
        is_picked = self._picked(rows, num_entries)
        is_candidate = self._candidates(rows, is_visible)
        scores = self._scores(rows, store.keys[:num_entries])
        is_pool = is_picked if self._settings.pool == "picked" else is_candidate
        with torch.no_grad():
            entries = widen(store.rows[:num_entries].detach())
            teacher, everywhere = self._teachers(rows, entries, [is_pool, is_visible])
            self._observe(scores.detach(), everywhere, is_visible, is_picked, is_candidate, sums)
        student = torch.log_softmax(scores.masked_fill(~is_pool, float("-inf")), 1)
        terms = teacher * (torch.log(teacher.clamp_min(1e-38)) - student.masked_fill(~is_pool, 0.0))
        return pad_rows(terms).sum(1)[: len(terms)]  # the library splits the sum of a single row between threads

    def _picked(self, rows: _Rows, num_entries: int) -> Tensor:
        """Return [R, C] bool, the entries that the source picked."""
        picked = self._output.published[self._plan.id][rows.place][rows.local]
        return _mark(picked, num_entries)

    def _candidates(self, rows: _Rows, is_visible: Tensor) -> Tensor:
        """Return [R, C] bool, the entries that the source may pick from."""
        if not self._is_restricted:
            return is_visible
        blocks = self._output.pools[rows.place][rows.local]
        size, num_entries = self._config.candidate_block_size, is_visible.shape[1]
        kept = _mark(blocks, -(-num_entries // size)).repeat_interleave(size, 1)[:, :num_entries]
        is_open = (blocks < 0).all(1, keepdim=True)  # the pool still holds everything
        return is_visible & (kept | is_open)

    def _scores(self, rows: _Rows, keys_CI: Tensor) -> Tensor:
        """Return index scores [R, C] with gradient."""
        config, weights = self._config, self._weights
        turn = rotation(rows.positions, self._frequencies)
        q = linear(self._record.projected.latent8[rows.flat], weights.q_b)
        q = self._quantise(rotate(q.unflatten(1, (config.index_heads, config.index_head_dim)), *turn))
        head_weights = widen(linear(self._record.u_TD[rows.flat], weights.head_weights))
        scale = config.index_head_dim**-0.5 * config.index_heads**-0.5
        dots = linear_fp32(q.flatten(0, 1), pad_columns(keys_CI), keys_CI.shape[0])
        dots = torch.relu(dots).unflatten(0, (-1, config.index_heads))
        return (dots * (head_weights * scale).unsqueeze(-1)).sum(1)

    def _teachers(self, rows: _Rows, entries_CH: Tensor, pools: list[Tensor]) -> list[Tensor]:
        """Return for each pool [R, C] the mean over served layers of their attention inside it, [R, C]."""
        totals = [torch.zeros_like(is_pool, dtype=entries_CH.dtype) for is_pool in pools]
        for layer_id in self._served:
            record, sink = self._output.records[layer_id], self._output.layers[layer_id].attention.sink.detach()
            scale = self._config.head_dim**-0.5
            q_RQH = widen(record.projected.q_TQH[rows.flat])
            far = linear_fp32(q_RQH.flatten(0, 1), pad_columns(entries_CH), len(entries_CH)) * scale
            far = far.unflatten(0, (-1, self._config.num_heads))
            near = self._near(rows, record, q_RQH) * scale
            for place, is_pool in enumerate(pools):
                totals[place] += attention_share(near, far, is_pool, sink)
        return [total / len(self._served) for total in totals]

    def _near(self, rows: _Rows, record: LayerRecord, q_RQH: Tensor) -> Tensor:
        """Return products with the window's keys [R, Q, W], -inf where there is none."""
        back = torch.arange(self._config.window, device=rows.positions.device)
        positions = rows.positions.unsqueeze(1) - back
        floor = max(rows.document.floor(self._plan.id), rows.segment.first)
        is_seen = positions >= floor
        place = torch.where(is_seen, positions - rows.segment.first + rows.segment.offset, rows.segment.offset)
        keys = widen(record.projected.window_TH[place])
        return torch.bmm(q_RQH, keys.transpose(1, 2)).masked_fill(~is_seen.unsqueeze(1), float("-inf"))

    def _observe(
        self,
        scores: Tensor,
        everywhere: Tensor,
        is_visible: Tensor,
        is_picked: Tensor,
        is_candidate: Tensor,
        sums: dict[str, float],
    ) -> None:
        """Add how well picks and pool cover what attention and unrestricted scores want."""
        best = scores.masked_fill(~is_visible, float("-inf")).topk(min(self._config.index_topk, scores.shape[1]), 1)
        sums["kept"] += float((everywhere * is_picked).sum())
        sums["pool"] += float((everywhere * is_candidate).sum())
        sums["recall"] += float(is_candidate.gather(1, best.indices).double().mean(1).sum())


def _mark(places: Tensor, count: int) -> Tensor:
    """Return [R, count] bool, True at the places [R, n] (-1 is none)."""
    marks = torch.zeros((places.shape[0], count + 1), dtype=torch.bool, device=places.device)
    return marks.scatter_(1, torch.where(places < 0, count, places), True)[:, :count]


def attention_share(near_RQW: Tensor, far_RQC: Tensor, is_pool_RC: Tensor, sink_Q: Tensor) -> Tensor:
    """Return what share of the attention that goes to a pool each of its entries gets, summed over heads.

    Args:
        near_RQW: [R, Q, W] scaled logits of window keys, -inf for none.
        far_RQC: [R, Q, C] scaled logits of global entries.
        is_pool_RC: [R, C] bool, the entries that take part in the softmax; at least one per row.
        sink_Q: [Q] logits of the sinks.

    Returns:
        [R, C], sums to 1 in every row, 0 outside the pool.

    Numerics: in logarithms, so that a row whose heads all look at their windows still has a teacher.
    """
    far = far_RQC.masked_fill(~is_pool_RC.unsqueeze(1), float("-inf"))
    sink = sink_Q.view(1, -1, 1).expand(far.shape[0], -1, 1).to(far.dtype)
    log_total = torch.logsumexp(torch.cat([near_RQW, far, sink], 2), 2, keepdim=True)
    return torch.softmax(torch.logsumexp(far - log_total, 1), 1)
