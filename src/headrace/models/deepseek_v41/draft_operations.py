"""Which implementation does each operation of the draft module: the same choice as in the backbone's layers.

Projections, context entries and attention follow `attention`, hyper-connections `mhc`, experts `experts`, the two heads
`head`. A row's result depends on its own sequence only, so drafts of several sequences run together.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.core.errors import InternalError
from headrace.kernels.block_quant import fake_q8
from headrace.kernels.native.head import Head
from headrace.kernels.native.library import Library, load
from headrace.kernels.native.product import Product
from headrace.kernels.native.room import Rooms
from headrace.kernels.product import linear, linear_fp32
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.sparse_attention import attend_block
from headrace.kernels.stream_mix import collapse
from headrace.models.deepseek_v41.attention import SERVED, Turn, project, project_output, window_entries
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.native_draft import NativeBlock, NativeContext
from headrace.models.deepseek_v41.operations import (
    Expand,
    Follow,
    Open,
    RunExperts,
    experts_operation,
    mhc_operations,
)
from headrace.models.deepseek_v41.parameters import DraftWeights, LayerWeights, Parameters

Observe = Callable[[SequenceState, int, Tensor, Turn], None]
"""Stores the context entries of taps [T, n D] of positions from a first one on; rotations are those of the rows."""
AttendBlocks = Callable[[Tensor, Turn, tuple[SequenceState, ...]], Tensor]
"""Takes the half's input [S X, D] of S blocks, their rotations and sequences; gives its output [S X, D]."""
BlockLogits = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes the last streams and their pending pre-mix; gives float32 logits [R, V] and hidden states [R, D] bfloat16."""
Chain = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a place's hidden state [1, D], its logits [1, V] and the embedded token before it [1, rank]; gives the logits
that know this token, and the confidence [1, 1]."""


@dataclass(frozen=True)
class DraftLayer:
    """The operations of one draft layer."""

    open_attn: Open
    attend: AttendBlocks
    follow: Follow
    expand: Expand
    experts: RunExperts


@dataclass(frozen=True)
class DraftOperations:
    """The operations of the draft module; `library` is that of the native ones, None where there are none."""

    observe: Observe
    layers: tuple[DraftLayer, ...]
    logits: BlockLogits
    chain: Chain
    library: Library | None


def choose_draft_operations(config: Config, parameters: Parameters) -> DraftOperations:
    """Return the operations of a draft module.

    Args:
        config: the model; it has a draft module.
        parameters: the weights, as native kernels or PyTorch read them.

    Raises:
        InternalError: the model has no draft module.
    """
    weights, draft = parameters.draft, config.draft
    if weights is None or draft is None:
        raise InternalError("a drafter was built for a model without a draft module")
    native = parameters.choice.native
    library = load() if native else None
    with_mhc = library if "mhc" in native else None

    with_experts, rooms = library if "experts" in native else None, Rooms()

    def layer(stage: int, one: LayerWeights) -> DraftLayer:
        open_attn, follow, expand = mhc_operations(one, config, with_mhc, rooms)
        return DraftLayer(
            open_attn=open_attn,
            attend=_attend(one, stage, config, library if "attention" in native else None, rooms),
            follow=follow,
            expand=expand,
            experts=experts_operation(one, config, with_experts, draft.experts_per_token, rooms),
        )

    return DraftOperations(
        observe=_observe(weights, config, library if "attention" in native else None),
        layers=tuple(layer(stage, one) for stage, one in enumerate(weights.layers)),
        logits=_logits(parameters, weights, config, library if "head" in native else None),
        chain=_chain(weights, config, library if "head" in native else None),
        library=library,
    )


def _observe(weights: DraftWeights, config: Config, library: Library | None) -> Observe:
    if library is not None and weights.tiled.main_proj is not None:
        return NativeContext(library, weights, weights.tiled.main_proj, config).observe

    def observe(state: SequenceState, first: int, taps: Tensor, turn: Turn) -> None:
        main = linear(fake_q8(taps), weights.main_proj)
        main8 = fake_q8(rms_norm(main, weights.main_norm, config.norm_eps))
        for ring, layer in zip(state.draft_rings, weights.layers, strict=True):
            kv = linear(main8, layer.attention.q_a_kv[config.q_lora_rank :])
            ring.store(first, window_entries(kv, layer.attention, turn, config.norm_eps, SERVED))

    return observe


def _attend(layer: LayerWeights, stage: int, config: Config, library: Library | None, rooms: Rooms) -> AttendBlocks:
    if library is not None and layer.tiled is not None and layer.tiled.attention is not None:
        return NativeBlock(library, layer, layer.tiled.attention, stage, config, rooms).attend
    scale, window = config.head_dim**-0.5, config.window

    def attend(u_RD: Tensor, turn: Turn, states: tuple[SequenceState, ...]) -> Tensor:
        projected = project(fake_q8(u_RD), layer.attention, turn, config)
        values = []
        blocks = zip(states, projected.q_TQH.chunk(len(states)), projected.window_TH.chunk(len(states)), strict=True)
        for state, q_XQH, own_XH in blocks:
            ring = state.draft_rings[stage]
            context = ring.read(max(ring.oldest, ring.end - window), ring.end)
            values.append(attend_block(q_XQH, torch.cat([context, own_XH]), layer.attention.sink, scale=scale))
        return project_output(torch.cat(values), layer.attention, turn, config)

    return attend


def _logits(parameters: Parameters, weights: DraftWeights, config: Config, library: Library | None) -> BlockLogits:
    if library is not None and parameters.tiled_head is not None:
        return Head(library, parameters.tiled_head, weights.norm, eps=config.norm_eps).with_hidden

    def logits(x_RMD: Tensor, pre_RM: Tensor) -> tuple[Tensor, Tensor]:
        hidden = collapse(x_RMD, pre_RM)
        normed = rms_norm(hidden, weights.norm, config.norm_eps)
        return linear_fp32(normed, parameters.head, config.vocab_size), hidden

    return logits


def _chain(weights: DraftWeights, config: Config, library: Library | None) -> Chain:
    """Return the sequential head.

    Source: spec section 3.11, steps 3 to 5; confidence reads the hidden state before the norm.
    """
    tiled = weights.tiled
    if library is not None and tiled.markov_head is not None and tiled.confidence is not None:
        markov = Product(library, tiled.markov_head, is_quantised=False, is_float=True)
        judge = Product(library, tiled.confidence, is_quantised=False, is_float=True)
        return lambda hidden, base, embedded: (base + markov(embedded), judge(torch.cat([hidden, embedded], 1)))

    def chain(hidden_1D: Tensor, base_1V: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        row = base_1V + linear_fp32(embedded, weights.markov_head, config.vocab_size)
        return row, linear_fp32(torch.cat([hidden_1D, embedded], 1), weights.confidence, 1)

    return chain
