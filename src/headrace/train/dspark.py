"""Training of the DSpark draft blocks on a frozen backbone.

For an anchor position p of a document the drafter sees the backbone's taps up to p and the token at p + 1, and drafts
the tokens at p + 2 onwards in one block; the backbone's own next-token distributions at p + 1 onwards are the target.
Read `models/deepseek_v41/draft.py` for the serving side of the same block.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from headrace.kernels.route_topk import Routes
from headrace.kernels.stream_mix import collapse
from headrace.models.deepseek_v41.attention import Rounding, Turn, project, project_output, window_entries
from headrace.models.deepseek_v41.block import finish_layer, half_input, half_mixes, live_router
from headrace.models.deepseek_v41.parameters import LayerWeights, MoeWeights
from headrace.train.anchors import Anchors
from headrace.train.draft_recipe import DraftLossWeights
from headrace.train.graph import Document, GraphOptions, TrainGraph
from headrace.train.layers import LayerBuilder
from headrace.train.masters import Masters
from headrace.train.quantise import QuantPlan, choose

if TYPE_CHECKING:
    from headrace.models.deepseek_v41.config import Config, Draft


@dataclass(frozen=True)
class DraftLoss:
    """Loss of the anchors of one pass; with one denominator for a whole batch, parts add up over its passes.

    `total` is differentiable; `cross_entropy`, `variation` and `confidence` are its unweighted parts as numbers.
    `logits_AX` [A, X] float32 raw confidences with the corpus as earlier drafts, `acceptance_AX` [A, X] = 1 - total
    variation, detached.
    """

    total: Tensor
    cross_entropy: float
    variation: float
    confidence: float
    logits_AX: Tensor
    acceptance_AX: Tensor


@dataclass(frozen=True)
class DraftRun:
    """The draft blocks of one pass, before the heads.

    `hidden_AXD` before the final norm; `known_AK` [A, X + 1] ids of the document from p + 1 on; `targets_AXV` float32
    probabilities of the backbone for the drafted tokens; `routes` one per draft layer, rows anchor by anchor.
    """

    hidden_AXD: Tensor
    known_AK: Tensor
    targets_AXV: Tensor
    routes: list[Routes]
    head: Tensor
    builder: LayerBuilder


@dataclass(frozen=True)
class Drafts:
    """Greedy drafts as served, each choosing the next one's bias: ids [A, X], raw confidences [A, X] float32."""

    ids_AX: Tensor
    confidence_AX: Tensor


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

    def __init__(
        self, graph: TrainGraph, weights: DraftLossWeights | None = None, *, is_backbone_stored: bool = False
    ) -> None:
        """Take over a graph.

        Args:
            graph: the model, draft included.
            weights: of the losses.
            is_backbone_stored: the backbone's masters are what a checkpoint stores, so rounding them changes nothing
                and is left out.

        Raises:
            UserError: the configuration has no draft module.
        """
        config = graph.config
        if config.draft is None:
            raise UserError("the configuration has no draft module to train (num_nextn_predict_layers is 0)")
        self._graph = graph
        self._config: Config = config
        self._draft: Draft = config.draft
        self._weights = weights or DraftLossWeights()
        self._router = live_router(config.draft.experts_per_token, config)
        self._is_backbone_stored = is_backbone_stored

    def position_weights(self, anchors: Sequence[Anchors]) -> Tensor:
        """Return the weight [A, X] float32 of every drafted token: exp(-k / decay), 0 where it does not count."""
        valid = torch.from_numpy(np.concatenate([one.valid for one in anchors]))
        place = torch.arange(self._draft.block_size, dtype=torch.float32)
        return torch.exp(-place / self._weights.decay) * valid

    def loss(
        self,
        documents: Sequence[Document],
        anchors: Sequence[Anchors],
        options: GraphOptions,
        denominator: float | None = None,
    ) -> DraftLoss:
        """Run the frozen backbone once and the draft block at every anchor, and compare; see `run` and `judge`."""
        return self.judge(self.run(documents, anchors, options), anchors, denominator)

    def run(self, documents: Sequence[Document], anchors: Sequence[Anchors], options: GraphOptions) -> DraftRun:
        """Run the frozen backbone once and the draft block at every anchor.

        Raises:
            UserError: there is no anchor.
        """
        if not anchors:
            raise UserError(f"no document has more than {self._draft.block_size + 1} tokens, so nothing can be drafted")
        rows, positions, window = self._gather_rows(documents, anchors)
        with torch.no_grad():
            output = self._graph.forward(documents, self._backbone_options(options))
            taps = torch.cat(output.taps, 1)
            judged, place = torch.unique(
                rows.unsqueeze(1) + torch.arange(1, self._draft.block_size + 1), return_inverse=True
            )
            targets = output.logits(output.hidden_TD[judged]).softmax(-1)[place]
        builder = LayerBuilder(self._graph.masters, options.quant, options.dtype)
        ids = torch.from_numpy(np.concatenate([document.token_ids for document in documents]))
        known = ids[rows.unsqueeze(1) + torch.arange(1, self._draft.block_size + 2)]
        routes: list[Routes] = []
        hidden = self._blocks(builder, options, taps, rows, positions, window, known[:, 0], routes)
        return DraftRun(hidden, known, targets, routes, output.head, builder)

    def _backbone_options(self, options: GraphOptions) -> GraphOptions:
        if not self._is_backbone_stored:
            return options
        quant = replace(options.quant, dense_weights=False, expert_weights=False, tables=False)
        return replace(options, quant=quant)

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
        routes: list[Routes],
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
            x, pre = self._block(layer, x, pre, context, slots, turn, rounding, routes)
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
        routes: list[Routes],
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

        def choose_and_keep(u_TD: Tensor, moe: MoeWeights, is_image: Tensor | None) -> Routes:
            routes.append(self._router(u_TD, moe, is_image))
            return routes[-1]

        done = finish_layer(
            layer, x, attn_mix, out, None, router=choose_and_keep, config=config, quantise=rounding.inputs
        )
        return done.x_TMD, done.pre_TM

    def judge(self, run: DraftRun, anchors: Sequence[Anchors], denominator: float | None = None) -> DraftLoss:
        """Compare a run with the corpus and the backbone, each draft biased by the corpus token before it.

        Args:
            run: of these anchors.
            anchors: say which drafts count.
            denominator: sum of `position_weights` of the whole batch; None takes that of these anchors.

        Source: training.md section 7.2.
        """
        weights = self._weights
        share = self.position_weights(anchors).flatten()
        share = share / (float(share.sum()) if denominator is None else denominator)
        base = self._base_logits(run)
        bias, previous = self._markov(run, run.known_AK[:, :-1].flatten())
        logits = base + bias
        confidence = self._confidence(run, run.hidden_AXD.flatten(0, 1), previous)
        known = run.known_AK[:, 1:].flatten()
        cross_entropy = (share * functional.cross_entropy(logits, known, reduction="none")).sum()
        distance = (logits.softmax(-1) - run.targets_AXV.flatten(0, 1)).abs().sum(-1)
        variation = (share * distance).sum()
        acceptance = 1.0 - 0.5 * distance.detach()
        agreement = functional.binary_cross_entropy_with_logits(confidence, acceptance, reduction="none")
        sure = (share * agreement).sum()
        total = weights.cross_entropy * cross_entropy + weights.variation * variation + weights.confidence * sure
        size = self._draft.block_size
        return DraftLoss(
            total,
            cross_entropy.item(),
            variation.item(),
            sure.item(),
            confidence.detach().view(-1, size),
            acceptance.view(-1, size),
        )

    @torch.no_grad()
    def propose(self, run: DraftRun) -> Drafts:
        """Draft greedily at every anchor, as `models/deepseek_v41/draft.py` does when it serves."""
        base = self._base_logits(run).unflatten(0, (-1, self._draft.block_size))
        previous, ids, confidence = run.known_AK[:, 0], [], []
        for place in range(self._draft.block_size):
            bias, embedded = self._markov(run, previous)
            confidence.append(self._confidence(run, run.hidden_AXD[:, place], embedded))
            previous = (base[:, place] + bias).argmax(-1)
            ids.append(previous)
        return Drafts(torch.stack(ids, 1), torch.stack(confidence, 1))

    @property
    def _last(self) -> str:
        return f"mtp.{self._draft.num_layers - 1}"

    def _base_logits(self, run: DraftRun) -> Tensor:
        """Return logits [A * X, V] float32 without the bias of the token before."""
        norm = run.builder.wide(f"{self._last}.norm.weight")
        hidden = rms_norm(run.hidden_AXD, norm, self._config.norm_eps).flatten(0, 1)
        return linear_fp32(hidden, pad_columns(run.head.detach()), self._config.vocab_size)

    def _markov(self, run: DraftRun, previous_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bias [R, V] float32 of earlier tokens [R], and their embeddings."""
        prefix = f"{self._last}.markov_head"
        embedded = functional.embedding(previous_R, run.builder.stored(f"{prefix}.embed.weight"))
        weight = pad_columns(run.builder.wide(f"{prefix}.head.weight"))
        return linear_fp32(embedded, weight, self._config.vocab_size), embedded

    def _confidence(self, run: DraftRun, hidden_RD: Tensor, embedded: Tensor) -> Tensor:
        """Return raw confidences [R] float32; the head reads the hidden state before the norm."""
        weight = pad_columns(run.builder.wide(f"{self._last}.confidence_head.proj.weight"))
        return linear_fp32(torch.cat([hidden_RD, embedded], 1), weight, 1).squeeze(1)


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
