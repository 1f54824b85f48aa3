"""Rows in blocks against rows in buffers of their own, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.cache.block_pool import BlockPool
from headrace.cache.block_table import BlockTable
from headrace.cache.global_store import GlobalStore
from headrace.cache.paged_store import PagedStore
from headrace.cache.state_shape import StateShape
from headrace.core.errors import InternalError
from headrace.kernels import block_quant

CPU = torch.device("cpu")
HEAD, INDEX = 64, 32
RATIOS = {1: 2, 3: 1, 5: 4}
SHAPE = StateShape(HEAD, INDEX, 6, 7, 0, 3, RATIOS, 0)
SOURCES = {ratio: source for source, ratio in RATIOS.items()}
ENTRIES = torch.randn(700, HEAD, generator=torch.Generator().manual_seed(1)).bfloat16()
KEYS = torch.randn(700, INDEX, generator=torch.Generator().manual_seed(2)).bfloat16()


def scattered(num_blocks: int, spare: int = 0) -> BlockTable:
    """A table whose blocks lie apart and out of order in a pool full of what is no number."""
    pool = BlockPool(SHAPE, 2 * num_blocks + spare, CPU, is_poisoned=True)
    taken = pool.allocate(2 * num_blocks)
    table = BlockTable(pool)
    table.extend(taken[::2][::-1])
    pool.release(taken[1::2])
    return table


def both(rows: int, ratio: int) -> tuple[PagedStore, GlobalStore]:
    paged, own = (
        PagedStore(SOURCES[ratio], scattered(-(-rows * ratio // 128) + 1)),
        GlobalStore(HEAD, INDEX, ratio, CPU),
    )
    for store in (paged, own):
        store.append(ENTRIES[:rows], KEYS[:rows])
    return paged, own


def same(paged: PagedStore, own: GlobalStore) -> bool:
    pairs = zip(paged.stored_rows(), own.stored_rows(), strict=True)
    return paged.length == own.length and all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 127, 128, 129, 300])
def test_blocks_read_as_buffers_do(ratio: int, rows: int) -> None:
    paged, own = both(rows, ratio)
    assert same(paged, own)
    assert (paged.row_bytes, paged.nbytes) == (own.row_bytes, own.nbytes)
    for low, high in ((0, rows), (rows // 3, rows - rows // 4), (rows - 1, rows), (rows, rows)):
        assert torch.equal(paged.entries(low, high), own.entries(low, high))
        assert torch.equal(paged.index_keys(low, high), own.index_keys(low, high))
    for shape in ((3, 5), (90, 7), (1, 1)):  # few picks, and picks that are decoded once for all
        picks = torch.randint(-1, rows, shape)
        assert torch.equal(paged.gather(picks), own.gather(picks))
        assert torch.equal(paged.gather_index_keys(picks), own.gather_index_keys(picks))


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), max_size=10), st.sampled_from([1, 2, 4]))
def test_any_appends_and_cuts_leave_what_buffers_have(steps: list[tuple[int, int]], ratio: int) -> None:
    paged, own = PagedStore(SOURCES[ratio], scattered(24)), GlobalStore(HEAD, INDEX, ratio, CPU)
    for step, (count, back) in enumerate(steps):
        for store in (paged, own):
            low = (37 * step) % 600
            store.append(ENTRIES[low : low + count], KEYS[low : low + count])
            store.truncate(max(0, store.length * ratio - back))
        assert same(paged, own)


def test_empty_slots_of_an_empty_store_are_zeros_even_in_poisoned_blocks() -> None:
    for store in (PagedStore(3, scattered(1)), PagedStore(3, BlockTable(BlockPool(SHAPE, 1, CPU)))):
        picks = torch.full((2, 3), -1)
        assert not store.gather(picks).any()
        assert not store.gather_index_keys(picks).any()
        assert store.entries(0, 0).shape == (0, HEAD)
        assert store.gather(torch.zeros((0, 5), dtype=torch.int64)).shape == (0, 5, HEAD)


def test_shared_rows_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, decoded, real = both(40, 1)[0], list[int](), block_quant.decode_q4k

    def watch(codes: Tensor, scales: Tensor) -> Tensor:
        decoded.append(codes.shape[0])
        return real(codes, scales)

    monkeypatch.setattr(block_quant, "decode_q4k", watch)
    store.gather(torch.tensor([[3, 9, 20]] * 30))
    assert decoded == [3]


@pytest.mark.parametrize("ratio", [1, 2])
def test_rows_that_are_not_stored_are_refused(ratio: int) -> None:
    store = both(8, ratio)[0]
    store.truncate(5 * ratio)
    for picks in ([[0, 5]], [[-1, 5]]):
        with pytest.raises(InternalError, match="only 5 rows are stored"):
            store.gather(torch.tensor(picks))
        with pytest.raises(InternalError, match="only 5 rows are stored"):
            store.gather_index_keys(torch.tensor(picks))
    with pytest.raises(InternalError, match="global row 5 was read"):
        store.entries(2, 6)


def test_no_block_is_taken_without_being_given() -> None:
    store = PagedStore(1, scattered(1))
    store.reserve(64)
    store.append(ENTRIES[:64], KEYS[:64])
    free = store._table.pool.num_free
    for act in (lambda: store.append(ENTRIES[:1], KEYS[:1]), lambda: store.reserve(65), lambda: store.resume(130)):
        with pytest.raises(InternalError, match="65 rows of ratio 2 do not fit blocks for 128 tokens"):
            act()
    assert (store.length, store._table.pool.num_free) == (64, free)


# -------------------------------------------------------------------------------------------------------- write floor


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("floor", [0, 1, 2, 5, 37, 127, 128, 129])
@pytest.mark.parametrize("piece", [1, 7, 200])
def test_rows_below_the_write_floor_are_kept_and_counted(ratio: int, floor: int, piece: int) -> None:
    table = scattered(3)
    store = PagedStore(SOURCES[ratio], table)
    complete = floor // ratio
    store.append(ENTRIES[:complete], KEYS[:complete])
    table.freeze(floor)
    store.truncate(0)
    other_entries, other_keys = ENTRIES.flip(0), KEYS.flip(0)
    rows = 300 // ratio
    for low in range(0, rows, piece):
        high = min(low + piece, rows)
        store.append(other_entries[low:high], other_keys[low:high])
    own = GlobalStore(HEAD, INDEX, ratio, CPU)
    own.append(
        torch.cat([ENTRIES[:complete], other_entries[complete:rows]]),
        torch.cat([KEYS[:complete], other_keys[complete:rows]]),
    )
    assert same(store, own)


def test_sealed_blocks_are_never_written() -> None:
    table = scattered(2)
    store = PagedStore(3, table)
    store.append(ENTRIES[:130], KEYS[:130])
    table.seal(130)
    assert [table.pool.is_sealed(block_id) for block_id in table.block_ids] == [True, False]
    assert table.write_floor == 128
    store.append(ENTRIES[:3], KEYS[:3])
    table.write_floor = 0
    store.truncate(100)
    with pytest.raises(InternalError, match=f"block {table.block_ids[0]} is sealed and was written at token 100"):
        store.append(ENTRIES[:3], KEYS[:3])


def test_rows_of_a_sealed_block_that_are_all_there_are_admitted_again() -> None:
    table = scattered(2)
    store = PagedStore(3, table)
    store.append(ENTRIES[:130], KEYS[:130])
    table.seal(130)
    store.truncate(100)
    assert (store.admit(20), store.length) == (20, 120)
    assert (store.admit(11), store.length) == (8, 131)
    table.write_floor = 0
    store.truncate(100)
    with pytest.raises(InternalError, match="is sealed and was written at token 100"):
        store.admit(20)


# ------------------------------------------------------------------------------------------------------------- tables


def test_a_table_gives_back_what_it_has() -> None:
    table = scattered(3)
    pool, ids = table.pool, table.block_ids
    pool.retain([ids[1]])
    table.seal(256)
    assert table.release() == [ids[0], ids[2]]
    assert (table.block_ids, table.capacity, table.write_floor) == ((), 0, 0)
    pool.audit({"other": [ids[1]]})


def test_a_table_shares_blocks_of_the_same_content() -> None:
    table, own = scattered(3, spare=2), GlobalStore(HEAD, INDEX, 1, CPU)
    store = PagedStore(3, table)
    for one in (store, own):
        one.append(ENTRIES[:300], KEYS[:300])
    table.seal(300)
    mine = table.block_ids
    twins = [table.pool.copy(block_id, 128) for block_id in mine[:2]]
    table.share([twins[0], mine[1]])
    assert table.block_ids == (twins[0], mine[1], mine[2])
    assert same(store, own)
    table.pool.audit({"table": table.block_ids, "index": twins})


def test_more_than_the_blocks_hold_cannot_be_frozen() -> None:
    with pytest.raises(InternalError, match="129 tokens were frozen and the blocks hold 128"):
        scattered(1).freeze(129)
