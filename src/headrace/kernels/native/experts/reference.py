"""The experts of one layer in PyTorch, in the kernels' order of summation."""

import torch
from torch import Tensor

from headrace.kernels.native.experts import ExpertMatrices
from headrace.kernels.native.lanes_reference import exp
from headrace.kernels.native.product.reference import multiply
from headrace.kernels.native.router.reference import route
from headrace.kernels.native.tiles import Matrix


def run(
    u_TD: Tensor,
    matrices: ExpertMatrices,
    *,
    per_token: int,
    scale: float,
    limit: float,
    is_image: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return [T, D] bfloat16 and the selected experts [T, K]."""
    bias = matrices.bias
    if is_image is not None and matrices.image_bias is not None:
        bias = torch.where(is_image.unsqueeze(1), matrices.image_bias, bias)
    z = multiply(u_TD, matrices.router, is_quantised=False, is_float=True)
    picked, weights = route(z, bias, per_token=per_token, scale=scale)
    rows = [_routed(u_TD[row : row + 1], picked[row], weights[row], matrices, limit) for row in range(u_TD.shape[0])]
    gate, up = multiply(u_TD, matrices.shared_gate_up, is_quantised=True).float().chunk(2, 1)
    shared = _finish(gate, up, torch.ones(u_TD.shape[0]), matrices.shared_down, limit)
    return (torch.cat(rows) + shared).to(torch.bfloat16), picked


def _routed(u_1D: Tensor, picked: Tensor, weights: Tensor, matrices: ExpertMatrices, limit: float) -> Tensor:
    total = torch.zeros((1, u_1D.shape[1]))
    for slot, expert in enumerate(picked.tolist()):
        gate, up = (multiply(u_1D, part[expert], is_quantised=True).float() for part in (matrices.gate, matrices.up))
        total = total + _finish(gate, up, weights[slot : slot + 1], matrices.down[expert], limit)
    return total


def _finish(gate: Tensor, up: Tensor, weights: Tensor, down: Matrix, limit: float) -> Tensor:
    if limit > 0:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    hidden = (gate / (1.0 + exp(-gate)) * up * weights.unsqueeze(1)).to(torch.bfloat16)
    return multiply(hidden, down, is_quantised=True).float()
