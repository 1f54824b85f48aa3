"""One layer of the cached path: two halves around attention and experts, joined by single-pass hyper-connections."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.block_quant import Quantiser, fake_q8
from headrace.kernels.grouped_experts import routed_experts, shared_expert
from headrace.kernels.precision import widen
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.route_topk import Routes, route
from headrace.kernels.stream_mix import Mixes, Numbers, collapse, expand, mixes, open_half
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.parameters import LayerWeights, MixWeights, MoeWeights


def half_mixes(x_TMD: Tensor, weights: MixWeights, config: Config) -> Mixes:
    """Compute one half's coefficients from the streams before it."""
    return mixes(
        x_TMD,
        weights.fn,
        weights.base,
        weights.scale,
        norm_eps=config.norm_eps,
        iterations=config.sinkhorn_iterations,
        eps=config.hc_eps,
    )


def half_input(x_TMD: Tensor, pre_TM: Tensor, norm: Tensor, config: Config) -> Tensor:
    """Collapse the streams with the previous half's pre-mix and normalise: [T, D] bfloat16."""
    return rms_norm(collapse(x_TMD, pre_TM), norm, config.norm_eps)


def open_streams(
    x_TMD: Tensor, pre_TM: Tensor, weights: MixWeights, norm: Tensor, config: Config
) -> tuple[Tensor, Tensor, Mixes]:
    """Do `half_mixes` and `half_input` at once; return the streams to go on with, the input and the coefficients."""
    numbers = Numbers(config.num_streams, config.norm_eps, config.sinkhorn_iterations, config.hc_eps)
    x_TMD, collapsed, mix = open_half(x_TMD, pre_TM, weights.fn, weights.base, weights.scale, numbers)
    return x_TMD, rms_norm(collapsed, norm, config.norm_eps), mix


Router = Callable[[Tensor, MoeWeights, Tensor | None], Routes]
"""Chooses experts for rows [T, D], given the layer's weights and image marks [T]."""


def live_router(count: int, config: Config) -> Router:
    """Return the router that selects by biased score, `count` experts per token; images have a bias of their own."""

    def choose(u_TD: Tensor, weights: MoeWeights, is_image: Tensor | None) -> Routes:
        bias = weights.bias
        if is_image is not None and weights.bias_vl is not None:
            bias = torch.where(is_image.unsqueeze(1), weights.bias_vl, weights.bias)
        return route(u_TD, weights.gate, bias, count=count, scale=config.route_scale)

    return choose


def experts_of(u_TD: Tensor, weights: MoeWeights, routes: Routes, config: Config, quantise: Quantiser) -> Tensor:
    """Run routed experts and the shared expert: [T, D] in the dtype of the input.

    Source: spec section 3.8.
    """
    u8 = quantise(u_TD)
    routed = routed_experts(u8, routes, weights.experts, config.swiglu_limit, quantise)
    shared = shared_expert(u8, weights.shared_gate_up, weights.shared_down, config.swiglu_limit, quantise)
    return (routed + widen(shared)).to(u_TD.dtype)


@dataclass(frozen=True)
class Finished:
    """A layer's result: streams [T, M, D], pre-mix for the next half [T, M], experts' input and output [T, D]."""

    x_TMD: Tensor
    pre_TM: Tensor
    ffn_in: Tensor
    ffn_out: Tensor


def finish_layer(
    layer: LayerWeights,
    x_TMD: Tensor,
    attn_mix: Mixes,
    attn_out: Tensor,
    is_image: Tensor | None,
    *,
    router: Router,
    config: Config,
    quantise: Quantiser = fake_q8,
) -> Finished:
    """Do everything after attention.

    Args:
        layer: the layer's weights.
        x_TMD: [T, M, D] streams that entered the layer.
        attn_mix: coefficients of the attention half.
        attn_out: [T, D] its output.
        is_image: [T] bool image marks, None for none.
        router: chooses experts.
        config: sizes, scales, clamps.
        quantise: rounds inputs of products.
    """
    x_TMD = expand(attn_out, x_TMD, attn_mix)
    x_TMD, ffn_in, ffn_mix = open_streams(x_TMD, attn_mix.pre_TM, layer.ffn_mix, layer.ffn_norm, config)
    routes = router(ffn_in, layer.moe, is_image)
    ffn_out = experts_of(ffn_in, layer.moe, routes, config, quantise)
    return Finished(expand(ffn_out, x_TMD, ffn_mix), ffn_mix.pre_TM, ffn_in, ffn_out)
