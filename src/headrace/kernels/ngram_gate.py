"""Gate that lets an n-gram memory value into every residual stream."""

import math

import torch
from torch import Tensor

from headrace.kernels.activation import sigmoid
from headrace.kernels.precision import widen


def inject(x_TMD: Tensor, kv: Tensor, q_weight_MD: Tensor, k_weight_MD: Tensor, dead_T: Tensor, eps: float) -> Tensor:
    """Add the gated n-gram value to the streams.

    Args:
        x_TMD: [T, M, D] bfloat16 streams.
        kv: [T, (M + 1) * D] bfloat16: one key per stream, then the value.
        q_weight_MD: [M, D] float32.
        k_weight_MD: [M, D] float32.
        dead_T: [T] bool, True where a token has no n-gram (image spans); those rows come back unchanged.
        eps: of the two root mean squares.

    Returns:
        [T, M, D] bfloat16.

    Numerics: float32, one rounding; gate = sigmoid(copysign(sqrt(max(|d|, 1e-6)), d)).
    Source: spec section 3.9.3.
    """
    num_rows, num_streams, width = x_TMD.shape
    split = kv.view(num_rows, num_streams + 1, width)
    split = widen(split)
    key, value = split[:, :num_streams], split[:, num_streams:]
    x = widen(x_TMD)
    norm_x = torch.rsqrt(x.square().mean(-1) + eps)
    norm_key = torch.rsqrt(key.square().mean(-1) + eps)
    dot = (x * q_weight_MD * k_weight_MD * key).sum(-1) * norm_x * norm_key * (1.0 / math.sqrt(width))
    gate = sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    out = (x + gate.unsqueeze(-1) * value).to(x_TMD.dtype)
    return torch.where(dead_T.view(num_rows, 1, 1), x_TMD, out)
