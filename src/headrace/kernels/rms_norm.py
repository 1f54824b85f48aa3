"""Root-mean-square normalisation with one rounding at the end."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    normalised: Tensor = _RmsNorm.apply(x, weight, eps)
    return normalised


class _RmsNorm(torch.autograd.Function):
    """`rms_norm` and its gradient in few passes; the sum over rows for a gain belongs to one thread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = widen(x)
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, factor)
        return (wide * factor).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factor = ctx.saved_tensors
        plain, g = widen(x) * factor, widen(gradient)
        of_weight = (g * plain).flatten(0, -2).sum(0)
        g = g * weight
        share = (g * plain).mean(-1, keepdim=True)
        return g.addcmul_(plain, share, value=-1.0).mul_(factor).to(x.dtype), of_weight, None
