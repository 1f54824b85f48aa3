"""Which implementation does each operation of a layer: PyTorch's kernels, or the native ones of `kernels/native`.

The one owner of that choice. A layer's operations are looked up once, when the model is built.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels.block_quant import fake_q8
from headrace.kernels.native.choice import Choice
from headrace.kernels.native.experts import Experts
from headrace.kernels.native.head import Head
from headrace.kernels.native.library import Library, load
from headrace.kernels.native.ngram import NgramGate
from headrace.kernels.native.product import Product
from headrace.kernels.native.room import Rooms
from headrace.kernels.native.streams import Opened, Streams, collapse_norm, expand, streams_room
from headrace.kernels.ngram_gate import inject
from headrace.kernels.product import linear, linear_fp32
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.stream_mix import Mixes, collapse
from headrace.kernels.stream_mix import expand as torch_expand
from headrace.models.deepseek_v41.attention import Frequencies, LayerAttention
from headrace.models.deepseek_v41.batch import Rows, Work
from headrace.models.deepseek_v41.block import experts_of, half_input, half_mixes, live_router
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.native_attention import NativeAttention, Shared
from headrace.models.deepseek_v41.native_producer import NativeProducer
from headrace.models.deepseek_v41.parameters import LayerWeights, MixWeights, Parameters
from headrace.models.deepseek_v41.selection import Published

Open = Callable[[Tensor, Tensor], Opened]
"""Takes streams [T, M, D] and the pending pre-mix [T, M]; gives a half's input and coefficients."""
Follow = Callable[[Tensor, Tensor, Opened], tuple[Tensor, Opened]]
"""Takes the attention half's output [T, D], the streams before it and its coefficients; gives the new streams, and the
input and coefficients of the half that follows."""
Expand = Callable[[Tensor, Tensor, Opened], Tensor]
"""Takes a half's output [T, D], the streams before it and its coefficients; gives the new streams."""
RunExperts = Callable[[Tensor, Tensor | None], Tensor]
"""Takes the half's input [T, D] and image marks [T]; gives its output [T, D]."""


Inject = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes streams [T, M, D], n-gram rows [T, C U] and dead marks [T]; gives the new streams."""
HeadLogits = Callable[[Tensor, Tensor], Tensor]
"""Takes streams and pending pre-mix of the wanted rows; gives float32 logits [R, V]."""


class Attend(Protocol):
    """Attention of one layer over a batch."""

    def __call__(
        self, rows: Rows, u_TD: Tensor, published: Published, work: Work, shared: Shared, *, is_fp32_index: bool
    ) -> Tensor:
        """Return [T, D] and store the rows' window entries; index sources replace what is published."""
        ...


@dataclass(frozen=True)
class LayerOperations:
    """The operations of one layer.

    `produce` appends global entries and index keys (KV sources). `attn_input` gives the attention half's input alone.
    What native operations return may lie in a room (`kernels/native/room.py`): it holds for the rest of the layer, new
    streams and coefficients until the end of the next one.
    """

    produce: Callable[[Rows, Tensor], None]
    inject: Inject | None
    attend: Attend
    attn_input: Callable[[Tensor, Tensor], Tensor]
    open_attn: Open
    follow: Follow
    expand: Expand
    experts: RunExperts


def choose_operations(
    layer: LayerWeights, config: Config, frequencies: Frequencies, choice: Choice, rooms: Rooms
) -> LayerOperations:
    """Return the operations of one backbone layer; those of all layers of a model share its rooms."""
    attention = LayerAttention(layer, config, frequencies)
    library = load() if choice.native else None
    native = choice.native
    with_mhc = library if "mhc" in native else None
    with_experts = library if "experts" in native else None
    open_attn, follow, expand_ffn = mhc_operations(layer, config, with_mhc, rooms)
    return LayerOperations(
        produce=_produce(layer, config, frequencies, attention, library if "compress" in native else None, rooms),
        inject=_inject(layer, config, library if "ngram" in native else None, rooms),
        attend=_attend(layer, config, frequencies, attention, library if "attention" in native else None, rooms),
        attn_input=_input(layer, config, with_mhc),
        open_attn=open_attn,
        follow=follow,
        expand=expand_ffn,
        experts=experts_operation(layer, config, with_experts, config.experts_per_token, rooms),
    )


def mhc_operations(
    layer: LayerWeights, config: Config, library: Library | None, rooms: Rooms
) -> tuple[Open, Follow, Expand]:
    """Return what opens the attention half of a backbone or draft layer, what lies between, and what closes it."""
    if library is not None:
        attn, ffn = (
            _streams(library, weights, norm, config, rooms, part)
            for weights, norm, part in (
                (layer.attn_mix, layer.attn_norm, "attention"),
                (layer.ffn_mix, layer.ffn_norm, "experts"),
            )
        )
        run, out = library.function("hr_streams_expand", 7), streams_room(rooms, "layer", config.hidden_size)
        return attn.open, ffn.follow, lambda half_TD, x_TMD, opened: expand(run, half_TD, x_TMD, opened, out)

    def open_half(x_TMD: Tensor, pre_TM: Tensor, weights: MixWeights, norm: Tensor) -> Opened:
        mixes = half_mixes(x_TMD, weights, config)
        return Opened(half_input(x_TMD, pre_TM, norm, config), mixes.pre_TM, mixes.post_TM, mixes.comb_TMM)

    def expand_half(half_TD: Tensor, x_TMD: Tensor, opened: Opened) -> Tensor:
        return torch_expand(half_TD, x_TMD, Mixes(opened.pre_TM, opened.post_TM, opened.comb_TMM))

    def follow(half_TD: Tensor, x_TMD: Tensor, opened: Opened) -> tuple[Tensor, Opened]:
        between = expand_half(half_TD, x_TMD, opened)
        return between, open_half(between, opened.pre_TM, layer.ffn_mix, layer.ffn_norm)

    return lambda x, pre: open_half(x, pre, layer.attn_mix, layer.attn_norm), follow, expand_half


def _streams(library: Library, weights: MixWeights, norm: Tensor, config: Config, rooms: Rooms, part: str) -> Streams:
    return Streams(
        library,
        weights.fn,
        weights.base,
        weights.scale,
        norm,
        iterations=config.sinkhorn_iterations,
        norm_eps=config.norm_eps,
        eps=config.hc_eps,
    ).in_rooms(rooms, part)


def _input(layer: LayerWeights, config: Config, library: Library | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what gives the attention half's input alone, without coefficients."""
    norm, eps = layer.attn_norm, config.norm_eps
    if library is not None:
        return lambda x_TMD, pre_TM: collapse_norm(library, x_TMD, pre_TM, norm, eps)
    return lambda x_TMD, pre_TM: half_input(x_TMD, pre_TM, norm, config)


def experts_operation(
    layer: LayerWeights, config: Config, library: Library | None, per_token: int, rooms: Rooms
) -> RunExperts:
    """Return what runs the router and the experts of a backbone or draft layer, `per_token` of them for a row."""
    if library is not None and layer.tiled is not None and layer.tiled.experts is not None:
        numbers = {"scale": config.route_scale, "limit": config.swiglu_limit}
        return Experts(library, layer.tiled.experts, per_token=per_token, rooms=rooms, **numbers)
    router = live_router(per_token, config)

    def run(u_TD: Tensor, is_image: Tensor | None) -> Tensor:
        return experts_of(u_TD, layer.moe, router(u_TD, layer.moe, is_image), config, fake_q8)

    return run


def _attend(
    layer: LayerWeights,
    config: Config,
    frequencies: Frequencies,
    attention: LayerAttention,
    library: Library | None,
    rooms: Rooms,
) -> Attend:
    if library is not None and layer.tiled is not None and layer.tiled.attention is not None:
        return NativeAttention(library, layer, layer.tiled.attention, config, frequencies, rooms).run

    def attend(
        rows: Rows, u_TD: Tensor, published: Published, work: Work, shared: Shared, *, is_fp32_index: bool
    ) -> Tensor:
        del shared
        return attention.run(rows, u_TD, published, work, is_fp32_index=is_fp32_index)

    return attend


def _produce(
    layer: LayerWeights,
    config: Config,
    frequencies: Frequencies,
    attention: LayerAttention,
    library: Library | None,
    rooms: Rooms,
) -> Callable[[Rows, Tensor], None]:
    tiled = None if layer.tiled is None else layer.tiled.compressor
    if library is None or tiled is None or layer.compressor is None:
        return attention.produce
    return NativeProducer(library, layer, layer.compressor, tiled, config, frequencies, rooms).produce


def _inject(layer: LayerWeights, config: Config, library: Library | None, rooms: Rooms) -> Inject | None:
    weights = layer.ngram
    if weights is None:
        return None
    eps = config.norm_eps
    if library is not None and layer.tiled is not None and layer.tiled.ngram is not None:
        room = rooms.tensor("memory", layer.tiled.ngram.rows, torch.bfloat16)
        product = Product(library, layer.tiled.ngram, is_quantised=True, room=room)
        gate = NgramGate(library, weights.q_weight, weights.k_weight, eps=eps)

        def inject_native(x_TMD: Tensor, rows_TE: Tensor, is_dead_T: Tensor) -> Tensor:
            gate(x_TMD, product(rows_TE), is_dead_T)
            return x_TMD

        return inject_native

    def inject_torch(x_TMD: Tensor, rows_TE: Tensor, is_dead_T: Tensor) -> Tensor:
        kv = linear(fake_q8(rows_TE), weights.kv)
        return inject(x_TMD, kv, weights.q_weight, weights.k_weight, is_dead_T, eps)

    return inject_torch


def choose_head(parameters: Parameters, config: Config, choice: Choice) -> HeadLogits:
    """Return what turns the last streams into logits."""
    norm, eps = parameters.norm, config.norm_eps
    if "head" in choice.native and parameters.tiled_head is not None:
        head = Head(load(), parameters.tiled_head, norm, eps=eps)
        return lambda x_TMD, pre_TM: head(x_TMD.contiguous(), pre_TM.contiguous())

    def logits(x_TMD: Tensor, pre_TM: Tensor) -> Tensor:
        return linear_fp32(rms_norm(collapse(x_TMD, pre_TM), norm, eps), parameters.head, config.vocab_size)

    return logits
