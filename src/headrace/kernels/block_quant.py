"""Block-scaled number formats: E4M3 and E2M1 codes with E8M0 or E4M3 scales.

Three quantisers of the model (vendor numerics), all on bfloat16 input in groups along the last dimension:

    Q8   groups of 32, E8M0 scale, E4M3 codes   inputs of FP8/FP4 products, window KV
    Q4K  groups of 16, E4M3 scale, E2M1 codes   global KV
    Q4I  groups of 32, E8M0 scale, E2M1 codes   index keys and index queries

`encode_*` return stored bytes, `decode_*` turn stored bytes into bfloat16 (exact: code times scale always fits),
`fake_*` do both at once in arithmetic. FP4 packs two codes per byte, the even element in the low nibble.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

Q8_GROUP = 32
Q4K_GROUP = 16
Q4I_GROUP = 32
_ROUNDED_AT_ONCE = 1 << 17
E4M3_MAX = 448.0
E2M1_MAX = 6.0
_EXPONENT_MASK = 0x7F800000
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


Quantiser = Callable[[Tensor], Tensor]
"""Rounds activations to a number format and returns them in their own dtype."""


class _StraightThrough(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, whose gradient goes to `x` unchanged, saturation included (training.md section 6.2)."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _StraightThrough.apply(x, rounded)
    return rounded


def unrounded(x: Tensor) -> Tensor:
    """Return `x`: the quantiser that is switched off."""
    return x


def ceil_exponent(t: Tensor) -> Tensor:
    """Return the biased exponent (int32) of the smallest power of two that is >= `t`.

    `t` is float32, normal and positive; for infinity and NaN the answer is 255, the scale byte that is no number.
    """
    return (t.view(torch.int32).bitwise_and(0x7FFFFFFF).clamp_max_(_EXPONENT_MASK) + 0x7FFFFF) >> 23


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2 ** (exponent - 127) as float32 for a biased int32 exponent in 1..254."""
    return (exponent << 23).view(torch.float32)


def _round_to_grid(x: Tensor, smallest_binade: Tensor | float, mantissa_bits: int) -> Tensor:
    """Round float32 `x` half to even to `mantissa_bits` bits, with a fixed step below `smallest_binade`."""
    binade = (x.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    if isinstance(smallest_binade, Tensor):
        binade = torch.maximum(binade, smallest_binade)
    else:
        binade = binade.clamp_min(smallest_binade)
    # adding 1.5 * 2**23 steps and taking them off again leaves `x` rounded to a whole number of steps
    magic = binade.mul_(1.5 * 2.0 ** (23 - mantissa_bits))
    return (x + magic).sub_(magic)


def _groups(x: Tensor, group: int) -> Tensor:
    return x.float().view(*x.shape[:-1], x.shape[-1] // group, group)


def _q8_exponent(groups: Tensor) -> Tensor:
    amax = groups.abs().amax(-1, keepdim=True)
    return ceil_exponent(amax.clamp_min_(1e-4).mul_(1.0 / 448.0))


def fake_q8(x: Tensor) -> Tensor:
    """Round `x` [..., K] (K a multiple of 32) to Q8 and return it in its own dtype.

    The gradient passes straight through.

    Numerics: scale 2**ceil(log2(max(amax, 1e-4) / 448)), codes round half to even, exact products. What rounds to
        zero comes back as +0 (stored codes keep the sign); from 2**108 on numbers come back as NaN.
    Source: spec section 0.3, Q8.
    """
    if x.numel() <= _ROUNDED_AT_ONCE or x.dim() < 2:
        return straight_through(x, _round_q8(x.detach()))
    rows = max(1, _ROUNDED_AT_ONCE * x.shape[0] // x.numel())  # pieces that stay in cache
    return straight_through(x, torch.cat([_round_q8(piece) for piece in x.detach().split(rows)]))


def _round_q8(x: Tensor) -> Tensor:
    groups = _groups(x, Q8_GROUP)
    scale = power_of_two(_q8_exponent(groups))
    return _round_to_grid(groups, scale * 2.0**-6, 3).to(x.dtype).view(x.shape)


def encode_q8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Store bfloat16 `x` [..., K] as Q8: codes uint8 [..., K] and scale bytes uint8 [..., K / 32]."""
    groups = _groups(x, Q8_GROUP)
    exponent = _q8_exponent(groups)
    scaled = groups * power_of_two(254 - exponent)
    codes = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.view(x.shape), exponent.squeeze(-1).to(torch.uint8)


def _fp4_codes(scaled: Tensor) -> Tensor:
    """Return packed E2M1 codes of float32 `scaled` [..., n, group] (already divided by the scale)."""
    rounded = _round_to_grid(scaled.clamp(-E2M1_MAX, E2M1_MAX), 1.0, 1)
    doubled = rounded.abs().mul_(2.0).to(torch.uint8)  # 0 1 2 3 4 6 8 12
    codes = _doubled_to_code(scaled.device)[doubled.int()] | (torch.signbit(scaled).to(torch.uint8) << 3)
    codes = codes.flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


@cache
def _doubled_to_code(device: torch.device) -> Tensor:
    table = torch.zeros(13, dtype=torch.uint8)
    for code, value in enumerate(_E2M1_VALUES):
        table[int(2 * value)] = code
    return table.to(device)


def encode_q4k(x: Tensor) -> tuple[Tensor, Tensor]:
    """Store bfloat16 `x` [..., K] as Q4K: packed codes uint8 [..., K / 2], E4M3 scale bytes uint8 [..., K / 16].

    Source: spec section 0.3, Q4K; the scale is used as it is (no second-level scale).
    """
    groups = _groups(x, Q4K_GROUP)
    amax = groups.abs().amax(-1, keepdim=True)
    scale = (amax.clamp_min_(E2M1_MAX * 2.0**-9) / E2M1_MAX).clamp_max_(E4M3_MAX).to(torch.float8_e4m3fn)
    return _fp4_codes(groups / scale.float()), scale.view(torch.uint8).squeeze(-1)


def encode_q4i(x: Tensor) -> tuple[Tensor, Tensor]:
    """Store bfloat16 `x` [..., K] as Q4I: packed codes uint8 [..., K / 2], E8M0 scale bytes uint8 [..., K / 32].

    Source: spec section 0.3, Q4I.
    """
    groups = _groups(x, Q4I_GROUP)
    amax = groups.abs().amax(-1, keepdim=True)
    exponent = ceil_exponent(amax.clamp_min_(E2M1_MAX * 2.0**-126).mul_(1.0 / 6.0))
    return _fp4_codes(groups / power_of_two(exponent)), exponent.squeeze(-1).to(torch.uint8)


@cache
def _e2m1_quads(device: torch.device) -> Tensor:
    """Four bfloat16 values (as one int64) for every 16-bit pattern of four FP4 codes, offset by 32768."""
    values = torch.tensor(_E2M1_VALUES + tuple(-v for v in _E2M1_VALUES), dtype=torch.bfloat16)
    pattern = torch.arange(-32768, 32768) & 0xFFFF
    quads = torch.stack([values[(pattern >> shift) & 15] for shift in (0, 4, 8, 12)], -1)
    return quads.contiguous().view(torch.int64).view(-1).to(device)


@cache
def _e4m3_pairs(device: torch.device) -> Tensor:
    """Two bfloat16 values (as one int32) for every 16-bit pattern of two E4M3 codes, offset by 32768."""
    pattern = torch.arange(-32768, 32768) & 0xFFFF
    codes = torch.stack([pattern & 255, pattern >> 8], -1).to(torch.uint8)
    pairs = codes.view(torch.float8_e4m3fn).to(torch.bfloat16)
    return pairs.contiguous().view(torch.int32).view(-1).to(device)


def _look_up_16(table: Tensor, packed: Tensor, per_byte: int) -> Tensor:
    """Replace every two bytes of contiguous `packed` by their entry of `table`: `per_byte` bfloat16 values a byte."""
    index = packed.view(torch.int16).to(torch.int32).add_(32768)
    values = torch.index_select(table, 0, index.view(-1)).view(torch.bfloat16)
    return values.view(*packed.shape[:-1], packed.shape[-1] * per_byte)  # spelled out: there may be no rows


def e2m1_values(packed: Tensor) -> Tensor:
    """Return the bfloat16 values of packed FP4 codes: uint8 [..., K / 2] to [..., K]; K a multiple of 4."""
    return _look_up_16(_e2m1_quads(packed.device), packed, 2)


def e4m3_values(codes: Tensor) -> Tensor:
    """Return the bfloat16 values of E4M3 codes: uint8 [..., K] to [..., K]; exact."""
    if codes.shape[-1] % 2:
        return codes.view(torch.float8_e4m3fn).to(torch.bfloat16)
    return _look_up_16(_e4m3_pairs(codes.device), codes, 1)


def e8m0_values(scales: Tensor) -> Tensor:
    """Return the bfloat16 values 2 ** (byte - 127) of E8M0 bytes (uint8), exact from byte 0 to 254."""
    # the byte is the exponent field; byte 0 is the subnormal 2 ** -127, bit pattern 0x40
    return (scales.to(torch.int16) << 7).clamp_min_(0x40).view(torch.bfloat16)


def _scaled(values: Tensor, scales: Tensor, group: int) -> Tensor:
    grouped = values.view(*values.shape[:-1], values.shape[-1] // group, group)
    return grouped.mul_(scales.unsqueeze(-1)).view(values.shape)


def decode_q8(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the bfloat16 values of Q8 bytes: codes uint8 [..., K], scale bytes uint8 [..., K / 32]."""
    return _scaled(e4m3_values(codes), e8m0_values(scales), Q8_GROUP)


def decode_q4k(packed: Tensor, scales: Tensor) -> Tensor:
    """Return the bfloat16 values of Q4K bytes: packed uint8 [..., K / 2], scale bytes uint8 [..., K / 16]."""
    return _scaled(e2m1_values(packed), e4m3_values(scales), Q4K_GROUP)


def decode_q4i(packed: Tensor, scales: Tensor) -> Tensor:
    """Return the bfloat16 values of Q4I bytes: packed uint8 [..., K / 2], scale bytes uint8 [..., K / 32]."""
    return _scaled(e2m1_values(packed), e8m0_values(scales), Q4I_GROUP)


def fake_q4k(x: Tensor) -> Tensor:
    """Round `x` [..., K] to Q4K and return it in its own dtype; the gradient passes straight through."""
    return straight_through(x, decode_q4k(*encode_q4k(x.detach())).to(x.dtype))


def fake_q4i(x: Tensor) -> Tensor:
    """Round `x` [..., K] to Q4I and return it in its own dtype; the gradient passes straight through."""
    return straight_through(x, decode_q4i(*encode_q4i(x.detach())).to(x.dtype))


def decode_fp4_weight(packed_NK2: Tensor, scales: Tensor) -> Tensor:
    """Return a routed expert's matrix as bfloat16 [N, K] from packed codes [N, K / 2] and E8M0 bytes [N, K / 32]."""
    return decode_q4i(packed_NK2, scales)


def decode_fp8_weight(codes_NK: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return an FP8 matrix as bfloat16 [N, K] from codes uint8 [N, K] and E8M0 bytes of `block` x `block` blocks."""
    num_rows, width = codes_NK.shape
    values = e4m3_values(codes_NK)
    factors = e8m0_values(scales).repeat_interleave(block, 0)[:num_rows]
    if width % block == 0:
        return _scaled(values, factors, block)
    return values.mul_(factors.repeat_interleave(block, 1)[:, :width])
