"""Selection against its reference, bit for bit, on every instruction set; ties, pools, blocks of a paged store."""

from collections.abc import Callable
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


def wild(shape: Shape, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, queries and weights of every size: what fits eight bits together, and what does not."""
    values, q = torch.randn(total, shape.width).bfloat16(), torch.randn(3, shape.heads, shape.width).bfloat16()
    values[100:110] *= 2.0**-45
    values[300:310] *= 2.0**45
    values[64:72, :32] = 0.0
    values[600:700] = values[11]  # ties
    q[:, 0, :32] = 0.0
    q[1, -1] *= 2.0**40
    weights = torch.randn(3, shape.heads).bfloat16()
    weights[0, 1:2] = 0.0
    weights[2, 0] = 2.0**-38
    return values, q, weights


@on_every_instruction_set
@pytest.mark.parametrize(("heads", "width"), [(1, 32), (5, 64), (9, 128), (2, 96)])
@pytest.mark.parametrize("writes_pool", [True, False])
def test_keys_and_queries_of_any_size_are_scored_as_the_reference_does(
    instruction_set: str, heads: int, width: int, writes_pool: bool
) -> None:
    shape = Shape(heads, width, 16, 1, 20, 32, 8, writes_pool)
    total, per_block = 1500, 64
    values, q, weights = wild(shape, total)
    codes, scales = encode_q4i(values)
    blocks = torch.randperm(-(-total // per_block))
    stored = [torch.zeros((len(blocks) * per_block, part.shape[1]), dtype=torch.uint8) for part in (codes, scales)]
    places = blocks[torch.arange(total) // per_block] * per_block + torch.arange(total) % per_block
    for plane, part in zip(stored, (codes, scales), strict=True):
        plane[places] = part
    first = total - 3
    picks = torch.empty((3, 20), dtype=torch.int64)
    pool = torch.stack([torch.randperm(total // 8)[:32].sort().values for _ in range(3)])
    pool[:, -1] = (total - 1) // 8  # not whole for the first rows
    before = pool.clone()
    turn = rotation(torch.arange(first, total), plain_frequencies(16, 10000.0))
    place = [0, 3, first, stored[0].data_ptr(), stored[1].data_ptr(), blocks.data_ptr(), per_block]
    table = np.array([[*place, picks.data_ptr(), pool.data_ptr()]])
    Index(load(instruction_set), shape)((q.clone().flatten(1), weights, *turn), table)
    turned = rotate(q, *turn)
    for row in range(3):
        visible = first + row + 1
        found = reference.scores(turned[row], weights[row], codes[:visible], scales[:visible])
        wanted, kept = reference.select(found, shape, before[row])
        assert torch.equal(picks[row], wanted)
        assert not writes_pool or torch.equal(pool[row], kept)


@on_every_instruction_set
@pytest.mark.parametrize("pool_blocks", [0, 40])
def test_threads_share_a_long_scan_and_change_nothing(instruction_set: str, pool_blocks: int) -> None:
    library = load(instruction_set)
    shape = Shape(2, 32, 16, 1, 30, pool_blocks, 8 if pool_blocks else 1, writes_pool=bool(pool_blocks))
    total = 66_001
    codes = torch.randint(0, 256, (total, 16), dtype=torch.uint8)
    scales = torch.randint(124, 127, (total, 1), dtype=torch.uint8)
    q, weights = torch.randn(1, 64).bfloat16(), torch.randn(1, 2).bfloat16()
    turn = rotation(torch.tensor([total - 1]), plain_frequencies(16, 10000.0))
    found = []
    try:
        for threads in (1, 2, 3):
            library.use_threads(threads)
            picks, pool = (torch.empty((1, count), dtype=torch.int64) for count in (30, pool_blocks))
            place = [0, 1, total - 1, codes.data_ptr(), scales.data_ptr(), 0, 1, picks.data_ptr(), pool.data_ptr()]
            assert Index(library, shape)((q.clone(), weights, *turn), np.array([place])) == total
            found.append(torch.cat([picks, pool], 1))
    finally:
        library.use_threads(1)
    turned = rotate(q.view(1, 2, 32), *turn)[0]
    picked, kept = reference.select(reference.scores(turned, weights[0], codes, scales), shape)
    wanted = picked if kept is None else torch.cat([picked, kept])
    for one in found:
        assert torch.equal(one[0], wanted)


def lifted() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries [2, 32], weights and two keys: 129 * 1.75 + 1 is 227; 129.5 * 1.75 is less and becomes 228."""
    q, low, high = torch.zeros(2, 32), torch.zeros(32), torch.zeros(32)
    q[0, :5] = torch.tensor([6, 6, 6, 6, 0.5])
    q[1, 30:] = torch.tensor([6, 4])
    low[:5], low[31] = torch.tensor([6, 6, 6, 3, 6]), 0.5
    high[:5], q[0, 5], high[5] = low[:5], 0.5, 1.0
    return q, torch.tensor([1.75, 0.5]), low, high


def lifted_below_the_normal_numbers() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same of three heads, in units of the smallest bfloat16 number: 2 * 0.8 is 2, three of 0.75 are 3."""
    q, low, high = torch.zeros(3, 32), torch.zeros(32), torch.zeros(32)
    q[:, 0] = 6
    for head in range(3):
        q[head, 2 + head] = 0.5
    low[1:3], high[1:5] = torch.tensor([6, 4]), torch.tensor([6, 1.5, 1.5, 1.5])
    return q * 2.0**-33, torch.full((3,), 0.8), low * 2.0**-100, high * 2.0**-100


@on_every_instruction_set
@pytest.mark.parametrize("case", [lifted, lifted_below_the_normal_numbers])
def test_a_key_that_only_rounding_lifts_over_the_list_is_in_it(
    instruction_set: str, case: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]
) -> None:
    q, weights, low, high = (part.bfloat16() for part in case())
    shape = Shape(len(q), 32, 16, 1, 4, 0, 1, writes_pool=False)
    codes, scales = encode_q4i(torch.cat([low.expand(200, 32), high.expand(4, 32)]))
    found = reference.scores(q, weights, codes, scales)
    assert found[0] < found[200]
    picks, turn = torch.empty((1, 4), dtype=torch.int64), (torch.ones(1, 8), torch.zeros(1, 8))
    place = [0, 1, 203, codes.data_ptr(), scales.data_ptr(), 0, 1, picks.data_ptr(), 0]
    Index(load(instruction_set), shape)((q.clone().view(1, -1), weights.view(1, -1), *turn), np.array([place]))
    assert picks[0].tolist() == [200, 201, 202, 203]


@on_every_instruction_set
@pytest.mark.parametrize(("part", "value"), [("query", "nan"), ("query", "inf"), ("weight", "nan"), ("weight", "-inf")])
def test_what_is_no_number_is_ranked_as_on_every_processor(instruction_set: str, part: str, value: str) -> None:
    shape = Shape(2, 64, 16, 1, 20, 16, 8, writes_pool=True)
    q, weights = torch.randn(1, 128).bfloat16(), torch.randn(1, 2).bfloat16()
    (q if part == "query" else weights)[0, 1] = float(value)
    codes, scales = encode_q4i(torch.randn(999, 64).bfloat16())
    turn, found = rotation(torch.tensor([998]), plain_frequencies(16, 10000.0)), []
    for name in ("portable", instruction_set):
        picks, pool = (torch.empty((1, count), dtype=torch.int64) for count in (20, 16))
        place = [0, 1, 998, codes.data_ptr(), scales.data_ptr(), 0, 1, picks.data_ptr(), pool.data_ptr()]
        Index(load(name), shape)((q.clone(), weights, *turn), np.array([place]))
        found.append(torch.cat([picks, pool], 1))
    assert torch.equal(*found)


@on_every_instruction_set
def test_scores_far_below_zero_are_kept_where_there_is_nothing_better(instruction_set: str) -> None:
    shape = Shape(2, 32, 16, 1, 200, 20, 8, writes_pool=True)
    codes, scales = encode_q4i(torch.randn(300, 32).bfloat16())
    q, weights = torch.randn(1, 2, 32).bfloat16(), torch.full((1, 2), -9.0).bfloat16()
    turn = rotation(torch.tensor([299]), plain_frequencies(16, 10000.0))
    picks, pool = (torch.empty((1, count), dtype=torch.int64) for count in (200, 20))
    place = [0, 1, 299, codes.data_ptr(), scales.data_ptr(), 0, 1, picks.data_ptr(), pool.data_ptr()]
    Index(load(instruction_set), shape)((q.clone().flatten(1), weights, *turn), np.array([place]))
    found = reference.scores(rotate(q, *turn)[0], weights[0], codes, scales)
    wanted, blocks = reference.select(found, shape)
    assert (found < -2.0).sum() > 100
    assert torch.equal(picks[0], wanted)
    assert torch.equal(pool[0], blocks)
