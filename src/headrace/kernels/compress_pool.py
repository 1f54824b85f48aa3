"""Pooling of token pairs into one latent (compressor of ratio 2)."""

import torch
from torch import Tensor


def pool_pairs(values_PSH: Tensor, gates_PSH: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Pool groups of tokens with a softmax over each dimension.

    Args:
        values_PSH: [P, 2, H] float32.
        gates_PSH: [P, 2, H] float32.
        dtype: of the result.

    Returns:
        [P, H], not yet normalised.

    Numerics: float32, one rounding.
    Source: spec section 3.4, ratio 2.
    """
    peak = gates_PSH.amax(1, keepdim=True)
    raw = torch.exp((gates_PSH - peak).contiguous())
    weights = raw / (raw[:, 0:1] + raw[:, 1:2])
    return (weights[:, 0] * values_PSH[:, 0] + weights[:, 1] * values_PSH[:, 1]).to(dtype)
