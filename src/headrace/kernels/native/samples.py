"""Seeded inputs of conformance cases and benchmarks: rows of every size of number, matrices of every kind."""

import torch
from torch import Tensor

from headrace.kernels.native.tiles import BF16, FP4, FP8, GROUP, Matrix, tile_bf16, tile_fp4, tile_fp8
from headrace.kernels.rope import plain_frequencies, rotation


class Samples:
    """Random numbers of one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Return normal float32 numbers."""
        return torch.randn(shape, generator=self._generator)

    def positive(self, *shape: int) -> Tensor:
        """Return float32 numbers from 0.5 to 1.5, as norm weights have them."""
        return torch.rand(shape, generator=self._generator) + 0.5

    def rows(self, count: int, width: int, spread: int = 0) -> Tensor:
        """Return bfloat16 rows whose sizes differ by up to 2 ** spread each way; the row in the middle is zero."""
        factors = torch.exp2(self.integers(-spread, spread + 1, count, 1).float())
        found = (self.normal(count, width) * factors).bfloat16()
        if count > 2:
            found[count // 2] = 0
        return found

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return int64 numbers from `low` to `high` - 1."""
        return torch.randint(low, high, shape, generator=self._generator)

    def codes(self, *shape: int) -> Tensor:
        """Return E4M3 bytes of numbers; all 254 occur, in order, where there are as many."""
        found = self.integers(0, 256, *shape).to(torch.uint8)
        found = torch.where((found & 0x7F) == 0x7F, found ^ 1, found)
        numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
        if found.numel() >= len(numbers):
            found.view(-1)[: len(numbers)] = numbers
        return found

    def matrix(self, kind: int, rows: int, width: int, scales: tuple[int, int] = (112, 134)) -> Matrix:
        """Return a matrix whose scale bytes are at least the first of `scales` and below the second."""
        if kind == FP4:
            packed = self.integers(0, 256, rows, width // 2).to(torch.uint8)
            return tile_fp4(packed, self.integers(*scales, rows, width // GROUP).to(torch.uint8))
        if kind == FP8:
            factors = self.integers(*scales, -(-rows // GROUP), width // GROUP).to(torch.uint8)
            return tile_fp8(self.codes(rows, width), factors)
        return tile_bf16((self.normal(rows, width) * torch.exp2(self.integers(-8, 8, rows, 1).float())).bfloat16())

    def turn(self, first: int, count: int, rotated: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions `first` onwards."""
        return rotation(torch.arange(first, first + count), plain_frequencies(rotated, 10000.0))


KINDS = {"FP4": FP4, "FP8": FP8, "BF16": BF16}
