"""Scores, picks and candidate blocks against plain sorting, with every kind of tie and border."""

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import index_topk as it
from headrace.kernels.block_quant import decode_q4i, encode_q4i
from headrace.kernels.index_topk import (
    IndexQuery,
    all_visible,
    best,
    index_scores,
    keep_blocks,
    order_keys,
    rescan,
    scan,
    unpack_positions,
)

FLOAT32_NOISE = 1e-5


def fp4(*shape: int) -> Tensor:
    return decode_q4i(*encode_q4i(torch.randn(shape).bfloat16()))


def with_scores(scores_C: Sequence[float], visible: Sequence[int]) -> tuple[IndexQuery, Tensor]:
    """Return queries that all score key c as `scores_C[c]`, and the keys: one head adds, the other takes away."""
    scores = torch.tensor(scores_C)
    keys = torch.zeros(len(scores_C), 32)
    keys[:, 0], keys[:, 1] = scores.clamp(min=0), (-scores).clamp(min=0)
    q = torch.zeros(len(visible), 2, 32)
    q[:, 0, 0] = q[:, 1, 1] = 1
    weights = torch.tensor([1.0, -1.0]).repeat(len(visible), 1)
    return IndexQuery(q.bfloat16(), weights.bfloat16(), torch.tensor(visible), is_fp32=False), keys.bfloat16()


def best_by_sorting(scores: Sequence[float], allowed: Sequence[int], count: int) -> list[int]:
    """Return the ascending positions of the highest scores, equal ones by position, padded with -1."""
    picked = sorted(sorted(allowed, key=lambda c: (-scores[c], c))[:count])
    return picked + [-1] * (count - len(picked))


def blocks_by_sorting(scores: Sequence[float], visible: int, count: int, size: int) -> list[int]:
    """Return the candidate blocks of a row: the one of the newest visible entry, then the highest."""
    newest = (visible - 1) // size
    peaks = {b: max(scores[b * size : min((b + 1) * size, visible)]) for b in range(newest + 1)}
    peaks[newest] = math.inf
    return best_by_sorting([peaks[b] for b in range(newest + 1)], range(newest + 1), count)


@pytest.fixture
def small_tile(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(it, "KEY_TILE", 16)
    yield 16


# ------------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize(("rows", "heads", "keys"), [(1, 3, 1), (4, 3, 70), (3, 32, 200)])
def test_scores_are_rounded_where_the_vendor_rounds(rows: int, heads: int, keys: int) -> None:
    # products of FP4 values and their sums are exact; then bf16(dot), bf16(term), float32 sum over heads, bf16
    query = IndexQuery(fp4(rows, heads, 32), torch.randn(rows, heads).bfloat16(), torch.full((rows,), keys), False)
    stored = fp4(keys, 32)
    got = index_scores(query, stored)
    assert got.dtype == torch.bfloat16
    dots = torch.einsum("tji,ci->tjc", query.q_TJI.double(), stored.double()).bfloat16()
    total = torch.zeros(rows, keys)
    for head in range(heads):
        total = total + (dots[:, head].clamp(min=0) * query.weights_TJ[:, head, None]).float()
    assert torch.equal(got, total.bfloat16())


def test_float32_scores_are_not_rounded() -> None:
    query = IndexQuery(fp4(4, 5, 32), torch.randn(4, 5), torch.full((4,), 70), is_fp32=True)
    stored = fp4(70, 32)
    got = index_scores(query, stored)
    assert got.dtype == torch.float32
    dots = torch.einsum("tji,ci->tjc", query.q_TJI.double(), stored.double()).clamp(min=0)
    terms = dots * query.weights_TJ.double()[..., None]
    assert ((got.double() - terms.sum(1)).abs() <= FLOAT32_NOISE * terms.abs().sum(1)).all()


def test_queries_can_be_cut_into_rows() -> None:
    query = IndexQuery(fp4(5, 2, 32), torch.randn(5, 2).bfloat16(), torch.arange(5), is_fp32=True)
    part = query.rows(2, 4)
    assert torch.equal(part.q_TJI, query.q_TJI[2:4])
    assert torch.equal(part.weights_TJ, query.weights_TJ[2:4])
    assert part.visible_T.tolist() == [2, 3]
    assert part.is_fp32


# -------------------------------------------------------------------------------------------------------------- order

ODD_SCORES = [0.0, -0.0, 1.0, -1.0, -2.0, -2.5, -100.0, 3e38, -3e38, 1e-40, -1e-40, 2.0**-126, 448.0, 0.1, -0.1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_keys_order_by_score_then_by_lower_position(dtype: torch.dtype) -> None:
    scores = torch.tensor(ODD_SCORES * 2).to(dtype)
    positions = torch.randperm(30)
    keys = order_keys(scores.unsqueeze(0), positions)[0]
    ranked = sorted(range(30), key=lambda i: (-scores[i].item(), positions[i].item()))
    assert torch.argsort(keys, descending=True).tolist() == ranked


def test_positions_of_a_long_context_fit() -> None:
    positions = torch.tensor([0, 1, 1048575, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
    keys = order_keys(torch.full((1, 6), -3.5), positions)
    assert unpack_positions(keys).tolist() == [positions.tolist()]
    assert torch.argsort(keys[0], descending=True).tolist() == list(range(6))


def test_the_hidden_key_is_below_every_score() -> None:
    lowest = order_keys(torch.tensor([[-3.4e38, float("-inf")]]), torch.tensor([(1 << 32) - 1, 7]))
    assert (lowest > it._HIDDEN).all()
    assert unpack_positions(torch.tensor([[it._HIDDEN, int(lowest[0, 1]), it._HIDDEN]])).tolist() == [[7, -1, -1]]


def test_best_keeps_the_largest_or_everything() -> None:
    keys = torch.randperm(40).view(2, 20)
    assert best(keys, 5).sort(1).values.tolist() == keys.sort(1).values[:, -5:].tolist()
    assert best(keys, 20) is keys
    assert best(keys, 21) is keys


def test_rows_that_see_few_entries_take_them_all() -> None:
    picked = all_visible(torch.tensor([0, 1, 3]), 3)
    assert picked.tolist() == [[-1, -1, -1], [0, -1, -1], [0, 1, 2]]


# --------------------------------------------------------------------------------------------------------------- scan


def run_scan(
    scores: Sequence[float], visible: Sequence[int], top_k: int, blocks: int = 0, size: int = 1
) -> it.Selection:
    query, keys = with_scores(scores, visible)
    return scan(query, lambda low, high: keys[low:high], top_k=top_k, candidate_blocks=blocks, block_size=size)


@given(
    scores=st.lists(
        st.sampled_from([0.0, 1.0, 1.0, 2.0, -1.0, -2.5, -300.0, 1e30, -1e30, 0.5]), min_size=1, max_size=70
    ),
    tile=st.sampled_from([1, 3, 8, 16, 100]),
    top_k=st.integers(1, 9),
    blocks=st.integers(1, 6),
    size=st.integers(1, 6),
    cuts=st.lists(st.integers(0, 1000), min_size=1, max_size=6),
    row_bytes=st.sampled_from([1, 1 << 20]),
)
def test_a_scan_equals_sorting_all_scores(
    scores: list[float], tile: int, top_k: int, blocks: int, size: int, cuts: list[int], row_bytes: int
) -> None:
    visible = sorted(cut % len(scores) + 1 for cut in cuts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(it, "KEY_TILE", tile)
        patch.setattr(it, "_SCORE_BYTES", row_bytes)  # one row at a time, or all
        found = run_scan(scores, visible, top_k, blocks, size)
        plain = run_scan(scores, visible, top_k)
    rounded = torch.tensor(scores).bfloat16().tolist()
    assert found.picked_TK.tolist() == [best_by_sorting(rounded, range(seen), top_k) for seen in visible]
    assert found.blocks_TB is not None
    assert found.blocks_TB.tolist() == [blocks_by_sorting(rounded, seen, blocks, size) for seen in visible]
    assert torch.equal(plain.picked_TK, found.picked_TK)
    assert plain.blocks_TB is None


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("tiles", [1, 2])
def test_tile_borders(small_tile: int, tiles: int, extra: int) -> None:
    count = small_tile * tiles + extra
    scores = [float((7 * c) % 5) for c in range(count)]  # many ties, in every tile
    for top_k in (1, 4, count - 1, count, count + 2):
        found = run_scan(scores, [count], top_k)
        assert found.picked_TK.tolist() == [best_by_sorting(scores, range(count), top_k)]


def test_equal_scores_go_to_the_lower_position_across_tiles(small_tile: int) -> None:
    assert run_scan([0.0] * 50, [50], 4).picked_TK.tolist() == [[0, 1, 2, 3]]
    late = [0.0] * 40 + [5.0] * 10
    assert run_scan(late, [50], 4).picked_TK.tolist() == [[40, 41, 42, 43]]
    assert run_scan(late, [41], 4).picked_TK.tolist() == [[0, 1, 2, 40]]


def test_zeros_of_both_signs_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    signed = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -0.0]]).bfloat16()
    monkeypatch.setattr(it, "index_scores", lambda query, keys: signed[:, : len(keys)])
    assert run_scan([0.0] * 5, [5], 3).picked_TK.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("low", [-2.5, -3.0, -1e30])
def test_very_negative_scores_are_scores(small_tile: int, low: float) -> None:
    scores = [low] * 20 + [low / 2, low * 2] + [low] * 10
    assert run_scan(scores, [32], 3).picked_TK.tolist() == [[0, 1, 20]]
    assert run_scan(scores, [32], 32).picked_TK.tolist() == [list(range(32))]


def test_nan_scores_still_pick_different_visible_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(it, "index_scores", lambda query, keys: torch.full((2, len(keys)), float("nan")))
    found = run_scan([0.0] * 9, [6, 9], 4, 2, 3)
    for row, seen in zip(found.picked_TK.tolist(), (6, 9), strict=True):
        assert len(set(row)) == 4
        assert all(0 <= entry < seen for entry in row)


def test_a_budget_beyond_the_entries_takes_everything() -> None:
    assert run_scan([3.0, 1.0, 2.0], [1, 3], 5).picked_TK.tolist() == [[0, -1, -1, -1, -1], [0, 1, 2, -1, -1]]


@pytest.mark.parametrize("size", [3, 5, 7, 4097])
def test_blocks_that_do_not_divide_the_tile_keep_their_entries(size: int) -> None:
    # at the real tile: a block that straddled two tiles would shift every later block
    scores = torch.randint(0, 1000, (9000,)).float().bfloat16().tolist()
    found = run_scan(scores, [9000], 3, 20, size)
    assert found.blocks_TB is not None
    assert found.blocks_TB.tolist() == [blocks_by_sorting(scores, 9000, 20, size)]
    assert found.picked_TK.tolist() == [best_by_sorting(scores, range(9000), 3)]


# ------------------------------------------------------------------------------------------------------------- blocks


def test_the_newest_block_survives_the_lowest_score() -> None:
    # field report A19: all other blocks +100, the newest -100, and only its first entry is visible yet
    scores = [100.0] * 20 + [-100.0] * 4
    found = run_scan(scores, [21], 1, 3, 4)
    assert found.blocks_TB is not None
    assert found.blocks_TB.tolist() == [[0, 1, 5]]
    found = run_scan(scores, [21], 1, 1, 4)
    assert found.blocks_TB is not None
    assert found.blocks_TB.tolist() == [[5]]


def test_entries_that_are_not_visible_lift_no_block() -> None:
    scores = [1.0, 1.0, 0.0, 0.0, 2.0, 2.0, 0.0, 99.0]  # the 99 comes after what the row sees
    found = run_scan(scores, [7], 1, 2, 2)
    assert found.blocks_TB is not None
    assert found.blocks_TB.tolist() == [[2, 3]]
    found = run_scan(scores, [4], 1, 3, 2)
    assert found.blocks_TB is not None
    assert found.blocks_TB.tolist() == [[0, 1, -1]]


def test_equal_blocks_go_to_the_lower_one_whatever_their_entries() -> None:
    # the tie is between scores of blocks; where in the block the best entry stands does not count
    peaks = order_keys(torch.tensor([[5.0, 5.0, 5.0, 1.0]]), torch.tensor([7, 8, 16, 25]))
    assert keep_blocks(peaks, torch.tensor([32]), 3, 8).tolist() == [[0, 1, 3]]
    assert keep_blocks(peaks, torch.tensor([32]), 9, 8).tolist() == [[0, 1, 2, 3, -1, -1, -1, -1, -1]]


def test_blocks_without_a_visible_entry_are_dropped() -> None:
    peaks = order_keys(torch.tensor([[5.0, 4.0, 3.0]]), torch.tensor([1, 9, 17]))
    peaks[0, 2] = it._HIDDEN
    assert keep_blocks(peaks, torch.tensor([12]), 3, 8).tolist() == [[0, 1, -1]]


# ------------------------------------------------------------------------------------------------------------- rescan


@given(
    scores=st.lists(st.sampled_from([0.0, 1.0, 2.0, -1.0, -2.5, 0.5]), min_size=1, max_size=60),
    size=st.integers(1, 5),
    top_k=st.integers(1, 9),
    rows=st.lists(st.tuples(st.integers(0, 1000), st.sets(st.integers(0, 59), max_size=7)), min_size=1, max_size=4),
)
def test_a_rescan_equals_sorting_the_scores_of_kept_blocks(
    scores: list[float], size: int, top_k: int, rows: list[tuple[int, set[int]]]
) -> None:
    visible = sorted(seen % len(scores) + 1 for seen, _ in rows)
    blocks = [sorted(b for b in kept if b * size < len(scores)) for _, kept in rows]
    table = torch.tensor([kept + [-1] * (7 - len(kept)) for kept in blocks])
    query, keys = with_scores(scores, visible)
    asked: list[Tensor] = []

    def gather(entries: Tensor) -> Tensor:
        asked.extend(entries)  # row by row
        return keys[entries.clamp_min(0)]

    got = rescan(query, table, gather, top_k=top_k, block_size=size)
    allowed = [
        [c for b in kept for c in range(b * size, (b + 1) * size) if c < seen]
        for kept, seen in zip(blocks, visible, strict=True)
    ]
    assert got.tolist() == [best_by_sorting(scores, entries, top_k) for entries in allowed]
    for entries, wanted in zip(asked, allowed, strict=True):
        assert sorted(e for e in entries.flatten().tolist() if e >= 0) == sorted(wanted)  # nothing else is read


@pytest.mark.parametrize("is_fp32", [False, True])
def test_a_rescan_of_all_blocks_equals_a_scan_and_of_some_a_masked_one(is_fp32: bool) -> None:
    weights = torch.randn(4, 3) if is_fp32 else torch.randn(4, 3).bfloat16()
    query = IndexQuery(fp4(4, 3, 32), weights, torch.tensor([30, 41, 57, 60]), is_fp32)
    keys = fp4(60, 32)

    def gather(entries: Tensor) -> Tensor:
        return keys[entries.clamp_min(0)]

    found = scan(query, lambda low, high: keys[low:high], top_k=9, candidate_blocks=4, block_size=4)
    every = rescan(query, torch.arange(15).repeat(4, 1), gather, top_k=9, block_size=4)
    assert torch.equal(every, found.picked_TK)
    assert found.blocks_TB is not None
    some = rescan(query, found.blocks_TB, gather, top_k=9, block_size=4)
    scores = index_scores(query, keys)
    for row, seen in enumerate(query.visible_T.tolist()):
        kept = [b for b in found.blocks_TB[row].tolist() if b >= 0]
        allowed = [c for b in kept for c in range(4 * b, min(4 * b + 4, seen))]
        assert some[row].tolist() == best_by_sorting(scores[row].tolist(), allowed, 9)


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("is_fp32", [False, True])
@pytest.mark.parametrize("candidates", [0, 5])
def test_memory_of_a_scan_grows_neither_with_rows_nor_with_the_context(
    monkeypatch: pytest.MonkeyPatch, is_fp32: bool, candidates: int
) -> None:
    heads, size = 32, 8
    shapes: list[tuple[int, int]] = []  # rows and keys scored at once

    def shape_only(query: IndexQuery, keys: Tensor) -> Tensor:
        shapes.append((query.q_TJI.shape[0], keys.shape[0]))
        return torch.zeros(shapes[-1])

    monkeypatch.setattr(it, "index_scores", shape_only)
    for rows, context in ((16, 4096), (256, 4096), (256, 40000), (16, 100000)):
        shapes.clear()
        query = IndexQuery(torch.zeros(rows, heads, 1), torch.zeros(rows, heads), torch.full((rows,), context), is_fp32)
        found = scan(
            query,
            lambda low, high: torch.zeros(high - low, 1),
            top_k=4,
            candidate_blocks=candidates,
            block_size=size,
        )
        assert found.picked_TK.tolist() == [[0, 1, 2, 3]] * rows
        assert max(keys for _, keys in shapes) <= it.KEY_TILE
        most_rows = max(count for count, _ in shapes)
        scores, peaks = heads * it.KEY_TILE * (4 if is_fp32 else 2), 8 * context // size if candidates else 0
        assert most_rows * (scores + peaks) <= it._SCORE_BYTES
        assert sum(count * keys for count, keys in shapes) == rows * context


def fp4_values(*shape: int, seed: int) -> torch.Tensor:
    """Values as keys and queries hold them: FP4 codes with a scale for every 32."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
    picked = codes[torch.randint(0, 15, shape, generator=generator)].view(*shape[:-1], -1, 32)
    scales = 2.0 ** torch.randint(-8, 4, (*picked.shape[:-1], 1), generator=generator).float()
    return (picked * scales).view(shape).bfloat16()


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64, 129])
@pytest.mark.parametrize(("heads", "width", "keys"), [(4, 32, 512), (3, 32, 24), (8, 64, 200), (32, 128, 1000)])
@pytest.mark.parametrize("is_fp32", [False, True])
def test_rows_with_keys_of_their_own_get_the_products_of_one_row_alone(
    rows: int, heads: int, width: int, keys: int, is_fp32: bool
) -> None:
    q, own = fp4_values(rows, heads, width, seed=rows), fp4_values(rows, keys, width, seed=keys)
    visible = torch.full((rows,), keys)
    query = IndexQuery(q, torch.ones(rows, heads).bfloat16(), visible, is_fp32)
    together = it.own_dots(query, own)
    for row in range(rows):
        alone = it._dots(query.rows(row, row + 1), own[row])[0, :, :keys]
        assert torch.equal(together[row], alone)
