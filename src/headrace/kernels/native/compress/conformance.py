"""Cases of entries and index keys: both ratios, wherever chunks begin, blocks in any order, entries of every size."""

import itertools

import torch
from torch import Tensor

from headrace.kernels.native.compress import Compressor, NewRows, Places, reference
from headrace.kernels.native.conformance import Case
from headrace.kernels.native.library import Library
from headrace.kernels.native.samples import Samples
from headrace.kernels.native.tiles import BF16, Matrix

_WIDTH, _KEY, _ROTATED, _DEPTH = 64, 32, 16, 5


def cases() -> list[Case]:
    """Return the cases."""
    cuts = ((0, 7, 20), (0, 1, 2, 9, 20), (0, 20), (0, 3, 4, 5, 20))
    return [_single(Samples(40)), *(_pairs(Samples(41), one) for one in cuts)]


def _weights(samples: Samples) -> tuple[Tensor, Matrix, Tensor]:
    return samples.positive(_WIDTH), samples.matrix(BF16, _KEY, _WIDTH), samples.positive(_KEY)


def _planes(rows: int) -> tuple[Tensor, ...]:
    widths = (_WIDTH // 2, _WIDTH // 16, _KEY // 2, _KEY // 32)
    return tuple(torch.full((rows, width), 0x55, dtype=torch.uint8) for width in widths)


def _turn(samples: Samples, row: int, entries: int, ratio: int) -> tuple[Tensor, Tensor]:
    cos, sin = samples.turn(0, ratio * (row + entries), _ROTATED)
    return cos[row * ratio :: ratio].contiguous(), sin[row * ratio :: ratio].contiguous()


def _single(samples: Samples) -> Case:
    weights, latents = _weights(samples), samples.rows(9, _WIDTH, 30)
    turn = _turn(samples, 6, 9, 1)

    def run(library: Library) -> list[Tensor]:
        found = _planes(30)
        where = Places(found, torch.tensor([2, 0, 1]), 10)
        Compressor(library, *weights, rotated=_ROTATED, eps=1e-20)(
            NewRows(latents, None, None, 6, 6, 9, 1), turn, where
        )
        return list(found)

    def wanted() -> list[Tensor]:
        planes = _planes(30)
        for plane, part in zip(planes, reference.store(latents, weights, turn, 1e-20), strict=True):
            plane[27:30], plane[0:5] = part[1:4], part[4:9]  # row 6, at place 26, was there already
        return list(planes)

    return Case("ratio 1, blocks out of order", run, wanted)


def _pairs(samples: Samples, cuts: tuple[int, ...]) -> Case:
    weights, values, gates = _weights(samples), samples.normal(20, _WIDTH), samples.normal(20, _WIDTH) * 4

    def run(library: Library) -> list[Tensor]:
        found, history = _planes(10), torch.zeros(_DEPTH, 2, _WIDTH)
        compressor = Compressor(library, *weights, rotated=_ROTATED, eps=1e-20)
        for low, high in itertools.pairwise(cuts):
            row, entries = low // 2, high // 2 - low // 2
            new = NewRows(values[low:high], gates[low:high], history, low, row, entries, 0)
            compressor(new, _turn(samples, row, entries, 2), Places(found, None, 1))
        return [*found, history[19 % _DEPTH]]

    def wanted() -> list[Tensor]:
        pooled = reference.pool(values.view(10, 2, _WIDTH), gates.view(10, 2, _WIDTH))
        stored = reference.store(pooled, weights, _turn(samples, 0, 10, 2), 1e-20)
        return [*stored, torch.stack([values[19], gates[19]])]

    return Case(f"ratio 2, chunks {cuts}", run, wanted)
