from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.cache.block_pool import BlockPool
from headrace.cache.block_table import BlockTable
from headrace.cache.paged_store import PagedStore
from headrace.cache.slot_pool import SlotPool
from headrace.cache.state_shape import StateShape
from headrace.core.errors import InternalError

CPU = torch.device("cpu")
SHAPE = StateShape(
    head_dim=32,
    index_head_dim=64,
    window=6,
    num_layers=3,
    num_draft_layers=1,
    decoder_start=2,
    source_ratios={0: 2, 2: 1},
    lookback=3,
)
RELEASED = replace(SHAPE, head_dim=512, index_head_dim=128, source_ratios={2: 2, 8: 2, 14: 2, 20: 1})


def make(num_blocks: int = 6, *, is_poisoned: bool = False) -> BlockPool:
    return BlockPool(SHAPE, num_blocks, CPU, is_poisoned=is_poisoned)


def filled(pool: BlockPool, num_tokens: int) -> tuple[BlockTable, dict[int, PagedStore]]:
    """A table with entries for that many tokens in both sources."""
    table = BlockTable(pool)
    table.extend(pool.allocate(-(-num_tokens // 128)))
    stores = {source: PagedStore(source, table) for source in SHAPE.source_ratios}
    for store in stores.values():
        rows = num_tokens // store.ratio
        store.append(torch.randn(rows, 32).bfloat16(), torch.randn(rows, 64).bfloat16())
    return table, stores


# -------------------------------------------------------------------------------------------------------------- bytes


def test_released_blocks_take_128_times_890_bytes_in_their_buffers() -> None:
    pool = BlockPool(RELEASED, 3, CPU)
    assert pool.block_bytes == 113_920 == 128 * 890
    assert pool.nbytes == 3 * 113_920
    planes = [plane for source in RELEASED.source_ratios for plane in pool.planes(source)]
    assert sum(plane.untyped_storage().nbytes() for plane in planes) == pool.nbytes


def test_released_slots_take_twice_the_window() -> None:
    shape = replace(RELEASED, window=128, num_layers=40, num_draft_layers=3, decoder_start=20)
    pool = SlotPool(shape, 2, CPU)
    assert pool.slot_bytes == 43 * 256 * 528 + 3 * 129 * 2 * 512 * 4
    assert pool.acquire().nbytes == pool.slot_bytes
    assert pool.nbytes == 2 * pool.slot_bytes


def test_entries_that_do_not_fit_a_block_are_refused() -> None:
    with pytest.raises(InternalError, match="blocks of 128 tokens do not hold whole entries of 3 tokens"):
        BlockPool(replace(SHAPE, source_ratios={0: 3}), 1, CPU)


# -------------------------------------------------------------------------------------------------------------- books


def test_a_block_is_free_again_with_its_last_reference() -> None:
    pool = make()
    a, b = pool.allocate(2)
    pool.retain([a])
    pool.seal([a])
    assert pool.release([a, b]) == [b]
    assert (pool.num_free, pool.references(a), pool.is_sealed(a)) == (5, 1, True)
    assert pool.release([a]) == [a]
    assert (pool.num_free, pool.is_sealed(a)) == (6, False)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda pool: pool.release([3]), "block 3 was freed twice"),
        (lambda pool: pool.retain([3]), "block 3 is free and was referred to"),
        (lambda pool: pool.seal([3]), "block 3 is free and was sealed"),
        (lambda pool: pool.allocate(7), "7 blocks were asked for and 6 of 6 are free"),
    ],
)
def test_misuse_is_refused_by_name(act: object, sentence: str) -> None:
    with pytest.raises(InternalError, match=sentence):
        act(make())


def test_an_audit_names_the_block_whose_books_are_wrong() -> None:
    pool = make()
    a, b, c = pool.allocate(3)
    pool.retain([b])
    pool.audit({"one": [a, b], "two": [b, c]})
    with pytest.raises(InternalError, match=rf"block {b} counts 2 references and has 1 \(one\)"):
        pool.audit({"one": [a, b], "two": [c]})
    with pytest.raises(InternalError, match=rf"block {c} counts 1 references and has 0 \(nobody\)"):
        pool.audit({"one": [a, b, b]})
    with pytest.raises(InternalError, match="block 5 counts 0 references and has 1"):
        pool.audit({"one": [a, b, b, c, 5]})
    with pytest.raises(InternalError, match="block 9 is not one of the pool's 6"):
        pool.audit({"one": [a, b, b, c, 9]})
    pool._free.append(pool._free[0])
    with pytest.raises(InternalError, match="block 5 with 0 references is 2 times on the free list"):
        pool.audit({"one": [a, b, b, c]})


def test_an_audit_of_slots_names_the_slot() -> None:
    pool = SlotPool(SHAPE, 3, CPU)
    slot = pool.acquire()
    pool.audit([slot.id])
    with pytest.raises(InternalError, match="slot 0 is owned 0 times and free 0 times"):
        pool.audit([])
    with pytest.raises(InternalError, match="slot 2 is owned 1 times and free 1 times"):
        pool.audit([slot.id, 2])
    pool.release(slot)
    with pytest.raises(InternalError, match="slot 0 was freed twice"):
        pool.release(slot)
    for _ in range(3):
        pool.acquire()
    with pytest.raises(InternalError, match="all 3 are taken"):
        pool.acquire()


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 5)), max_size=40))
def test_blocks_are_conserved(steps: list[tuple[str, int]]) -> None:
    pool, owned = make(), list[int]()
    for act, number in steps:
        if act == "allocate" and number <= pool.num_free:
            taken = pool.allocate(number)
            assert not set(taken) & set(owned)
            owned += taken
        elif owned and act == "retain":
            pool.retain([owned[number % len(owned)]])
            owned.append(owned[number % len(owned)])
        elif owned and act == "release":
            block_id = owned.pop(number % len(owned))
            assert pool.release([block_id]) == ([] if block_id in owned else [block_id])
        pool.audit({"owner": owned})
        assert pool.num_free == 6 - len(set(owned))


# ------------------------------------------------------------------------------------------------------------ content


def test_free_blocks_are_full_of_what_is_no_number() -> None:
    pool = make(3, is_poisoned=True)
    for planes in (pool.planes(0), pool.planes(2)):
        assert (planes[1] == 0x7F).all()
        assert (planes[3] == 0xFF).all()
    table, stores = filled(pool, 256)
    assert all(store.entries(0, store.length).isfinite().all() for store in stores.values())
    stale = [store.stored_rows() for store in stores.values()]
    table.release()
    fresh = BlockTable(pool)
    fresh.extend(pool.allocate(3))
    for source in SHAPE.source_ratios:
        store = PagedStore(source, fresh)
        store.resume(384)
        assert store.entries(0, store.length).isnan().any(1).all()
        assert not store.index_keys(0, store.length).isfinite().all()
    assert all((rows[1] != 0x7F).all() for rows in stale)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 77, 127, 128])
def test_a_copy_has_the_entries_of_the_first_tokens_only(num_tokens: int) -> None:
    pool = make(is_poisoned=True)
    table, stores = filled(pool, 128)
    other = BlockTable(pool)
    other.extend([pool.copy(table.block_ids[0], num_tokens)])
    for source, store in stores.items():
        copied = PagedStore(source, other)
        copied.resume(128)
        rows = num_tokens // store.ratio
        for mine, theirs in zip(copied.stored_rows(), store.stored_rows(), strict=True):
            assert torch.equal(mine[:rows], theirs[:rows])
        assert (copied.stored_rows()[1][rows:] == 0x7F).all()
    assert not pool.is_sealed(other.block_ids[0])


def test_exported_blocks_come_back_elsewhere() -> None:
    pool = make()
    table, stores = filled(pool, 300)
    before = [[plane.clone() for plane in store.stored_rows()] for store in stores.values()]
    content = pool.read_blocks(table.block_ids)
    assert content.shape == (3, pool.block_bytes)
    table.release()
    filled(pool, 50)
    back = BlockTable(pool)
    back.extend(pool.allocate(3))
    pool.write_blocks(back.block_ids, content)
    for source, planes in zip(stores, before, strict=True):
        store = PagedStore(source, back)
        store.resume(300)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(store.stored_rows(), planes, strict=True))
    pool.seal(back.block_ids[1:2])
    with pytest.raises(InternalError, match=f"block {back.block_ids[1]} is sealed and was written"):
        pool.write_blocks(back.block_ids, content)
