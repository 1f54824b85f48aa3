"""`quantise_q8` in PyTorch."""

import torch
from torch import Tensor

from headrace.kernels.block_quant import encode_q8


def quantise_q8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scale bytes of bfloat16 `x` [T, K]."""
    codes, scales = encode_q8(x)
    is_absent = scales == 255
    return torch.where(is_absent.repeat_interleave(32, -1), torch.full_like(codes, 0x7F), codes), scales
