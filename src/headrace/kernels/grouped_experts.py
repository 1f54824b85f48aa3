"""Mixture of experts: clamped SwiGLU, routed experts in packed FP4, a shared expert in bfloat16."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.block_quant import decode_fp4_weight, fake_q8
from headrace.kernels.product import linear
from headrace.kernels.route_topk import Routes


@dataclass(frozen=True)
class PackedMatrix:
    """An FP4 matrix as stored: `packed` uint8 [N, K / 2], `scales` uint8 [N, K / 32]."""

    packed: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Expert:
    """One routed expert: `gate` and `up` [F, D], `down` [D, F]."""

    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return silu(min(gate, limit)) * clamp(up, -limit, limit) in float32; a limit of 0 clamps nothing."""
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate.contiguous()) * up


def shared_expert(x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, limit: float) -> Tensor:
    """Run the shared expert on Q8-rounded input; weights bfloat16. Returns [T, D] bfloat16."""
    hidden = clamped_swiglu(linear(x_TD, gate_FD), linear(x_TD, up_FD), limit)
    return linear(fake_q8(hidden.to(torch.bfloat16)), down_DF)


def routed_experts(x_TD: Tensor, routes: Routes, experts: Sequence[Expert], limit: float) -> Tensor:
    """Run every selected expert once over its tokens and sum per token.

    Args:
        x_TD: [T, D] bfloat16, already rounded to Q8 values.
        routes: selected experts, ascending per token, and their weights.
        experts: all experts of the layer, weights as stored.
        limit: clamp of the SwiGLU.

    Returns:
        [T, D] float32.

    Numerics: FP4 weights are decoded exactly; each product is rounded to bfloat16; the routing weight multiplies
        before the down product; the sum over a token's experts runs in ascending order in float32. Row-invariant.
    Source: spec section 3.8.
    """
    num_rows, per_token = routes.experts_TK.shape
    flat = routes.experts_TK.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    tokens = torch.div(order, per_token, rounding_mode="floor")
    counts = torch.bincount(flat, minlength=len(experts)).tolist()
    rows = x_TD[tokens]
    gates, ups, start = [], [], 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            part = rows[start : start + count]
            gates.append(linear(part, decode_fp4_weight(expert.gate.packed, expert.gate.scales)))
            ups.append(linear(part, decode_fp4_weight(expert.up.packed, expert.up.scales)))
            start += count
    hidden = clamped_swiglu(torch.cat(gates), torch.cat(ups), limit)
    hidden = hidden.mul_(routes.weights_TK.reshape(-1)[order].unsqueeze(-1))
    hidden = fake_q8(hidden.to(torch.bfloat16))
    downs, start = [], 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            part = hidden[start : start + count]
            downs.append(linear(part, decode_fp4_weight(expert.down.packed, expert.down.scales)))
            start += count
    return _sum_per_token(torch.cat(downs), order, num_rows, per_token)


def _sum_per_token(out_PD: Tensor, order: Tensor, num_rows: int, per_token: int) -> Tensor:
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    place = place.view(num_rows, per_token)
    total = out_PD[place[:, 0]].float()
    for slot in range(1, per_token):
        total += out_PD[place[:, slot]]
    return total
