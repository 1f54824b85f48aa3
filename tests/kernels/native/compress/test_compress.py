"""Entries and index keys against their reference, bit for bit, on every instruction set."""

import itertools

import pytest
import torch
from torch import Tensor

from headrace.kernels.native.compress import Compressor, NewRows, Places, reference
from headrace.kernels.native.library import load
from headrace.kernels.native.tiles import BF16, Matrix
from headrace.kernels.rope import plain_frequencies, rotation
from tests.kernels.native.matrices import matrix, on_every_instruction_set

WIDTH, KEY, ROTATED = 64, 32, 16


def weights() -> tuple[Tensor, Matrix, Tensor]:
    return torch.rand(WIDTH) + 0.5, matrix(BF16, KEY, WIDTH), torch.rand(KEY) + 0.5


def planes(rows: int) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros((rows, width), dtype=torch.uint8) for width in (WIDTH // 2, WIDTH // 16, KEY // 2, KEY // 32)
    )


def turn(row: int, entries: int, ratio: int) -> tuple[Tensor, Tensor]:
    return rotation(torch.arange(row, row + entries) * ratio, plain_frequencies(ROTATED, 10000.0))


@on_every_instruction_set
def test_latents_of_ratio_one_are_stored_where_their_blocks_are(instruction_set: str) -> None:
    used = weights()
    latents = (torch.randn(9, WIDTH) * torch.exp2(torch.randint(-30, 30, (9, 1)).float())).bfloat16()
    latents[2] = 0
    found = planes(30)
    run = Compressor(load(instruction_set), *used, rotated=ROTATED, eps=1e-20)
    where = Places(found, torch.tensor([2, 0, 1]), 10)
    run(NewRows(latents, None, None, 6, 6, 9, 1), turn(6, 9, 1), where)
    wanted = reference.store(latents, used, turn(6, 9, 1), 1e-20)
    for part, expected in zip(found, wanted, strict=True):
        assert torch.equal(torch.cat([part[26:30], part[0:5]])[1:], expected[1:])
        assert not part[26].any()  # it was there already


@on_every_instruction_set
@pytest.mark.parametrize("cuts", [(0, 7, 20), (0, 1, 2, 9, 20), (0, 20), (0, 3, 4, 5, 20)])
def test_pairs_are_pooled_wherever_chunks_begin(instruction_set: str, cuts: tuple[int, ...]) -> None:
    used, depth = weights(), 5
    values, gates = torch.randn(20, WIDTH), torch.randn(20, WIDTH) * 4
    found, history = planes(10), torch.zeros(depth, 2, WIDTH)
    run = Compressor(load(instruction_set), *used, rotated=ROTATED, eps=1e-20)
    for low, high in itertools.pairwise(cuts):
        row, entries = low // 2, high // 2 - low // 2
        new = NewRows(values[low:high], gates[low:high], history, low, row, entries, 0)
        run(new, turn(row, entries, 2), Places(found, None, 1))
    pooled = reference.pool(values.view(10, 2, WIDTH), gates.view(10, 2, WIDTH))
    for part, expected in zip(found, reference.store(pooled, used, turn(0, 10, 2), 1e-20), strict=True):
        assert torch.equal(part, expected)
    assert torch.equal(history[19 % depth], torch.stack([values[19], gates[19]]))
