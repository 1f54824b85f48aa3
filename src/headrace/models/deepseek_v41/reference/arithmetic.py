"""Number formats, activation quantisers, linear layers and RMSNorm, written for reading.

Everything the model rounds is rounded here. Read `quantise_window`, `quantise_entry` and `quantise_index` first: they
are part of the trained numerics, not an approximation of them. This module knows no layer names and no configuration.

Source: specification sections 0.2 to 0.5; released `inference/kernel.py` and `inference/model.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace.core.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    Weights = Mapping[str, Tensor]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WEIGHT_BLOCK = 32  # scales of FP8 weights: one per 32 x 32; of FP4 weights and table rows: one per 32 columns


class Groups(NamedTuple):
    """A quantised tensor: what a packed cache would hold, still one element per number.

    Attributes:
        values: [..., n] float32, the codes as numbers (E4M3 or E2M1 values), before the scale.
        scales: [..., n // group] float32, exact values of the E8M0 or E4M3 scales.
        group: number of neighbouring elements that share a scale.
    """

    values: Tensor
    scales: Tensor
    group: int

    def dequantise(self) -> Tensor:
        """Return value x scale as bfloat16, which holds every such product exactly."""
        return (self.values * self.scales.repeat_interleave(self.group, dim=-1)).bfloat16()


# ---------------------------------------------------------------------------------------------------- element formats


def round_to_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest E4M3 number, ties to even, saturating at +-448.

    Args:
        x: any shape, float32.

    Returns:
        The same shape, float8_e4m3fn.
    """
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e8m0_values(scale: Tensor) -> Tensor:
    """Return the value 2^(byte - 127) of every E8M0 scale; byte 255 is NaN.

    Args:
        scale: any shape, float8_e8m0fnu.

    Returns:
        The same shape, float32.
    """
    byte = scale.view(torch.uint8)
    exponent = byte.to(torch.int32) - 127
    # float64 holds 2^-127 as a normal number; float32 holds it, and all others, exactly
    value = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).float()
    return value.masked_fill(byte == 255, torch.nan)


def e2m1_codes(x: Tensor) -> Tensor:
    """Round to E2M1 codes: bits s.ee.m, ties to the even code, saturating at +-6.

    The midpoints 0.25, 0.75, 1.25, 1.75, 2.5, 3.5 and 5 go to the codes 0, 2, 2, 4, 4, 6 and 6, so the midpoints in odd
    places belong to the upper code. A number that rounds to zero keeps its sign (code 8 is -0).

    Args:
        x: any shape, float32.

    Returns:
        The same shape, uint8 in 0..15.
    """
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for midpoint, goes_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += (magnitude >= midpoint) if goes_up else (magnitude > midpoint)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_values(codes: Tensor) -> Tensor:
    """Return the numbers of E2M1 codes.

    Args:
        codes: any shape, uint8 in 0..15.

    Returns:
        The same shape, float32.
    """
    table = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], device=codes.device)
    return table[codes.long()]


def unpack_codes(packed: Tensor) -> Tensor:
    """Split bytes into two 4-bit codes each; the low nibble is the even element.

    Args:
        packed: [..., n] int8 or uint8.

    Returns:
        [..., 2 n] uint8 in 0..15.
    """
    byte = packed.view(torch.uint8)
    return torch.stack((byte & 15, byte >> 4), dim=-1).flatten(-2)


def pack_codes(codes: Tensor) -> Tensor:
    """Join neighbouring 4-bit codes into bytes; the even element goes to the low nibble.

    Args:
        codes: [..., 2 n] uint8 in 0..15.

    Returns:
        [..., n] uint8.
    """
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


# --------------------------------------------------------------------------------------------------------- quantisers


def power_of_two_at_least(t: Tensor) -> Tensor:
    """Return 2^ceil(log2 t) from the bits of t: the exponent, plus one if any mantissa bit is set.

    Args:
        t: any shape, float32, positive and normal.

    Returns:
        The same shape, float32 powers of two.
    """
    bits = t.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def _grouped(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return x as float32 groups [..., n // group, group] and the largest magnitude of each group."""
    groups = x.float().unflatten(-1, (-1, group))
    return groups, groups.abs().amax(dim=-1, keepdim=True)


def quantise_window(x: Tensor) -> Groups:
    """Q8: E4M3 in groups of 32 with power-of-two scales; inputs of FP8 and FP4 linears, and window entries.

    Args:
        x: [..., n] bfloat16, n a multiple of 32.

    Numerics: scale = P(max(amax, 1e-4) / 448), at least 2^-22.
    Source: specification section 0.3.
    """
    groups, amax = _grouped(x, 32)
    scale = power_of_two_at_least(amax.clamp(min=1e-4) * (1 / E4M3_MAX))
    return Groups(round_to_e4m3(groups / scale).float().flatten(-2), scale.squeeze(-1), 32)


def quantise_entry(x: Tensor) -> Groups:
    """Q4K: E2M1 in groups of 16 with E4M3 scales; compressed key/value entries.

    Args:
        x: [..., n] bfloat16, n a multiple of 16.

    Numerics: scale = E4M3(max(amax, 6 x 2^-9) / 6), rounded to nearest, so the largest element may saturate.
    Source: specification section 0.3.
    """
    groups, amax = _grouped(x, 16)
    scale = round_to_e4m3(amax.clamp(min=6 * 2.0**-9) / 6).float()
    values = e2m1_values(e2m1_codes((groups / scale).clamp(-E2M1_MAX, E2M1_MAX)))
    return Groups(values.flatten(-2), scale.squeeze(-1), 16)


def quantise_index(x: Tensor) -> Groups:
    """Q4I: E2M1 in groups of 32 with power-of-two scales; index keys and index queries.

    Args:
        x: [..., n] bfloat16, n a multiple of 32.

    Numerics: scale = P(max(amax, 6 x 2^-126) / 6).
    Source: specification section 0.3.
    """
    groups, amax = _grouped(x, 32)
    scale = power_of_two_at_least(amax.clamp(min=6 * 2.0**-126) * (1 / E2M1_MAX))
    values = e2m1_values(e2m1_codes((groups / scale).clamp(-E2M1_MAX, E2M1_MAX)))
    return Groups(values.flatten(-2), scale.squeeze(-1), 32)


# ------------------------------------------------------------------------------------------------- stored weights


def dequantise_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """Return an E4M3 matrix with one scale per 32 x 32 block as numbers.

    Args:
        weight: [n, k] float8_e4m3fn.
        scale: [ceil(n / 32), ceil(k / 32)] float8_e8m0fnu.

    Returns:
        [n, k] float32, exact.
    """
    n, k = weight.shape
    spread = e8m0_values(scale).repeat_interleave(WEIGHT_BLOCK, 0).repeat_interleave(WEIGHT_BLOCK, 1)
    return weight.float() * spread[:n, :k]


def dequantise_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Return a packed E2M1 matrix with one scale per row and 32 columns as numbers.

    Args:
        packed: [n, k / 2] int8 or uint8, two codes a byte.
        scale: [n, k / 32] float8_e8m0fnu.

    Returns:
        [n, k] float32, exact.
    """
    return e2m1_values(unpack_codes(packed)) * e8m0_values(scale).repeat_interleave(WEIGHT_BLOCK, dim=-1)


def dequantise_rows(rows: Tensor, scale: Tensor) -> Tensor:
    """Return rows of an n-gram table as numbers.

    Args:
        rows: [..., W] float8_e4m3fn.
        scale: [..., W / 32] float8_e8m0fnu, one per row and 32 columns (not per 32 x 32 block).

    Returns:
        [..., W] bfloat16, exact.
    """
    return (rows.float() * e8m0_values(scale).repeat_interleave(WEIGHT_BLOCK, dim=-1)).bfloat16()


# ------------------------------------------------------------------------------------------------------ linear, norm


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return x W^T, quantising x first when W is stored in FP8 or FP4.

    Args:
        weights: official tensor names to tensors in stored dtype.
        name: module name; the matrix is `{name}.weight`, its scales `{name}.scale`, an optional bias `{name}.bias`.
        x: [T, k] bfloat16.

    Returns:
        [T, n] bfloat16.

    Raises:
        InternalError: the matrix has a dtype that no linear of this family has.

    Numerics: products and sums in float32 (products of codes are exact), one rounding at the end; a bias is added
        before it. Skipping the quantisation of x would be another function.
    Source: specification section 0.4.
    """
    weight = weights[f"{name}.weight"]
    if weight.dtype == torch.bfloat16:
        numbers, x = weight.float(), x.float()
    elif weight.dtype == torch.float8_e4m3fn:
        numbers, x = dequantise_fp8(weight, weights[f"{name}.scale"]), quantise_window(x).dequantise().float()
    elif weight.dtype in (torch.int8, torch.uint8):
        numbers, x = dequantise_fp4(weight, weights[f"{name}.scale"]), quantise_window(x).dequantise().float()
    else:
        message = f"{name}.weight has dtype {weight.dtype}; a linear is bfloat16, float8_e4m3fn or packed int8."
        raise InternalError(message)
    y = x @ numbers.T
    if f"{name}.bias" in weights:
        y = y + weights[f"{name}.bias"].float()
    return y.bfloat16()


def linear_fp32(weight: Tensor, x: Tensor) -> Tensor:
    """Return x W^T entirely in float32: router, stream mixes, ratio-2 compressor, vocabulary and draft heads.

    Args:
        weight: [n, k] bfloat16 or float32.
        x: [T, k] bfloat16 or float32.

    Returns:
        [T, n] float32, not rounded further.
    """
    return x.float() @ weight.float().T


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last axis and multiply by a weight (no "1 +").

    Args:
        x: [..., n] bfloat16 or float32.
        weight: [n] bfloat16.
        eps: added to the mean square; 1e-20 in the text model, so a zero vector stays zero.

    Returns:
        [..., n] bfloat16.

    Numerics: float32 throughout, one rounding at the end.
    Source: specification section 0.5.
    """
    x = x.float()
    return (weight.float() * (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps))).bfloat16()
