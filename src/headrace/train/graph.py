"""Forward pass over whole documents with gradients: the layers of the cached path, without caches between steps.

Documents are laid out one after the other; windows, compression groups, index visibility, n-grams and positions start
anew in each. The decoder runs on all of a document, or on segments of it whose windows begin at a replay start
(training.md section 5.2): `Segment` below.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace.core.errors import UserError
from headrace.kernels.block_quant import fake_q4i, fake_q4k, fake_q8
from headrace.kernels.ngram_gate import inject
from headrace.kernels.product import linear, linear_fp32, pad_columns
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.route_topk import Routes
from headrace.kernels.stream_mix import Mixes, collapse
from headrace.memory.addressing import Addressing
from headrace.models.deepseek_v41 import batch
from headrace.models.deepseek_v41.attention import Frequencies, LayerAttention, Projected, Rounding
from headrace.models.deepseek_v41.batch import Rows, Work
from headrace.models.deepseek_v41.block import Finished, Router, finish_layer, half_input, live_router, open_streams
from headrace.models.deepseek_v41.parameters import LayerWeights, MoeWeights
from headrace.models.deepseek_v41.plan import build_plan
from headrace.models.deepseek_v41.selection import Published
from headrace.train.document_state import DocumentState, GraphStore
from headrace.train.layers import LayerBuilder
from headrace.train.masters import Masters
from headrace.train.quantise import QuantPlan, choose, fake_rows

if TYPE_CHECKING:
    from headrace.cache.sequence_state import SequenceState


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Activations by the name of a recipe's numerics."""


@dataclass(frozen=True)
class Segment:
    """Decoder rows `low` .. `high` - 1 of a document; their windows reach back to `floor` at most."""

    low: int
    high: int
    floor: int = 0


@dataclass(frozen=True)
class Document:
    """One document: token ids [n] int64, n > 0, and the decoder's segments (None: the decoder runs on all of it).

    Segments may overlap; each has windows of its own, so its floor is its first row.
    """

    token_ids: np.ndarray
    segments: tuple[Segment, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what no pass could run.

        Raises:
            UserError: there are no tokens or no segments, or a segment lies outside or its floor elsewhere.
        """
        count = len(self.token_ids)
        if count == 0 or self.segments == ():
            raise UserError("a document to train on needs at least one token and one decoder segment")
        for one in self.segments or ():
            if not (0 <= one.low < one.high <= count and one.floor == one.low):
                raise UserError(
                    f"{one} does not fit a document of {count} tokens; rows from 0 to {count}, low < high, and a floor "
                    "equal to low are accepted"
                )


@dataclass(frozen=True)
class LayerRecord:
    """What the index loss needs of one layer: the attention input, queries and window entries of its rows."""

    rows: Rows
    u_TD: Tensor
    projected: Projected


@dataclass
class GraphOutput:
    """Result of a pass over documents.

    `hidden_TD` [T, D] are the normalised final states of the decoder's rows, laid out as `rows`; `taps` one [T, D] per
    tapped layer; `routes` one per MoE layer, in order; `records` per layer with global attention, if asked for;
    `published` [n, K] picks per index source and segment, `pools` [n, B] candidate blocks per decoder segment (see
    `Published`); `documents` the states that hold each document's global entries.
    """

    hidden_TD: Tensor
    rows: Rows
    taps: list[Tensor]
    routes: list[Routes]
    records: dict[int, LayerRecord]
    published: dict[int, list[Tensor]]
    pools: list[Tensor]
    documents: list[DocumentState]
    layers: list[LayerWeights]
    head: Tensor = field(repr=False)

    def logits(self, hidden_TD: Tensor | None = None) -> Tensor:
        """Return logits [T, V] in float32 of all rows or of given ones."""
        hidden = self.hidden_TD if hidden_TD is None else hidden_TD
        return linear_fp32(hidden, pad_columns(self.head), self.head.shape[0])


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """How to run a pass.

    `dtype` of activations, `quant` active quantisers, `has_records` keeps what the index loss needs,
    `has_checkpoints` recomputes the expert half of every layer in the backward pass instead of keeping it.
    """

    dtype: torch.dtype = torch.float32
    quant: QuantPlan = field(default_factory=QuantPlan)
    is_fp32_index: bool = False
    has_records: bool = False
    has_checkpoints: bool = False


class TrainGraph:
    """Runs master parameters over documents. Holds no parameters and no state between passes."""

    def __init__(self, masters: Masters, addressing: Addressing | None) -> None:
        self.masters = masters
        self.config = masters.config
        self.addressing = addressing
        self.plan = build_plan(self.config)
        device = next(iter(masters.parameters.values())).device
        self.frequencies = Frequencies.build(self.config, device)

    def forward(
        self, documents: Sequence[Document], options: GraphOptions, router: Router | None = None
    ) -> GraphOutput:
        """Run all layers.

        Args:
            documents: at least one.
            options: see `GraphOptions`.
            router: chooses experts; None routes live (see `RouteSource` for recorded choices).

        Returns:
            A `GraphOutput`.

        Numerics: in each document the same bits as the cached path in full mode on the same weights and numerics.
        """
        run = _Run(self, documents, options, router or live_router(self.config.experts_per_token, self.config))
        for plan in self.plan[: self.config.num_layers]:
            run.layer(plan.id)
        return run.output()


class _Run:
    """One pass while it runs."""

    def __init__(self, graph: TrainGraph, documents: Sequence[Document], options: GraphOptions, router: Router) -> None:
        config, quant = graph.config, options.quant
        self._graph, self._config, self._options = graph, config, options
        self._router = router
        self._documents = documents
        self._builder = LayerBuilder(graph.masters, quant, options.dtype)
        self._rounding = Rounding(
            choose(quant.inputs, fake_q8), choose(quant.window, fake_q8), choose(quant.index, fake_q4i)
        )
        self._states = [self._state(quant) for _ in documents]
        self._rows = self._all_rows()
        ids = torch.from_numpy(np.concatenate([document.token_ids for document in documents]))
        x = torch.nn.functional.embedding(ids, self._builder.stored("embed.weight"))
        self._x = x.unsqueeze(1).expand(-1, config.num_streams, -1).contiguous()
        self._pre = torch.zeros(
            (len(ids), config.num_streams), dtype=torch.float64 if self._is_double else torch.float32
        )
        self._pre[:, 0] = 1.0
        self._ngram_ids = self._row_ids()
        self._published = Published()
        self._work = Work()
        self._taps: list[Tensor] = []
        self._routes: list[Routes] = []
        self._records: dict[int, LayerRecord] = {}
        self._picked: dict[int, list[Tensor]] = {}
        self._layers: list[LayerWeights] = []

    @property
    def _is_double(self) -> bool:
        return self._options.dtype == torch.float64

    def _state(self, quant: QuantPlan) -> DocumentState:
        kv, index = choose(quant.global_kv, fake_q4k), choose(quant.index, fake_q4i)
        config, dtype = self._config, self._options.dtype
        widths = (config.head_dim, config.index_head_dim)
        empty = [torch.zeros((0, width), dtype=dtype, device=self._graph.frequencies.plain.device) for width in widths]
        stores = {s: GraphStore(config.compress_ratios[s], kv, index, *empty) for s in config.kv_sources}
        return DocumentState(stores, config.cut)

    def _all_rows(self) -> Rows:
        segments, positions, offset = [], [], 0
        for document, state in zip(self._documents, self._states, strict=True):
            count = len(document.token_ids)
            segments.append(batch.Segment(cast("SequenceState", state), 0, count, offset))
            positions.append(torch.arange(count))
            offset += count
        return Rows(tuple(segments), torch.cat(positions), None)

    def _row_ids(self) -> np.ndarray | None:
        addressing = self._graph.addressing
        if addressing is None:
            return None
        parts = []
        for document in self._documents:
            ids = addressing.compress(document.token_ids)
            parts.append(addressing.row_ids(addressing.history(ids, addressing.fresh())))
        return np.concatenate(parts)

    def layer(self, layer_id: int) -> None:
        """Run one layer."""
        config = self._config
        plan = self._graph.plan[layer_id]
        weights = self._builder.layer(plan, f"layers.{layer_id}")
        self._layers.append(weights)
        if plan.has_ngram:
            self._inject(layer_id)
        attention = LayerAttention(weights, config, self._graph.frequencies, self._rounding)
        has_produced = False
        if layer_id == config.cut and any(document.segments is not None for document in self._documents):
            attention.produce(self._rows, half_input(self._x, self._pre, weights.attn_norm, config))
            has_produced = True
            self._keep_segments()
        if config.draft and layer_id in config.draft.tap_layers:
            self._taps.append(self._x.float().mean(1).to(self._x.dtype))
        self._x, u_TD, attn_mix = open_streams(self._x, self._pre, weights.attn_mix, weights.attn_norm, config)
        if plan.role == "full" and not has_produced:
            attention.produce(self._rows, u_TD)
        out_TD = attention.run(
            self._rows,
            u_TD,
            self._published,
            self._work,
            is_fp32_index=self._options.is_fp32_index,
            on_projected=lambda projected: self._record(layer_id, u_TD, projected),
        )
        if weights.indexer is not None:
            self._picked[layer_id] = self._published.picked
        done = self._finish(weights, attn_mix, out_TD)
        self._x, self._pre = done.x_TMD, done.pre_TM

    def _record(self, layer_id: int, u_TD: Tensor, projected: Projected) -> None:
        if self._options.has_records and self._graph.plan[layer_id].ratio:
            detached = Projected(projected.latent8.detach(), projected.q_TQH.detach(), projected.window_TH.detach())
            self._records[layer_id] = LayerRecord(self._rows, u_TD.detach(), detached)

    def _finish(self, weights: LayerWeights, attn_mix: Mixes, out_TD: Tensor) -> Finished:
        chosen: list[Routes] = []
        x_TMD = self._x  # held here: a recomputation in the backward pass comes when `self._x` is another layer's

        def choose_and_keep(u_TD: Tensor, moe: MoeWeights, is_image: Tensor | None) -> Routes:
            routes = self._router(u_TD, moe, is_image)
            chosen.append(routes)
            return routes

        def finish() -> Finished:
            return finish_layer(
                weights,
                x_TMD,
                attn_mix,
                out_TD,
                None,
                router=choose_and_keep,
                config=self._config,
                quantise=self._rounding.inputs,
            )

        done = finish() if not self._options.has_checkpoints else self._recomputed(finish)
        self._routes.append(chosen[0])  # a recomputation in the backward pass adds more; they are not counted
        return done

    def _recomputed(self, finish: Callable[[], Finished]) -> Finished:
        """Run a layer's second part without keeping its intermediate values."""

        def tensors() -> tuple[Tensor, ...]:
            done = finish()
            return done.x_TMD, done.pre_TM, done.ffn_in, done.ffn_out

        return Finished(*checkpoint(tensors, use_reentrant=False))

    def _inject(self, layer_id: int) -> None:
        if self._ngram_ids is None or self._graph.addressing is None:
            return
        place = self._graph.addressing.layer_ids.index(layer_id)
        prefix = f"layers.{layer_id}.engram"
        table = self._graph.masters.parameters[f"{prefix}.embed.weight"]
        ids = torch.from_numpy(self._ngram_ids[:, place])
        looked_up = choose(self._options.quant.tables, fake_rows)(torch.nn.functional.embedding(ids, table))
        kv = linear(
            self._rounding.inputs(looked_up.to(self._options.dtype).flatten(1)), self._builder.dense(f"{prefix}.wkv")
        )
        gains = [self._builder.wide(f"{prefix}.{part}_weight") for part in ("q", "k")]
        is_dead = torch.zeros(self._rows.count, dtype=torch.bool)
        self._x = inject(self._x, kv, gains[0], gains[1], is_dead, self._config.norm_eps)

    def _keep_segments(self) -> None:
        """Go on with the decoder segments of every document."""
        segments, kept, offset = [], [], 0
        for place, document in enumerate(self._documents):
            whole = (Segment(0, len(document.token_ids)),)
            for part in document.segments if document.segments is not None else whole:
                state = self._states[place].segment(part.floor)
                count = part.high - part.low
                segments.append(batch.Segment(cast("SequenceState", state), part.low, count, offset))
                start = self._rows.segments[place].offset
                kept.append(torch.arange(start + part.low, start + part.high))
                offset += count
        index = torch.cat(kept)
        self._rows = Rows(tuple(segments), self._rows.positions[index], None)
        # `index_select`, not an index: its gradient has one order of additions for rows of several segments
        self._x, self._pre = self._x.index_select(0, index), self._pre.index_select(0, index)
        self._taps = [tap.index_select(0, index) for tap in self._taps]
        if self._ngram_ids is not None:
            self._ngram_ids = self._ngram_ids[index.numpy()]

    def output(self) -> GraphOutput:
        """Collapse the streams and return everything."""
        norm = self._builder.wide("norm.weight")
        return GraphOutput(
            hidden_TD=rms_norm(collapse(self._x, self._pre), norm, self._config.norm_eps),
            rows=self._rows,
            taps=self._taps,
            routes=self._routes,
            records=self._records,
            published=self._picked,
            pools=self._published.blocks,
            documents=self._states,
            layers=self._layers,
            head=self._builder.wide("head.weight"),
        )
