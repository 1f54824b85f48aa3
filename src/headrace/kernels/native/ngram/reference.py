"""The n-gram gate in PyTorch, in the kernels' order of summation."""

import torch
from torch import Tensor

from headrace.kernels.native.lanes_reference import lane_sum, multiply_add, sigmoid, sqrt


def inject(x_TMD: Tensor, kv: Tensor, weights: tuple[Tensor, Tensor], is_dead_T: Tensor, eps: float) -> Tensor:
    """Return the new streams [T, 4, D]."""
    width = x_TMD.shape[2]
    keys, value = kv.float().unflatten(1, (5, width)).split([4, 1], 1)
    x, n = x_TMD.float(), torch.tensor(float(width))
    of_x, of_key = (1.0 / sqrt(lane_sum(part, part) / n + eps) for part in (x, keys))
    dot = lane_sum(x * weights[0] * weights[1], keys) * of_x * of_key * (1.0 / sqrt(n))
    gate = sigmoid(torch.copysign(sqrt(dot.abs().clamp_min(1e-6)), dot))
    out = multiply_add(gate.unsqueeze(-1), value, x).to(torch.bfloat16)
    return torch.where(is_dead_T.view(-1, 1, 1), x_TMD, out)
