"""Selection against its reference, bit for bit, on every instruction set; ties, pools, blocks of a paged store."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kernels.block_quant import encode_q4i
from headrace.kernels.native.index import Index, Shape, reference
from headrace.kernels.native.library import load
from headrace.kernels.rope import plain_frequencies, rotate, rotation
from tests.kernels.native.matrices import on_every_instruction_set

PLAIN = Shape(heads=3, width=64, rotated=16, ratio=1, top_k=12, pool_blocks=0, block_size=1, writes_pool=False)
SOURCE = replace(PLAIN, heads=9, pool_blocks=5, block_size=4, writes_pool=True)
READER = replace(SOURCE, writes_pool=False)
TOTAL, COUNT = 90, 33


def keys(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return planes of keys, their blocks of 30 in another order."""
    codes, scales = encode_q4i(values)
    return *(torch.cat([part[60:], part[:30], part[30:60]]) for part in (codes, scales)), torch.tensor([1, 2, 0])


def run(
    instruction_set: str, shape: Shape, q: Tensor, weights: Tensor, stored: tuple[Tensor, ...], pool: Tensor | None
) -> tuple[Tensor, int]:
    codes, scales, blocks = stored
    count = q.shape[0]
    picks = torch.empty((count, shape.top_k), dtype=torch.int64)
    first = TOTAL * shape.ratio - count
    turn = rotation(torch.arange(first, first + count), plain_frequencies(shape.rotated, 10000.0))
    segment = [0, count, first, codes.data_ptr(), scales.data_ptr(), blocks.data_ptr(), 30, picks.data_ptr()]
    table = np.array([[*segment, 0 if pool is None else pool.data_ptr()]])
    scored = Index(load(instruction_set), shape)((q.clone().flatten(1), weights, *turn), table)
    return picks, scored


def random(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    values = torch.randn(TOTAL, shape.width).bfloat16()
    values[40:60] = values[7]  # ties
    q, weights = torch.randn(COUNT, shape.heads, shape.width).bfloat16(), torch.rand(COUNT, shape.heads).bfloat16()
    weights[5] = 0
    return values, q, weights


@on_every_instruction_set
@pytest.mark.parametrize(
    "shape",
    [
        PLAIN,
        replace(PLAIN, ratio=2, heads=17, width=32, top_k=40),
        SOURCE,
        READER,
        replace(SOURCE, block_size=8, pool_blocks=3, top_k=3),
    ],
)
def test_picks_and_blocks_are_those_of_the_reference(instruction_set: str, shape: Shape) -> None:
    values, q, weights = random(shape)
    pool = (
        torch.stack([torch.randperm(56 // shape.block_size)[: shape.pool_blocks].sort().values for _ in range(COUNT)])
        if shape.pool_blocks
        else None
    )
    before = None if pool is None else pool.clone()
    picks, scored = run(instruction_set, shape, q, weights, keys(values), pool)
    first, total = TOTAL * shape.ratio - COUNT, 0
    turned = rotate(q, *rotation(torch.arange(first, first + COUNT), plain_frequencies(shape.rotated, 10000.0)))
    for row in range(COUNT):
        visible = (first + row + 1) // shape.ratio
        found = reference.scores(turned[row], weights[row], *encode_q4i(values[:visible]))
        wanted, blocks = reference.select(found, shape, None if before is None else before[row])
        assert torch.equal(picks[row], wanted), row
        if shape.writes_pool and pool is not None:
            assert torch.equal(pool[row], blocks)
        is_pooled = shape.pool_blocks and not shape.writes_pool
        total += 0 if visible <= shape.top_k else shape.pool_blocks * shape.block_size if is_pooled else visible
    assert scored == total


@on_every_instruction_set
def test_a_row_alone_picks_what_it_picks_among_others(instruction_set: str) -> None:
    values, q, weights = random(PLAIN)
    picks, _ = run(instruction_set, PLAIN, q, weights, keys(values), None)
    alone, _ = run(instruction_set, PLAIN, q[-1:], weights[-1:], keys(values), None)
    assert torch.equal(picks[-1:], alone)


@on_every_instruction_set
def test_rows_that_see_few_entries_take_them_all(instruction_set: str) -> None:
    shape = replace(PLAIN, top_k=100)
    picks, scored = run(instruction_set, shape, *random(shape)[1:], keys(random(shape)[0]), None)
    assert scored == 0
    assert picks[-1].tolist() == [*range(TOTAL), *[-1] * 10]


@on_every_instruction_set
@pytest.mark.parametrize("block_size", [4, 8])
def test_a_scan_that_fills_its_list_again_and_again_loses_nothing(instruction_set: str, block_size: int) -> None:
    shape = Shape(2, 32, 16, 1, 20, 16, block_size, writes_pool=True)
    values, q = torch.randn(14_003, 32).bfloat16(), torch.randn(2, 2, 32).bfloat16()
    values[9000:9500] = values[11]  # ties, some of them beyond a cut
    weights = torch.tensor([[1.0, 0.5], [-1.0, -0.5]]).bfloat16()  # the second row's scores are all zero or below
    codes, scales = encode_q4i(values)
    first = len(values) - 2
    picks, pool = torch.empty((2, 20), dtype=torch.int64), torch.empty((2, 16), dtype=torch.int64)
    turn = rotation(torch.arange(first, first + 2), plain_frequencies(16, 10000.0))
    place = [0, 2, first, codes.data_ptr(), scales.data_ptr(), 0, 1, picks.data_ptr(), pool.data_ptr()]
    Index(load(instruction_set), shape)((q.clone().flatten(1), weights, *turn), np.array([place]))
    turned = rotate(q, *turn)
    for row in range(2):
        found = reference.scores(turned[row], weights[row], codes[: first + row + 1], scales[: first + row + 1])
        wanted, blocks = reference.select(found, shape)
        assert torch.equal(picks[row], wanted)
        assert torch.equal(pool[row], blocks)
