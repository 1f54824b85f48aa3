"""In which dtype intermediate values are computed: float32, or float64 where the input is (gradient checks)."""

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and statistics over values of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """Return `x` in the dtype of its sums and statistics (itself if it has that dtype)."""
    return x.to(wide_dtype(x.dtype))
