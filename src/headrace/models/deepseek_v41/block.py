"""One layer of the cached path: two halves around attention and experts, joined by single-pass hyper-connections."""

import torch
from torch import Tensor

from headrace.kernels.block_quant import fake_q8
from headrace.kernels.grouped_experts import routed_experts, shared_expert
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.route_topk import route
from headrace.kernels.stream_mix import Mixes, collapse, expand, mixes
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


def experts_of(u_TD: Tensor, weights: MoeWeights, is_image: Tensor | None, *, count: int, config: Config) -> Tensor:
    """Run router, routed experts and shared expert: [T, D] bfloat16.

    Args:
        u_TD: [T, D] bfloat16 input of the half.
        weights: the layer's experts.
        is_image: [T] bool, rows that select with the image bias; None for none.
        count: experts per token.
        config: scales and clamps.

    Source: spec section 3.8.
    """
    bias = weights.bias
    if is_image is not None and weights.bias_vl is not None:
        bias = torch.where(is_image.unsqueeze(1), weights.bias_vl, weights.bias)
    routes = route(u_TD, weights.gate, bias, count=count, scale=config.route_scale)
    u8 = fake_q8(u_TD)
    routed = routed_experts(u8, routes, weights.experts, config.swiglu_limit)
    shared = shared_expert(u8, weights.shared_gate_up, weights.shared_down, config.swiglu_limit)
    return (routed + shared.float()).to(u_TD.dtype)


def finish_layer(
    layer: LayerWeights,
    x_TMD: Tensor,
    attn_mix: Mixes,
    attn_out: Tensor,
    is_image: Tensor | None,
    *,
    count: int,
    config: Config,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do everything after attention.

    Returns:
        New streams [T, M, D], the pre-mix for the next half [T, M], and the experts' input and output [T, D].
    """
    x_TMD = expand(attn_out, x_TMD, attn_mix)
    ffn_mix = half_mixes(x_TMD, layer.ffn_mix, config)
    ffn_in = half_input(x_TMD, attn_mix.pre_TM, layer.ffn_norm, config)
    ffn_out = experts_of(ffn_in, layer.moe, is_image, count=count, config=config)
    return expand(ffn_out, x_TMD, ffn_mix), ffn_mix.pre_TM, ffn_in, ffn_out
