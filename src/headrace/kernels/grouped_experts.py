"""Mixture of experts: clamped SwiGLU, routed experts in packed FP4, a shared expert in bfloat16."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.activation import silu
from headrace.kernels.block_quant import decode_fp4_weight, fake_q8
from headrace.kernels.precision import widen
from headrace.kernels.product import linear
from headrace.kernels.route_topk import Routes

_DECODE_ELEMENTS = 1 << 21  # matrix elements decoded at once, so that they stay in cache


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
    gate, up = widen(gate), widen(up)
    if limit > 0:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    return silu(gate) * up


def shared_expert(x_TD: Tensor, gate_up: Tensor, down_DF: Tensor, limit: float) -> Tensor:
    """Run the shared expert on Q8-rounded input; `gate_up` [2 F, D] and `down` bfloat16. Returns [T, D] bfloat16."""
    gate, up = linear(x_TD, gate_up).chunk(2, 1)
    hidden = clamped_swiglu(gate, up, limit)
    return linear(fake_q8(hidden.to(x_TD.dtype)), down_DF)


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
    counts = torch.bincount(flat, minlength=len(experts)).tolist()
    used = [expert for expert, count in zip(experts, counts, strict=True) if count]
    sizes = [count for count in counts if count]
    if num_rows == 1:
        gate_up = _one_row(x_TD, used)
    else:
        rows = x_TD[torch.div(order, per_token, rounding_mode="floor")].split(sizes)
        gate_up = _each(rows, [(expert.gate, expert.up) for expert in used])
    gate, up = gate_up.chunk(2, 1)
    hidden = clamped_swiglu(gate, up, limit)
    hidden = hidden * routes.weights_TK.reshape(-1)[order].unsqueeze(-1)
    out_PD = _each(fake_q8(hidden.to(x_TD.dtype)).split(sizes), [(expert.down,) for expert in used])
    return _sum_per_token(out_PD, order, num_rows, per_token)


def _each(parts: Sequence[Tensor], groups: Sequence[tuple[PackedMatrix, ...]]) -> Tensor:
    """Multiply part i by the stacked matrices of group i and return the results one after the other."""
    step = max(1, _DECODE_ELEMENTS // sum(2 * matrix.packed.numel() for matrix in groups[0]))
    out = []
    for low in range(0, len(groups), step):
        some = groups[low : low + step]
        stacked = _decode_all(some).to(parts[0].dtype).chunk(len(some))
        out += [linear(part, matrix) for part, matrix in zip(parts[low:], stacked, strict=False)]
    return torch.cat(out)


def _one_row(x_1D: Tensor, used: Sequence[Expert]) -> Tensor:
    """Return gate and up products of one token for all its experts, [experts, 2 F], in one product.

    A column of a bfloat16 product does not depend on the columns beside it, so the bits are those of `_each`.
    """
    matrices = _decode_all([(expert.gate, expert.up) for expert in used])
    return linear(x_1D, matrices.to(x_1D.dtype)).view(len(used), -1)


def _decode_all(groups: Sequence[tuple[PackedMatrix, ...]]) -> Tensor:
    """Decode matrices of one width and stack their rows: one pass instead of one per matrix."""
    packed = torch.cat([matrix.packed for group in groups for matrix in group])
    scales = torch.cat([matrix.scales for group in groups for matrix in group])
    return decode_fp4_weight(packed, scales)


def _sum_per_token(out_PD: Tensor, order: Tensor, num_rows: int, per_token: int) -> Tensor:
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    place = place.view(num_rows, per_token)
    total = widen(out_PD[place[:, 0]])
    for slot in range(1, per_token):
        total += out_PD[place[:, slot]]
    return total
