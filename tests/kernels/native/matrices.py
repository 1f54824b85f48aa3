"""Random tiled matrices of every kind, and the instruction sets that conformance tests run on."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.native.library import available, why_absent
from headrace.kernels.native.tiles import BF16, FP4, FP8, Matrix, tile_bf16, tile_fp4, tile_fp8

on_every_instruction_set = pytest.mark.parametrize(
    "instruction_set",
    available() or [pytest.param("none", marks=pytest.mark.skip(reason=f"no native kernels: {why_absent()}"))],
)


def finite_codes(*shape: int) -> Tensor:
    """Return random E4M3 bytes of numbers."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    return torch.where((codes & 0x7F) == 0x7F, codes ^ 1, codes)


def matrix(kind: int, rows: int, width: int, scales: tuple[int, int] = (112, 134)) -> Matrix:
    """Return a random matrix whose scale bytes lie in `scales`; all codes occur in one of some size."""
    if kind == FP4:
        factors = torch.randint(*scales, (rows, width // 32), dtype=torch.uint8)
        return tile_fp4(torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8), factors)
    if kind == FP8:
        factors = torch.randint(*scales, (-(-rows // 32), width // 32), dtype=torch.uint8)
        return tile_fp8(finite_codes(rows, width), factors)
    factors = torch.exp2(torch.randint(-8, 8, (rows, 1)).float())
    return tile_bf16((torch.randn(rows, width) * factors).bfloat16())


KINDS = pytest.mark.parametrize("kind", [FP4, FP8, BF16], ids=["FP4", "FP8", "BF16"])
