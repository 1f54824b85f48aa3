"""Rotary position embedding on adjacent pairs, plain or with YaRN frequencies."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.kernels.native.rotation import rotate_heads
from headrace.kernels.precision import widen


def plain_frequencies(rope_dim: int, theta: float) -> Tensor:
    """Return theta ** (-2 i / rope_dim) for i = 0 .. rope_dim / 2 - 1, float32."""
    return 1.0 / (theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim))


def yarn_frequencies(
    rope_dim: int, theta: float, *, factor: float, beta_fast: float, beta_slow: float, original_positions: int
) -> Tensor:
    """Return YaRN frequencies, float32 [rope_dim / 2]; there is no attention factor.

    Source: spec section 3.3.1; always on, whatever the current length.
    """
    base = plain_frequencies(rope_dim, theta)

    def correction(turns: float) -> float:
        return rope_dim * math.log(original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return base * (1 - ramp) + base / factor * ramp


def rotation(positions_T: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, rope_dim / 2] float32.

    Numerics: the angle is the float32 product of position and frequency, as the vendor's tables are; a table in
    double precision differs by up to 0.03 rad at a million tokens.
    """
    angles = positions_T.float().unsqueeze(-1) * frequencies
    return torch.cos(angles), torch.sin(angles)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last dimensions of `x` and return a new tensor.

    Args:
        x: [T, ..., H] bfloat16; its last 2 * cos.shape[-1] dimensions are rotated, the others copied.
        cos: [T, P / 2] float32.
        sin: [T, P / 2] float32.
        inverse: rotate by the negative angle.

    Numerics: float32, one rounding. The gradient is rotated back.
    """
    rotated: Tensor = _Rotate.apply(x, cos, sin, inverse)
    return rotated


class _Rotate(torch.autograd.Function):
    """`rotate`; angles have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.inverse = inverse
        return _rotate(x, cos, sin, inverse=inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, sin, inverse=not ctx.inverse), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> Tensor:
    found = rotate_heads(x, cos, sin, inverse=inverse)
    if found is not None:
        return found
    width = 2 * cos.shape[-1]
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[-1],)
    cos, sin = cos.view(shape), sin.view(shape)
    if inverse:
        sin = -sin
    out = x.clone()
    pairs = widen(x[..., -width:]).unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    out[..., -width:] = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)
    return out
