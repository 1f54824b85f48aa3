"""Mixture of experts: router with two biases, routed FP4 experts, one shared FP8 expert.

Source: specification section 3.8; released `inference/model.py`, `Gate`, `Expert` and `MoE`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace.models.deepseek_v41.reference.arithmetic import linear, linear_fp32

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.deepseek_v41.config import Config
    from headrace.models.deepseek_v41.reference.arithmetic import Weights


def scores(logits: Tensor) -> Tensor:
    """Return sqrt(softplus(logit)), the router's positive score, in float32."""
    return functional.softplus(logits).sqrt()


def route(
    weights: Weights, prefix: str, u_TD: Tensor, *, num_picks: int, route_scale: float, image_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of every row and their weights.

    Args:
        weights: official names to tensors.
        prefix: for example `layers.3.ffn.gate`.
        u_TD: [T, D] bfloat16.
        num_picks: experts per row.
        route_scale: factor on the normalised weights.
        image_T: [T] bool, rows inside an image span, which use `bias_vl`; None uses `bias` for all rows.

    Returns:
        Expert ids [T, num_picks] int64 and weights [T, num_picks] float32, best first.

    Numerics: float32. The bias chooses, the unbiased score weighs. Of equal biased scores the lower expert wins, so the
        picks are distinct whatever the scores are, NaN included.
    """
    score_TE = scores(linear_fp32(weights[f"{prefix}.weight"], u_TD))
    biased_TE = score_TE + weights[f"{prefix}.bias"]
    if image_T is not None:
        biased_TE = torch.where(image_T[:, None], score_TE + weights[f"{prefix}.bias_vl"], biased_TE)
    picked = biased_TE.sort(dim=-1, descending=True, stable=True).indices[:, :num_picks]
    weight = score_TE.gather(1, picked)
    return picked, weight / (weight.sum(dim=-1, keepdim=True) + 1e-20) * route_scale


def expert(weights: Weights, prefix: str, u_TD: Tensor, limit: float, weight_T: Tensor | None = None) -> Tensor:
    """Run one gated expert.

    Args:
        weights: official names to tensors.
        prefix: for example `layers.3.ffn.experts.7`; `w1` is the gate, `w3` the up projection, `w2` the down one.
        u_TD: [T, D] bfloat16.
        limit: clamp of the hidden values, 0 = none: both sides of `up`, the upper side of `gate`.
        weight_T: [T] float32 routing weights; None for the shared expert.

    Returns:
        [T, D] bfloat16.

    Numerics: hidden values in float32 after the bfloat16 linears; the routing weight multiplies *before* `w2`, hence
        before its input is quantised.
    """
    gate = linear(weights, f"{prefix}.w1", u_TD).float()
    up = linear(weights, f"{prefix}.w3", u_TD).float()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    hidden = functional.silu(gate) * up
    if weight_T is not None:
        hidden = weight_T[:, None] * hidden
    return linear(weights, f"{prefix}.w2", hidden.bfloat16())


def mixture(
    weights: Weights, prefix: str, config: Config, u_TD: Tensor, *, num_picks: int, image_T: Tensor | None
) -> Tensor:
    """Run the chosen experts of every row and the shared one.

    Args:
        weights: official names to tensors.
        prefix: for example `layers.3.ffn`.
        config: the model.
        u_TD: [T, D] bfloat16.
        num_picks: experts per row (the draft blocks have their own number).
        image_T: [T] bool or None, see `route`.

    Returns:
        [T, D] bfloat16.

    Numerics: bfloat16 expert outputs are added in float32, in ascending order of experts, the shared one last.
    """
    picked, weight = route(
        weights, f"{prefix}.gate", u_TD, num_picks=num_picks, route_scale=config.route_scale, image_T=image_T
    )
    total = torch.zeros_like(u_TD, dtype=torch.float32)
    for expert_id in picked.unique().tolist():
        rows, place = (picked == expert_id).nonzero(as_tuple=True)
        name = f"{prefix}.experts.{expert_id}"
        total[rows] += expert(weights, name, u_TD[rows], config.swiglu_limit, weight[rows, place]).float()
    return (total + expert(weights, f"{prefix}.shared_experts", u_TD, config.swiglu_limit).float()).bfloat16()
