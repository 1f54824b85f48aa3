"""Attention of one layer over flat rows: projections, window rings, global entries, output projection."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.cache.entry_store import EntryStore
from headrace.kernels.block_quant import Quantiser, fake_q4i, fake_q8
from headrace.kernels.compress_pool import pool_pairs
from headrace.kernels.product import grouped_linear, linear, linear_fp32
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.rope import plain_frequencies, rotate, rotation, yarn_frequencies
from headrace.kernels.sparse_attention import SelectedEntries, WindowKeys, attend
from headrace.models.deepseek_v41.batch import Rows, Segment, Work
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.parameters import AttentionWeights, CompressorWeights, IndexerWeights, LayerWeights
from headrace.models.deepseek_v41.plan import LayerPlan
from headrace.models.deepseek_v41.selection import Published, QueryRows, select

Turn = tuple[Tensor, Tensor]
"""Cosines and sines [T, P / 2] of the rows' positions."""


@dataclass(frozen=True)
class Frequencies:
    """Rotary frequencies [P / 2] float32: `plain` for window-only layers, `compressed` (YaRN) for all others."""

    plain: Tensor
    compressed: Tensor

    @classmethod
    def build(cls, config: Config, device: torch.device) -> "Frequencies":
        """Compute both tables."""
        yarn = yarn_frequencies(
            config.rope_dim,
            config.compress_rope_theta,
            factor=config.yarn.factor,
            beta_fast=config.yarn.beta_fast,
            beta_slow=config.yarn.beta_slow,
            original_positions=config.yarn.original_positions,
        )
        return cls(plain_frequencies(config.rope_dim, config.rope_theta).to(device), yarn.to(device))

    def of(self, plan: LayerPlan) -> Tensor:
        """Return the layer's frequencies; queries, window keys, global keys and index keys of a layer share them."""
        return self.compressed if plan.ratio else self.plain


@dataclass(frozen=True)
class Projected:
    """Query side of one layer: `latent8` [T, R] normalised and Q8-rounded, `q_TQH` rotated, `window_TH` Q8 values."""

    latent8: Tensor
    q_TQH: Tensor
    window_TH: Tensor


@dataclass(frozen=True)
class Rounding:
    """Which quantisers act: on inputs of products, on window entries and on index queries. Serving runs with all."""

    inputs: Quantiser = fake_q8
    window: Quantiser = fake_q8
    index: Quantiser = fake_q4i


SERVED = Rounding()


def window_entries(kv_TH: Tensor, weights: AttentionWeights, turn: Turn, eps: float, rounding: Rounding) -> Tensor:
    """Return window entries [T, H] of projected rows [T, H]: normalised, rotated, Q8 values.

    Source: spec section 3.3, step 3.
    """
    return rounding.window(rotate(rms_norm(kv_TH, weights.kv_norm, eps), *turn))


def project(
    u8: Tensor, weights: AttentionWeights, turn: Turn, config: Config, rounding: Rounding = SERVED
) -> Projected:
    """Compute queries and window entries of Q8-rounded input [T, D]."""
    latent, kv = linear(u8, weights.q_a_kv).split([config.q_lora_rank, config.head_dim], 1)
    latent8 = rounding.inputs(rms_norm(latent, weights.q_norm, config.norm_eps))
    q = linear(latent8, weights.q_b).view(-1, config.num_heads, config.head_dim)
    return Projected(latent8, rotate(q, *turn), window_entries(kv, weights, turn, config.norm_eps, rounding))


def project_output(
    value_TQH: Tensor, weights: AttentionWeights, turn: Turn, config: Config, rounding: Rounding = SERVED
) -> Tensor:
    """De-rotate [T, Q, H] attention values and project them to [T, D].

    Source: spec section 3.3, steps 6 and 7; the grouped product's input is not quantised.
    """
    value = rotate(value_TQH, *turn, inverse=True).reshape(value_TQH.shape[0], config.o_groups, -1)
    return linear(rounding.inputs(grouped_linear(value, weights.o_a)), weights.o_b)


class LayerAttention:
    """Cached attention of one backbone layer. Holds weights and frequencies only; state belongs to the sequences."""

    def __init__(
        self, layer: LayerWeights, config: Config, frequencies: Frequencies, rounding: Rounding = SERVED
    ) -> None:
        self._plan = layer.plan
        self._rounding = rounding
        self._weights = layer.attention
        self._compressor = layer.compressor
        self._indexer = layer.indexer
        self._config = config
        self._frequencies = frequencies.of(layer.plan)

    def produce(self, rows: Rows, u_TD: Tensor) -> None:
        """Append the rows' global entries and index keys to their sequences' stores (KV sources only)."""
        if self._compressor is None:
            return
        gates = None
        if self._compressor.gate is None:
            values = linear(u_TD, self._compressor.kv)
        else:
            width = self._config.head_dim
            values = linear_fp32(u_TD, self._compressor.kv, width)
            gates = linear_fp32(u_TD, self._compressor.gate, width)
        for segment in rows.segments:
            store = segment.state.stores[self._plan.id]
            latent = self._latents(segment, values, gates, u_TD.dtype)
            self._store(store, self._compressor, latent)

    def _latents(self, segment: Segment, values: Tensor, gates: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the un-normalised latents [C, H] bfloat16 of the groups that the segment completes."""
        values = values[segment.rows]
        if gates is None:
            return values
        gates = gates[segment.rows]
        history = segment.state.pairs[self._plan.id]
        joined_values, joined_gates = values, gates
        if segment.first % 2:
            value, gate = history.read(segment.first - 1)
            joined_values, joined_gates = torch.cat([value, values]), torch.cat([gate, gates])
        history.store(segment.first, values, gates)
        pairs = joined_values.shape[0] // 2
        return pool_pairs(
            joined_values[: 2 * pairs].unflatten(0, (pairs, 2)),
            joined_gates[: 2 * pairs].unflatten(0, (pairs, 2)),
            dtype,
        )

    def _store(self, store: EntryStore, weights: CompressorWeights, latent: Tensor) -> None:
        if latent.shape[0] == 0:
            return
        latent = rms_norm(latent, weights.norm, self._config.norm_eps)
        first = store.length
        positions = torch.arange(first, first + latent.shape[0], device=latent.device) * store.ratio
        cos, sin = rotation(positions, self._frequencies)
        # detached: what teaches the index keys never moves the latent
        keys = rms_norm(linear(latent.detach(), weights.index_key), weights.index_key_norm, self._config.norm_eps)
        store.append(rotate(latent, cos, sin), rotate(keys, cos, sin))

    def run(
        self,
        rows: Rows,
        u_TD: Tensor,
        published: Published,
        work: Work,
        *,
        is_fp32_index: bool = False,
        on_projected: Callable[[Projected], object] | None = None,
    ) -> Tensor:
        """Attend from every row and return [T, D].

        Args:
            rows: layout of the batch.
            u_TD: [T, D] input of the half.
            published: picks of the current index source; replaced by index sources.
            work: counters to add to.
            is_fp32_index: index scores without the vendor's rounding.
            on_projected: shown the queries and window entries (training).

        State: stores window rows in the sequences' rings.
        """
        turn = rotation(rows.positions, self._frequencies)
        projected = project(self._rounding.inputs(u_TD), self._weights, turn, self._config, self._rounding)
        if on_projected is not None:
            on_projected(projected)
        if self._indexer is not None:
            with torch.no_grad():
                query = self._index_query(self._indexer, u_TD, projected.latent8, turn, is_fp32=is_fp32_index)
                select(self._plan, self._config, rows, query, published, work, is_fp32_index)
        values = [
            self._attend(segment, projected, published.picked[place] if self._plan.ratio else None)
            for place, segment in enumerate(rows.segments)
        ]
        return project_output(torch.cat(values), self._weights, turn, self._config, self._rounding)

    def _index_query(
        self, weights: IndexerWeights, u_TD: Tensor, latent8: Tensor, turn: Turn, *, is_fp32: bool
    ) -> QueryRows:
        """Return index queries and head weights; float32 scores do not round the scaled weights either."""
        config = self._config
        q = linear(latent8, weights.q_b).view(-1, config.index_heads, config.index_head_dim)
        head_weights = linear(u_TD, weights.head_weights)
        head_weights = head_weights.float() if is_fp32 else head_weights
        scale = config.index_head_dim**-0.5 * config.index_heads**-0.5
        return QueryRows(self._rounding.index(rotate(q, *turn)), head_weights * scale)

    def _attend(self, segment: Segment, projected: Projected, picked: Tensor | None) -> Tensor:
        config, state, layer_id = self._config, segment.state, self._plan.id
        ring, floor = state.rings[layer_id], state.floor(layer_id)
        new_rows = projected.window_TH[segment.rows]
        low = max(floor, segment.first - config.window + 1)
        held = new_rows if low >= segment.first else torch.cat([ring.read(low, segment.first), new_rows])
        keys = WindowKeys(held, min(low, segment.first), floor)
        selected = None
        if picked is not None:
            store = state.store_of(self._plan.kv_source)
            selected = SelectedEntries(picked, store.gather, store.taught)
        value = attend(
            projected.q_TQH[segment.rows],
            segment.first,
            keys,
            selected,
            self._weights.sink,
            window=config.window,
            scale=config.head_dim**-0.5,
        )
        ring.store(segment.first, new_rows)
        return value
