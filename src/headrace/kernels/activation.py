"""Sigmoid, SiLU and softplus whose elements do not depend on where they stand in a tensor.

The library versions use other instructions for the last few elements of a tensor than for the rest, so an element's
bits can change with the number of rows. `exp` and `log1p` do not, and these functions are built from them.
"""

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), float32."""
    return 1.0 / (1.0 + torch.exp(-x.contiguous()))


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)), float32."""
    return x / (1.0 + torch.exp(-x.contiguous()))


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), float32; above 20 that is `x` to the last bit."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.contiguous().clamp_max(20.0))))
