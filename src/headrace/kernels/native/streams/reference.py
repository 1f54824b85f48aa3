"""The hyper-connections of one half in PyTorch, in the kernels' order of summation."""

import torch
from torch import Tensor

from headrace.kernels.native.lanes_reference import exp, lane_sum, multiply_add, rms_norm, sigmoid, sqrt
from headrace.kernels.native.streams import STREAMS, Opened


def open_half(
    x_TMD: Tensor,
    pre_TM: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
) -> Opened:
    """Return input and coefficients; `weights` are fn, base, scale and norm."""
    fn, base, scale, norm = weights
    flat = x_TMD.float().flatten(1)
    mean = lane_sum(flat, flat) / flat.shape[1]
    factor = (1.0 / sqrt(mean + norm_eps)).unsqueeze(1)
    c = torch.stack([lane_sum(flat, fn[row].expand_as(flat)) for row in range(24)], 1) * factor
    m = STREAMS
    c = multiply_add(c, torch.cat([scale[0].expand(m), scale[1].expand(m), scale[2].expand(m * m)]), base)
    comb = sinkhorn(c[:, 2 * m :].unflatten(1, (m, m)), iterations, eps)
    pre, post = sigmoid(c[:, :m]) + eps, 2.0 * sigmoid(c[:, m : 2 * m])
    return Opened(rms_norm(collapse(x_TMD, pre_TM), norm, norm_eps), pre, post, comb)


def _sum_of_four(a: Tensor, dim: int) -> Tensor:
    a0, a1, a2, a3 = a.unbind(dim)
    return ((a0 + a1) + (a2 + a3)).unsqueeze(dim)


def sinkhorn(logits_TMM: Tensor, iterations: int, eps: float) -> Tensor:
    """Normalise rows and columns in turn."""
    a = exp(logits_TMM - logits_TMM.amax(2, keepdim=True))
    a = a / _sum_of_four(a, 2) + eps
    a = a / (_sum_of_four(a, 1) + eps)
    for _ in range(iterations - 1):
        a = a / (_sum_of_four(a, 2) + eps)
        a = a / (_sum_of_four(a, 1) + eps)
    return a


def collapse(x_TMD: Tensor, pre_TM: Tensor) -> Tensor:
    """Return the weighted sum of the streams, bfloat16 [T, D]."""
    wide = x_TMD.float()
    total = wide[:, 0] * pre_TM[:, 0:1]
    for stream in range(1, STREAMS):
        total = multiply_add(wide[:, stream], pre_TM[:, stream : stream + 1], total)
    return total.to(torch.bfloat16)


def expand(half_TD: Tensor, x_TMD: Tensor, opened: Opened) -> Tensor:
    """Return the new streams [T, 4, D]."""
    wide, comb = x_TMD.float(), opened.comb_TMM.unsqueeze(-1)
    total = comb[:, 0] * wide[:, 0:1]
    for stream in range(1, STREAMS):
        total = multiply_add(wide[:, stream : stream + 1], comb[:, stream], total)
    return multiply_add(half_TD.float().unsqueeze(1), opened.post_TM.unsqueeze(-1), total).to(torch.bfloat16)
