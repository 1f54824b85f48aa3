"""Rotary positions: one table of frequencies per layer, chosen by the layer's compression ratio.

Layers with ratio 0 use the plain base; layers with ratio > 0 use the compressed base with YaRN for everything they
rotate (queries, window entries, compressed entries, index queries and index keys). The choice is made once per layer,
never per branch.

Source: specification section 3.3.1; released `inference/model.py`, `precompute_freqs_cis` and `apply_rotary_emb`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.deepseek_v41.config import Config, Yarn


def frequencies(config: Config, ratio: int) -> Tensor:
    """Return the angular frequencies of a layer, in radians per position.

    Args:
        config: the model.
        ratio: the layer's compression ratio.

    Returns:
        [P / 2] float32.
    """
    if ratio == 0:
        return base_frequencies(config.rope_dim, config.rope_theta)
    plain = base_frequencies(config.rope_dim, config.compress_rope_theta)
    return stretch(plain, config.rope_dim, config.compress_rope_theta, config.yarn)


def base_frequencies(rope_dim: int, theta: float) -> Tensor:
    """Return theta^(-2 i / P) for i = 0 .. P/2 - 1, as [P / 2] float32."""
    return 1.0 / (theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim))


def stretch(plain: Tensor, rope_dim: int, theta: float, yarn: Yarn) -> Tensor:
    """Slow the low frequencies down by YaRN's factor, with a linear ramp between two indices.

    Always on, whatever the length of the sequence. There is no attention temperature.

    Args:
        plain: [P / 2] float32, unstretched frequencies of base theta.
        rope_dim: P.
        theta: base of the frequencies.
        yarn: factor, original length and the two turn counts that bound the ramp.

    Returns:
        [P / 2] float32.
    """

    def index_of(turns: float) -> float:
        """Return the (fractional) index whose wave makes this many turns over the original length."""
        return rope_dim * math.log(yarn.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(index_of(yarn.beta_fast)), 0)
    high = min(math.ceil(index_of(yarn.beta_slow)), rope_dim - 1)
    width = (high - low) or 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain * (1 - ramp) + (plain / yarn.factor) * ramp


def rotate(x: Tensor, positions_T: Tensor, freqs: Tensor, *, inverse: bool = False) -> Tensor:
    """Turn the last P elements of every vector by its position.

    Neighbouring pairs (x_2i, x_2i+1) are complex numbers, multiplied by exp(+-j position f_i). The elements before the
    last P pass through.

    Args:
        x: [T, ..., n] bfloat16, n >= P.
        positions_T: [T] int64, absolute positions.
        freqs: [P / 2] float32.
        inverse: turn back (conjugate) instead.

    Returns:
        The shape of x, bfloat16.

    Numerics: the angle is the float32-rounded product position x f_i; cosine and sine of that float32 number. At large
        positions a table made in double precision is another rotation. One rounding at the end.
    """
    rope_dim = 2 * freqs.numel()
    angles = positions_T.float()[:, None] * freqs.to(positions_T.device)
    angles = angles.reshape(-1, *(1,) * (x.ndim - 2), rope_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    if inverse:
        sin = -sin
    even, odd = x[..., -rope_dim::2].float(), x[..., -rope_dim + 1 :: 2].float()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rope_dim], turned.bfloat16()), dim=-1)
