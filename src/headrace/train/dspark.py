"""Training of the DSpark draft blocks on a frozen backbone.

For an anchor position p of a document the drafter sees the backbone's taps up to p and the token at p + 1, and drafts
the tokens at p + 2 onwards in one block; the backbone's own next-token distributions at p + 1 onwards are the target.
Read `models/deepseek_v41/draft.py` for the serving side of the same block.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from headrace.core.errors import UserError
from headrace.kernels.block_quant import fake_q4i, fake_q8
from headrace.kernels.precision import widen
from headrace.kernels.product import linear, linear_fp32, pad_columns
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.rope import rotation
from headrace.kernels.stream_mix import collapse
from headrace.models.deepseek_v41.attention import Rounding, Turn, project, project_output, window_entries
from headrace.models.deepseek_v41.block import finish_layer, half_input, half_mixes, live_router
from headrace.models.deepseek_v41.parameters import LayerWeights
from headrace.train.graph import Document, GraphOptions, TrainGraph
from headrace.train.layers import LayerBuilder
from headrace.train.masters import Masters
from headrace.train.quantise import QuantPlan, choose

if TYPE_CHECKING:
    from headrace.models.deepseek_v41.config import Config, Draft


@dataclass(frozen=True, kw_only=True)
class DraftLossWeights:
    """Weights of the draft losses (training.md section 7.2); `decay` is the constant of exp(-k / decay)."""

    cross_entropy: float = 0.1
    variation: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


@dataclass(frozen=True)
class Anchors:
    """Anchor positions [A] of one document; each needs `block_size` + 1 tokens after it."""

    document: int
    positions: np.ndarray


@dataclass(frozen=True)
class DraftLoss:
    """Loss of a batch of anchors.

    `total` is differentiable; `cross_entropy`, `variation` and `confidence` are its weighted means as numbers.
    `logits_AX` [A, X] float32 raw confidences and `acceptance_AX` [A, X] = 1 - total variation, detached, are what
    calibration is fitted on.
    """

    total: Tensor
    cross_entropy: float
    variation: float
    confidence: float
    logits_AX: Tensor
    acceptance_AX: Tensor


def sample_anchors(documents: Sequence[Document], per_document: int, block_size: int, seed: int) -> list[Anchors]:
    """Draw anchors without repetition from every document long enough; the same seed draws the same."""
    drawn = []
    for place, document in enumerate(documents):
        last = len(document.token_ids) - block_size - 1
        if last <= 0:
            continue
        generator = np.random.default_rng((seed, place))
        positions = generator.choice(last, size=min(per_document, last), replace=False)
        drawn.append(Anchors(place, np.sort(positions).astype(np.int64)))
    return drawn


def backbone_digest(masters: Masters) -> str:
    """Return a hash of every parameter and buffer outside the draft module, to show that training left them alone."""
    digest = hashlib.sha256()
    for name, tensor in sorted({**masters.parameters, **masters.buffers}.items()):
        if not name.startswith("mtp."):
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class DraftTrainer:
    """Computes draft losses. Holds no optimizer; parameters under `mtp.` get gradients and nothing else does."""

    def __init__(self, graph: TrainGraph, weights: DraftLossWeights | None = None) -> None:
        config = graph.config
        if config.draft is None:
            raise UserError("the configuration has no draft module to train (num_nextn_predict_layers is 0)")
        self._graph = graph
        self._config: Config = config
        self._draft: Draft = config.draft
        self._weights = weights or DraftLossWeights()
        self._router = live_router(config.draft.experts_per_token, config)

    def loss(self, documents: Sequence[Document], anchors: Sequence[Anchors], options: GraphOptions) -> DraftLoss:
        """Run the frozen backbone once and the draft block at every anchor.

        Raises:
            UserError: there is no anchor.
        """
        if not anchors:
            raise UserError(f"no document has more than {self._draft.block_size + 1} tokens, so nothing can be drafted")
        with torch.no_grad():
            output = self._graph.forward(documents, options)
            taps = torch.cat(output.taps, 1)
        builder = LayerBuilder(self._graph.masters, options.quant, options.dtype)
        rows, positions, window = self._gather_rows(documents, anchors)
        block = self._draft.block_size
        with torch.no_grad():
            targets = output.logits(output.hidden_TD[rows.unsqueeze(1) + torch.arange(1, block + 1)].flatten(0, 1))
        ids = torch.from_numpy(np.concatenate([document.token_ids for document in documents]))
        known = ids[rows.unsqueeze(1) + torch.arange(1, block + 2)]  # [A, X + 1]: token at p + 1 and the drafted ones
        y = self._blocks(builder, options, taps, rows, positions, window, known[:, 0])
        return self._losses(builder, y, known, targets.unflatten(0, (-1, block)), output.head)

    def _gather_rows(self, documents: Sequence[Document], anchors: Sequence[Anchors]) -> tuple[Tensor, Tensor, Tensor]:
        """Return flat rows [A], positions [A] and context rows [A, W] (-1 before the document's start)."""
        offsets = np.cumsum([0] + [len(document.token_ids) for document in documents])
        positions = torch.from_numpy(np.concatenate([one.positions for one in anchors]))
        starts = torch.from_numpy(
            np.concatenate([np.full(len(one.positions), offsets[one.document], dtype=np.int64) for one in anchors])
        )
        back = positions.unsqueeze(1) - torch.arange(self._config.window - 1, -1, -1)
        return starts + positions, positions, torch.where(back >= 0, back + starts.unsqueeze(1), -1)

    def _blocks(
        self,
        builder: LayerBuilder,
        options: GraphOptions,
        taps: Tensor,
        rows: Tensor,
        positions: Tensor,
        window: Tensor,
        known: Tensor,
    ) -> Tensor:
        """Return the hidden states [A, X, D] of every block, before the final norm."""
        config, draft = self._config, self._draft
        rounding = _rounding(options.quant)
        used, place = torch.unique(window[window >= 0], return_inverse=True)
        slots = torch.full(window.shape, -1)
        slots[window >= 0] = place
        main = linear(rounding.inputs(taps[used]), builder.dense("mtp.0.main_proj"))
        main8 = rounding.inputs(rms_norm(main, builder.wide("mtp.0.main_norm.weight"), config.norm_eps))
        offset = positions - rows  # position of a flat row in its document
        context_positions = used + _row_offsets(used, window, offset)
        embed = builder.stored("embed.weight").detach()
        ids = torch.full((len(rows), draft.block_size), draft.noise_token_id)
        ids[:, 0] = known
        x = functional.embedding(ids, embed).flatten(0, 1).unsqueeze(1).expand(-1, config.num_streams, -1).contiguous()
        pre = torch.zeros((x.shape[0], config.num_streams), dtype=widen(x[:0]).dtype)
        pre[:, 0] = 1.0
        block_positions = (positions.unsqueeze(1) + 1 + torch.arange(draft.block_size)).flatten()
        turn = rotation(block_positions, self._graph.frequencies.plain)
        context_turn = rotation(context_positions, self._graph.frequencies.plain)
        first = config.num_layers
        for stage in range(draft.num_layers):
            layer = builder.layer(self._graph.plan[first + stage], f"mtp.{stage}")
            kv = linear(main8, layer.attention.q_a_kv[config.q_lora_rank :])
            context = window_entries(kv, layer.attention, context_turn, config.norm_eps, rounding)
            x, pre = self._block(layer, x, pre, context, slots, turn, rounding)
        return collapse(x, pre).unflatten(0, (-1, draft.block_size))

    def _block(
        self,
        layer: LayerWeights,
        x: Tensor,
        pre: Tensor,
        context: Tensor,
        slots: Tensor,
        turn: Turn,
        rounding: Rounding,
    ) -> tuple[Tensor, Tensor]:
        config, size = self._config, self._draft.block_size
        attn_mix = half_mixes(x, layer.attn_mix, config)
        u = half_input(x, pre, layer.attn_norm, config)
        projected = project(rounding.inputs(u), layer.attention, turn, config, rounding)
        entries = torch.cat([_rows(context, slots), projected.window_TH.unflatten(0, (-1, size))], 1)  # [A, W + X, H]
        hidden = functional.pad(slots < 0, (0, size))
        value = _attend_blocks(
            projected.q_TQH.unflatten(0, (-1, size)), entries, hidden, layer.attention.sink, config.head_dim**-0.5
        )
        out = project_output(value.flatten(0, 1), layer.attention, turn, config, rounding)
        done = finish_layer(layer, x, attn_mix, out, None, router=self._router, config=config, quantise=rounding.inputs)
        return done.x_TMD, done.pre_TM

    def _losses(
        self, builder: LayerBuilder, y_AXD: Tensor, known: Tensor, targets_AXV: Tensor, head: Tensor
    ) -> DraftLoss:
        config, draft, weights = self._config, self._draft, self._weights
        last = f"mtp.{draft.num_layers - 1}"
        hidden = rms_norm(y_AXD, builder.wide(f"{last}.norm.weight"), config.norm_eps).flatten(0, 1)
        base = linear_fp32(hidden, pad_columns(head.detach()), config.vocab_size)
        previous = functional.embedding(known[:, :-1].flatten(), builder.stored(f"{last}.markov_head.embed.weight"))
        bias = linear_fp32(previous, pad_columns(builder.wide(f"{last}.markov_head.head.weight")), config.vocab_size)
        logits = base + bias
        features = torch.cat([y_AXD.flatten(0, 1), previous], 1)
        confidence = linear_fp32(features, pad_columns(builder.wide(f"{last}.confidence_head.proj.weight")), 1)
        confidence = confidence.view(-1, draft.block_size)
        place = torch.arange(draft.block_size, dtype=logits.dtype)
        decay = torch.exp(-place / weights.decay).repeat(len(known))
        decay = decay / decay.sum()
        cross_entropy = (decay * functional.cross_entropy(logits, known[:, 1:].flatten(), reduction="none")).sum()
        variation_AX = (logits.softmax(-1) - targets_AXV.flatten(0, 1).softmax(-1)).abs().sum(-1)
        variation = (decay * variation_AX).sum()
        acceptance = 1.0 - 0.5 * variation_AX.detach()
        agreement = functional.binary_cross_entropy_with_logits(confidence.flatten(), acceptance, reduction="none")
        sure = (decay * agreement).sum()
        total = weights.cross_entropy * cross_entropy + weights.variation * variation + weights.confidence * sure
        return DraftLoss(
            total,
            cross_entropy.item(),
            variation.item(),
            sure.item(),
            confidence.detach(),
            acceptance.view(-1, draft.block_size),
        )


def _rows(table_NH: Tensor, slots_AS: Tensor) -> Tensor:
    """Return rows [A, S, H] of a table (-1 reads row 0); a gradient that no number of threads changes."""
    return table_NH.index_select(0, slots_AS.clamp_min(0).flatten()).view(*slots_AS.shape, -1)


def _rounding(quant: QuantPlan) -> Rounding:
    return Rounding(choose(quant.inputs, fake_q8), choose(quant.window, fake_q8), choose(quant.index, fake_q4i))


def _row_offsets(used: Tensor, window: Tensor, offset_A: Tensor) -> Tensor:
    """Return, for every used flat row, what turns it into a position of its document."""
    place = torch.searchsorted(used, window.clamp_min(0).flatten())
    result = torch.zeros_like(used)
    is_real = (window >= 0).flatten()
    result[place[is_real]] = offset_A.unsqueeze(1).expand_as(window).flatten()[is_real]
    return result


def _attend_blocks(q_AXQH: Tensor, entries_ASH: Tensor, hidden_AS: Tensor, sink_Q: Tensor, scale: float) -> Tensor:
    """Attend from every query of a block to its context and its whole block; returns [A, X, Q, H] as `q`."""
    entries = widen(entries_ASH)
    scores = torch.einsum("axqh,ash->axqs", widen(q_AXQH), entries) * scale
    scores = scores.masked_fill(hidden_AS[:, None, None, :], -math.inf)
    peak = scores.detach().amax(-1, keepdim=True)
    raw = torch.exp(scores - peak)
    total = raw.sum(-1, keepdim=True) + torch.exp(sink_Q.unsqueeze(-1) - peak)
    return (torch.einsum("axqs,ash->axqh", widen(raw.to(q_AXQH.dtype)), entries) / total).to(q_AXQH.dtype)
