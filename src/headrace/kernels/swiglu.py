"""Clamped SwiGLU of experts, alone and with a routing weight and its gradient."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.kernels.activation import sigmoid, silu
from headrace.kernels.native.swiglu_gradient import swiglu_gradient
from headrace.kernels.precision import widen

_TILE_VALUES = 1 << 16  # hidden values worked on at once: several passes over more of them go to memory each time


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return silu(min(gate, limit)) * clamp(up, -limit, limit) in float32; a limit of 0 clamps nothing."""
    gate, up = widen(gate), widen(up)
    if limit > 0:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    return silu(gate) * up


def weighted_swiglu(gate_up_P2F: Tensor, weights_P: Tensor | None, limit: float) -> Tensor:
    """Return `clamped_swiglu` of rows that hold gate then up, times a weight per row, in the dtype of the rows.

    Numerics: float32, one rounding. A clamped value gets no gradient.
    """
    hidden: Tensor = _WeightedSwiglu.apply(gate_up_P2F, weights_P, limit)
    return hidden


class _WeightedSwiglu(torch.autograd.Function):
    """Nothing between input and output is kept; the gradient computes it again."""

    @staticmethod
    def forward(ctx: Any, gate_up_P2F: Tensor, weights_P: Tensor | None, limit: float) -> Tensor:
        ctx.save_for_backward(gate_up_P2F, weights_P)
        ctx.limit = limit
        width = gate_up_P2F.shape[1] // 2
        hidden = gate_up_P2F.new_empty((gate_up_P2F.shape[0], width))
        for rows in _tiles(hidden):
            gate, up = gate_up_P2F[rows].chunk(2, 1)
            found = clamped_swiglu(gate, up, limit)
            hidden[rows] = found if weights_P is None else found * weights_P[rows].unsqueeze(-1)
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_PF: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate_up_P2F, weights_P = ctx.saved_tensors
        found = swiglu_gradient(gradient_PF, gate_up_P2F, weights_P, ctx.limit)
        if found is not None:
            return *found, None
        of_both = torch.empty_like(gate_up_P2F)
        of_weights = None if weights_P is None else torch.empty_like(weights_P)
        width = gradient_PF.shape[1]
        for rows in _tiles(gradient_PF):
            raw_gate, raw_up = (widen(part) for part in gate_up_P2F[rows].chunk(2, 1))
            of_hidden = widen(gradient_PF[rows])
            gate, up = raw_gate, raw_up
            if ctx.limit > 0:
                gate, up = gate.clamp_max(ctx.limit), up.clamp(-ctx.limit, ctx.limit)
            share = sigmoid(gate)
            active = gate * share
            if weights_P is not None and of_weights is not None:
                of_weights[rows] = (of_hidden * active).mul_(up).sum(1)
                of_hidden = of_hidden * weights_P[rows].unsqueeze(-1)
            of_up = of_hidden * active
            # d silu = share + active * (1 - share)
            of_gate = torch.addcmul(share, active, 1.0 - share).mul_(up).mul_(of_hidden)
            if ctx.limit > 0:
                of_gate.masked_fill_(raw_gate > ctx.limit, 0.0)
                of_up.masked_fill_(raw_up.abs() > ctx.limit, 0.0)
            of_both[rows, :width] = of_gate
            of_both[rows, width:] = of_up
        return of_both, of_weights, None


def _tiles(hidden_PF: Tensor) -> Iterator[slice]:
    step = max(1, _TILE_VALUES // max(1, hidden_PF.shape[1]))
    for low in range(0, hidden_PF.shape[0], step):
        yield slice(low, low + step)
