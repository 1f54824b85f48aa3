"""Mixture of experts: clamped SwiGLU, routed experts in packed FP4, a shared expert in bfloat16."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels.block_quant import Quantiser, decode_fp4_weight, fake_q8
from headrace.kernels.expert_rows import Places, multiply_rows, sum_rows, take_rows
from headrace.kernels.product import linear
from headrace.kernels.route_topk import Routes
from headrace.kernels.swiglu import clamped_swiglu, weighted_swiglu

_HIDDEN_ROWS = 512  # rows of hidden values worked on at once, for the same reason
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


def shared_expert(
    x_TD: Tensor, gate_up: Tensor, down_DF: Tensor, limit: float, quantise: Quantiser = fake_q8
) -> Tensor:
    """Run the shared expert on Q8-rounded input; `gate_up` [2 F, D] and `down` as `x`. Returns [T, D] as `x`."""
    return linear(quantise(weighted_swiglu(linear(x_TD, gate_up), None, limit)), down_DF)


class ExpertSet(Protocol):
    """All routed experts of a layer.

    `elements` is the size of one expert's largest product matrix; `dense` are the gate and up matrices [E, 2 F, D] and
    the down matrices [E, D, F] of all of them, where they are there as tensors.
    """

    count: int
    elements: int
    dense: tuple[Tensor, Tensor] | None

    def gate_up(self, experts: Sequence[int]) -> Tensor:
        """Return the gate and up matrices of some experts, [n * 2 F, D], gate then up of each."""
        ...

    def down(self, experts: Sequence[int]) -> Tensor:
        """Return the down matrices of some experts, [n * D, F]."""
        ...


class PackedExperts:
    """Experts in their stored bits, decoded when used."""

    def __init__(self, experts: Sequence[Expert]) -> None:
        self._experts = tuple(experts)
        self.dense: tuple[Tensor, Tensor] | None = None
        self.count = len(self._experts)
        self.elements = 4 * self._experts[0].gate.packed.numel()

    def gate_up(self, experts: Sequence[int]) -> Tensor:
        """Decode gate and up matrices, bfloat16."""
        return _decode_all([part for e in experts for part in (self._experts[e].gate, self._experts[e].up)])

    def down(self, experts: Sequence[int]) -> Tensor:
        """Decode down matrices, bfloat16."""
        return _decode_all([self._experts[e].down for e in experts])


class DenseExperts:
    """Experts as two dense tensors (training): `gate_up` [E, 2 F, D] and `down` [E, D, F]."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self._gate_up = gate_up
        self._down = down
        self.dense: tuple[Tensor, Tensor] | None = (gate_up, down)
        self.count = gate_up.shape[0]
        self.elements = gate_up[0].numel()

    def gate_up(self, experts: Sequence[int]) -> Tensor:
        """Select gate and up matrices."""
        return _select(self._gate_up, experts)

    def down(self, experts: Sequence[int]) -> Tensor:
        """Select down matrices."""
        return _select(self._down, experts)


def _select(matrices_ENK: Tensor, experts: Sequence[int]) -> Tensor:
    """Return matrices of ascending experts, [n * N, K]; without a copy if no expert between them is left out."""
    first, last = experts[0], experts[-1]
    if last - first + 1 == len(experts):
        return matrices_ENK[first : last + 1].flatten(0, 1)
    return matrices_ENK.index_select(0, torch.tensor(experts, device=matrices_ENK.device)).flatten(0, 1)


def routed_experts(
    x_TD: Tensor, routes: Routes, experts: ExpertSet, limit: float, quantise: Quantiser = fake_q8
) -> Tensor:
    """Run every selected expert once over its tokens and sum per token.

    Args:
        x_TD: [T, D] bfloat16, already rounded to Q8 values.
        routes: selected experts, ascending per token, and their weights.
        experts: all experts of the layer.
        limit: clamp of the SwiGLU.
        quantise: rounds the input of the down product.

    Returns:
        [T, D] float32.

    Numerics: FP4 weights are decoded exactly; each product is rounded to bfloat16; the routing weight multiplies
        before the down product; the sum over a token's experts runs in ascending order in float32. Row-invariant.
        Gradients are gathered without atomic additions, so threads do not change them.
    Source: spec section 3.8.
    """
    num_rows, per_token = routes.experts_TK.shape
    flat = routes.experts_TK.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    counts = torch.bincount(flat, minlength=experts.count).tolist()
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    tokens = torch.div(order, per_token, rounding_mode="floor")
    places = Places(tokens, place.view(num_rows, per_token), counts)
    weights = routes.weights_TK.reshape(-1).index_select(0, order)
    if experts.dense is not None:
        rows = take_rows(x_TD, places)
        hidden = weighted_swiglu(multiply_rows(rows, experts.dense[0].to(rows.dtype), places), weights, limit)
        parts = multiply_rows(quantise(hidden), experts.dense[1].to(rows.dtype), places)
        return sum_rows(parts, places)
    return _routed_packed(x_TD, weights, experts, places, limit, quantise)


def _routed_packed(
    x_TD: Tensor, weights_P: Tensor, experts: ExpertSet, places: Places, limit: float, quantise: Quantiser
) -> Tensor:
    used = [expert for expert, count in enumerate(places.counts) if count]
    sizes = [count for count in places.counts if count]
    if x_TD.shape[0] == 1:
        # a column of a product does not depend on the columns beside it, so the bits are those of `_each`
        gate_up = linear(x_TD, experts.gate_up(used).to(x_TD.dtype)).view(len(used), -1)
    else:
        rows = x_TD.index_select(0, places.tokens_P).split(sizes)
        gate_up = _each(rows, used, experts.gate_up, experts.elements)
    hidden = []
    for piece, weight in zip(gate_up.split(_HIDDEN_ROWS), weights_P.split(_HIDDEN_ROWS), strict=True):
        gate, up = piece.chunk(2, 1)
        hidden.append(quantise((clamped_swiglu(gate, up, limit) * weight.unsqueeze(-1)).to(x_TD.dtype)))
    parts = torch.cat(hidden).split(sizes)
    return sum_rows(_each(parts, used, experts.down, experts.elements), places)


def _each(
    parts: Sequence[Tensor], used: Sequence[int], matrices: Callable[[Sequence[int]], Tensor], elements: int
) -> Tensor:
    """Multiply part i by the matrix of expert `used[i]`, a few experts at a time; results one after the other."""
    step = max(1, _DECODE_ELEMENTS // elements)
    out = []
    for low in range(0, len(used), step):
        some = used[low : low + step]
        stacked = matrices(some).to(parts[0].dtype).chunk(len(some))
        out += [linear(part, matrix) for part, matrix in zip(parts[low:], stacked, strict=False)]
    return torch.cat(out)


def _decode_all(matrices: Sequence[PackedMatrix]) -> Tensor:
    """Decode matrices of one width and stack their rows: one pass instead of one per matrix."""
    packed = torch.cat([matrix.packed for matrix in matrices])
    return decode_fp4_weight(packed, torch.cat([matrix.scales for matrix in matrices]))
