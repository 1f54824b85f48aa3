"""Number formats by their definition, in float64 and loops: what the quantisers are compared with."""

import numpy as np
import torch
from torch import Tensor


def _e4m3_magnitude(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def _e2m1_magnitude(code: int) -> float:
    exponent, mantissa = code >> 1, code & 1
    return mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)


E4M3 = np.array([_e4m3_magnitude(code) for code in range(127)])  # code 127 is NaN
E2M1 = np.array([_e2m1_magnitude(code) for code in range(8)])


def nearest_code(magnitudes: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return the code of the nearest number of the grid: ties to the even code, saturating."""
    middles = (grid[1:] + grid[:-1]) / 2
    code = np.searchsorted(middles, magnitudes, side="left")  # a tie stays at the lower code ...
    is_tie = magnitudes == middles[np.minimum(code, len(middles) - 1)]
    return code + (is_tie & (code % 2 == 1))  # ... unless that is odd


def power_at_least(t: np.ndarray) -> np.ndarray:
    """Return log2 of the smallest power of two that is at least t."""
    mantissa, exponent = np.frexp(t)
    return np.where(mantissa == 0.5, exponent - 1, exponent)


def _coded(groups: np.ndarray, scale: np.ndarray, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    code = nearest_code(np.abs(groups) / scale, grid)
    sign = np.signbit(groups)
    return code | (sign << (7 if len(grid) > 8 else 3)), np.where(sign, -1.0, 1.0) * grid[code] * scale


def q8(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return scale bytes [n], codes [n, 32] and values [n, 32] of float64 groups [n, 32]."""
    amax = np.maximum(np.abs(groups).max(1), np.float64(np.float32(1e-4))).astype(np.float32)
    exponent = power_at_least(amax * np.float32(1 / 448))
    return exponent + 127, *_coded(groups, 2.0 ** exponent[:, None], E4M3)


def q4k(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return scale bytes [n], codes [n, 16] and values [n, 16] of float64 groups [n, 16]."""
    amax = np.maximum(np.abs(groups).max(1), 6 * 2.0**-9)
    byte = nearest_code((amax.astype(np.float32) / np.float32(6)).astype(np.float64), E4M3)
    return byte, *_coded(groups, E4M3[byte][:, None], E2M1)


def q4i(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return scale bytes [n], codes [n, 32] and values [n, 32] of float64 groups [n, 32]."""
    amax = np.maximum(np.abs(groups).max(1), 6 * 2.0**-126).astype(np.float32)
    exponent = power_at_least(amax * np.float32(1 / 6))
    return exponent + 127, *_coded(groups, 2.0 ** exponent[:, None], E2M1)


def finite_bf16() -> Tensor:
    """Return every finite bfloat16 number, both zeros and all subnormals included: [65280]."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return patterns[patterns.isfinite()]


def magnitudes_bf16() -> Tensor:
    """Return every finite bfloat16 number that is not negative, ascending: [32640]."""
    return torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)


def unpack(packed: Tensor) -> np.ndarray:
    """Return the 4-bit codes of bytes, low nibble first: [..., n] to [..., 2 n]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2).numpy()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Say whether two bfloat16 tensors are equal to the last bit, signs of zeros included."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def is_rounded_once(got: Tensor, want: Tensor, slack: Tensor | float) -> bool:
    """Say whether bfloat16 numbers are the nearest ones of numbers that are at most `slack` (float64) from `want`.

    Tighter than a tolerance of one rounding: a second rounding, or one in a wrong place, falls outside.
    """
    low, high = (want - slack).bfloat16(), (want + slack).bfloat16()
    return bool(((got >= low) & (got <= high)).all())
