"""Root-mean-square normalisation with one rounding at the end."""

import torch
from torch import Tensor

from headrace.kernels.precision import widen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension and scale it.

    Args:
        x: [..., D] bfloat16.
        weight: [D] float32.
        eps: added to the mean square; 1e-20 in the text model, so a zero row gives zeros.

    Returns:
        [..., D] bfloat16.

    Numerics: float32 throughout, one rounding to bfloat16.
    Source: spec section 0.5.
    """
    wide = widen(x)
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * factor * weight).to(x.dtype)
