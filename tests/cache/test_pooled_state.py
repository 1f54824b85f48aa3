"""States on slots and blocks against states with buffers of their own; snapshots; checksums."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.cache.block_pool import BlockPool
from headrace.cache.block_table import BlockTable
from headrace.cache.chain import Chain
from headrace.cache.handover import begin_from, fork, publish
from headrace.cache.prefix_index import PrefixIndex
from headrace.cache.prefix_match import Match
from headrace.cache.sequence_state import SequenceState
from headrace.cache.slot_pool import SlotPool
from headrace.cache.snapshot import Snapshot, snapshot_bytes
from headrace.cache.swap import discard, swap_bytes, swap_in, swap_out
from headrace.core.errors import CapacityError, InternalError
from tests.cache.pretend import SHAPE, WINDOW, forward

CPU = torch.device("cpu")


class Pools:
    """Blocks, slots and an index, poisoned."""

    def __init__(self, num_blocks: int = 12, num_slots: int = 6) -> None:
        self.blocks = BlockPool(SHAPE, num_blocks, CPU, is_poisoned=True)
        self.slots = SlotPool(SHAPE, num_slots, CPU)
        self.index = PrefixIndex(self.blocks, 1 << 20)

    def new(self, num_blocks: int = 3) -> SequenceState:
        table = BlockTable(self.blocks)
        table.extend(self.blocks.allocate(num_blocks))
        return SequenceState.on_slot(self.slots.acquire(), table)


def plain(tokens: list[int]) -> SequenceState:
    state = SequenceState(SHAPE, CPU)
    forward(state, tokens)
    return state


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50, count).tolist()


def ids_before(tokens: list[int]) -> np.ndarray:
    """What `commit` was given for these tokens."""
    return np.array(tokens, dtype=np.int64) % 13


def chain_of(tokens: list[int]) -> Chain:
    chain = Chain({"lineage": "exact"})
    chain.append(np.array(tokens, dtype=np.int64))
    return chain


# ---------------------------------------------------------------------------------------------------- the same states


STEPS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, WINDOW), st.sampled_from(["", "fork", "swap"])), max_size=8
)


@given(STEPS)
def test_steps_forks_swaps_and_rollbacks_leave_the_state_of_the_tokens_that_stayed(
    steps: list[tuple[int, int, str]],
) -> None:
    pools = Pools()
    state, kept, lowest = pools.new(), list[int](), 0
    for step, (count, back, act) in enumerate(steps):
        drafted = [(17 * step + 5 * i) % 50 for i in range(count)]
        forward(state, drafted)
        kept += drafted
        floor = max(lowest, len(kept) - WINDOW, state.table.write_floor)
        length = max(floor, len(kept) - back)
        if length < len(kept):
            state.rollback(length)
            lowest = max(lowest, len(kept) - WINDOW)
        kept = kept[:length]
        if act == "fork":
            child = fork(state, pools.slots.acquire())
            child.table.extend(pools.blocks.allocate(3 - len(child.table.block_ids)))
            forward(state, [1, 2, 3])  # goes on beside the one that is looked at
            state.table.release()
            pools.slots.release(state.slot)
            state = child
        elif act == "swap":
            expected = swap_bytes(state)
            swapped = swap_out(state)
            pools.slots.release(state.slot)
            assert swapped.nbytes == expected
            pools.blocks.audit({})
            state = swap_in(swapped, pools.slots.acquire(), BlockTable(pools.blocks))
        assert state.checksum() == plain(kept).checksum()
        pools.blocks.audit({"state": state.table.block_ids})
    assert state.describe() == plain(kept).describe()


def test_a_pooled_state_takes_no_memory_of_its_own() -> None:
    pools = Pools()
    state, slot = pools.new(), pools.slots
    forward(state, tokens_of(300))
    shared = {buffer.untyped_storage().data_ptr() for buffer in slot._buffers}
    rings = state.rings + state.draft_rings
    assert all(ring._codes.untyped_storage().data_ptr() in shared for ring in rings)
    assert sum(part.bytes_fixed for part in state.describe()[1:4]) == state.slot.nbytes == slot.slot_bytes


def test_what_others_may_read_cannot_be_taken_back() -> None:
    pools = Pools()
    state = pools.new()
    forward(state, tokens_of(125))
    publish(state, chain_of(tokens_of(125)), pools.index)
    forward(state, [1, 2])
    with pytest.raises(CapacityError, match="cannot go back from 127 to 124 tokens; accepted are 125 to 127"):
        state.rollback(124)
    state.rollback(125)
    forward(state, [7] * 5)
    state.table.seal(130)
    with pytest.raises(CapacityError, match="accepted are 128 to 130"):
        state.rollback(127)
    assert state.checksum() == plain(tokens_of(125) + [7] * 5).checksum()


def test_neither_side_of_a_fork_goes_back_into_what_they_share() -> None:
    pools = Pools()
    state = pools.new()
    forward(state, tokens_of(130))
    child = fork(state, pools.slots.acquire())
    for one in (state, child):
        with pytest.raises(CapacityError, match="accepted are 128 to 130"):
            one.rollback(127)
        one.rollback(128)


def test_a_swapped_state_comes_back_as_bound_as_it_was() -> None:
    pools = Pools()
    state = pools.new()
    forward(state, tokens_of(150))
    publish(state, chain_of(tokens_of(150)), pools.index)
    swapped = swap_out(state, pools.index.held)
    assert (swapped.num_blocks, swapped.kept) == (3, {})
    state = swap_in(swapped, pools.slots.acquire(), BlockTable(pools.blocks))
    assert [pools.blocks.is_sealed(block_id) for block_id in state.table.block_ids] == [True, False, False]
    with pytest.raises(CapacityError, match="accepted are 150 to 150"):
        state.rollback(149)


def test_states_of_their_own_have_neither_slot_nor_blocks() -> None:
    state = plain([1, 2])
    with pytest.raises(InternalError, match="has no slot"):
        _ = state.slot
    with pytest.raises(InternalError, match="has no blocks"):
        _ = state.table


# ----------------------------------------------------------------------------------------------------------- checksum


def test_a_checksum_sees_every_part() -> None:
    tokens = tokens_of(41)
    checksum = plain(tokens).checksum()
    assert plain(tokens).checksum() == checksum
    for change in (
        lambda state: state.stores[0]._planes[1].view(-1)[5:6].add_(1),
        lambda state: state.stores[2]._planes[2].view(-1)[7:8].add_(1),
        lambda state: state.rings[1]._codes[40 % 12, 3:4].add_(1),
        lambda state: state.rings[2]._scales[36 % 12].add_(1),
        lambda state: state.draft_rings[0]._codes[40 % 12].add_(1),
        lambda state: state.pairs[0]._rows[40 % 7, 1, 2:3].add_(1),
        lambda state: state.commit(0, np.array([5])),
        lambda state: setattr(state, "decoder_floor", 3),
        lambda state: setattr(state, "encoder_floor", 3),
    ):
        state = plain(tokens)
        change(state)
        assert state.checksum() != checksum


def test_a_checksum_sees_nothing_that_no_token_can_see() -> None:
    tokens = tokens_of(41)
    checksum = plain(tokens).checksum()
    for change in (
        lambda state: state.rings[1]._codes[35 % 12].add_(1),  # W rows before the next token
        lambda state: state.pairs[0]._rows[39 % 7].add_(1),
        lambda state: state.stores[2].reserve(1000),
    ):
        state = plain(tokens)
        change(state)
        assert state.checksum() == checksum
    even = plain(tokens_of(40))
    even.pairs[0]._rows.add_(1)
    assert even.checksum() == plain(tokens_of(40)).checksum()


# ---------------------------------------------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("taken", [0, 1, 5, 6, 7, 11, 12, 13, 14, 31, 32])
def test_a_snapshot_serves_every_place_whose_window_it_holds(taken: int) -> None:
    snapshot = Snapshot.take(plain(tokens_of(taken)))
    lowest = max(0, taken - WINDOW - 1) if taken > 2 * WINDOW else 0
    assert [place for place in range(taken + 3) if snapshot.covers(place)] == [*range(lowest, taken + 1)]
    assert snapshot.nbytes == 2 * min(taken, 2 * WINDOW) * (32 + 1) <= snapshot_bytes(SHAPE) == 2 * 12 * 33


@pytest.mark.parametrize("length", [0, 9, 30, 131])
def test_what_follows_a_restored_snapshot_is_the_plain_state(length: int) -> None:
    tokens, suffix, pools = tokens_of(length), tokens_of(9, 1), Pools()
    first = pools.new()
    forward(first, tokens)
    first.table.freeze(length)
    snapshot = Snapshot.take(first)
    forward(first, tokens_of(7, 2))  # what comes later is not in it
    expected = plain(tokens + suffix)
    expected.start_decoder(length + 9)  # a prompt replays its decoder: only the encoder is looked at
    for place in range(snapshot.lowest + snapshot.lowest % 2, length + 1, 2):
        state = pools.new(0)
        state.table.extend([pools.blocks.copy(block_id, 128) for block_id in first.table.block_ids[:2]])
        state.table.freeze(length)
        state.resume(place, ids_before(tokens[:place]))
        snapshot.restore(state, place)
        state.start_decoder(place)
        forward(state, tokens[place:] + suffix)
        state.start_decoder(length + 9)
        assert state.checksum() == expected.checksum()
        state.table.release()
        pools.slots.release(state.slot)


def test_a_snapshot_is_refused_where_it_does_not_serve() -> None:
    snapshot, pools = Snapshot.take(plain(tokens_of(40))), Pools()
    state = pools.new()
    with pytest.raises(InternalError, match="a snapshot for 33 to 40 tokens was restored at 32"):
        snapshot.restore(state, 32)
    with pytest.raises(InternalError, match="restored at 34 into a state of 0 tokens"):
        snapshot.restore(state, 34)


def test_a_snapshot_of_an_approximate_state_keeps_its_floor() -> None:
    pools, tokens = Pools(), tokens_of(40)
    state = pools.new()
    forward(state, tokens)
    state.table.freeze(40)
    begun = SequenceState.on_slot(pools.slots.acquire(), BlockTable(pools.blocks))
    begun.table.extend([pools.blocks.copy(state.table.block_ids[0], 40)])
    begun.table.freeze(40)
    begun.resume(30, ids_before(tokens[:30]))
    begun.start_encoder(30)
    assert [begun.floor(layer_id) for layer_id in range(3)] == [30, 30, 0]
    for ring in begun.rings[2:] + begun.draft_rings:
        ring.restart(30)
    forward(begun, tokens[30:34])
    snapshot = Snapshot.take(begun)
    assert (snapshot.oldest, snapshot.lowest, snapshot.encoder_floor) == (30, 30, 30)
    other = SequenceState.on_slot(pools.slots.acquire(), BlockTable(pools.blocks))
    other.table.extend([pools.blocks.copy(state.table.block_ids[0], 40)])
    other.table.freeze(40)
    other.resume(32, ids_before(tokens[:32]))
    snapshot.restore(other, 32)
    assert (other.encoder_floor, other.rings[0].oldest, other.rings[0].end) == (30, 30, 32)


# ----------------------------------------------------------------------------------------------------------- refusals


def test_only_a_new_state_begins_and_only_where_entries_are_whole_and_there() -> None:
    pools = Pools()
    state = pools.new()
    state.table.freeze(20)
    for position in (19, 22):
        with pytest.raises(InternalError, match=f"a state cannot begin at {position} of 20 tokens"):
            state.resume(position, None)
    forward(state, [1])
    with pytest.raises(InternalError, match="a state of 1 tokens cannot begin from a cache"):
        state.resume(20, None)
    with pytest.raises(InternalError, match="only a state without blocks begins, and only from a hit"):
        begin_from(Match(num_tokens=4), pools.new(), pools.index, None)
    with pytest.raises(InternalError, match="only a state without blocks begins, and only from a hit"):
        begin_from(Match(), pools.new(0), pools.index, None)


def test_a_match_is_whole_after_a_copy_that_had_no_room() -> None:
    pools = Pools(num_blocks=2)
    first, tokens = pools.new(2), tokens_of(150)
    forward(first, tokens)
    publish(first, chain_of(tokens), pools.index)
    match, state = pools.index.match(chain_of(tokens)), pools.new(0)
    with pytest.raises(InternalError, match="1 blocks were asked for and 0 of 2 are free"):
        begin_from(match, state, pools.index, None)
    assert (state.length, state.table.block_ids) == (0, ())
    pools.index.release(match)
    pools.blocks.audit({"first": first.table.block_ids, "index": pools.index.block_ids})


def test_a_state_that_still_encodes_what_it_found_is_not_forked() -> None:
    pools = Pools()
    state = pools.new()
    state.table.freeze(20)
    state.resume(18, None)
    with pytest.raises(InternalError, match="a state at 18 of 20 tokens from the cache cannot be forked yet"):
        fork(state, pools.slots.acquire())


def test_swapped_states_come_back_to_empty_tables_or_not_at_all() -> None:
    pools = Pools()
    state = pools.new()
    forward(state, tokens_of(200))
    child = fork(state, pools.slots.acquire())
    swapped = swap_out(state)
    with pytest.raises(InternalError, match="swapped in over a table that has blocks"):
        swap_in(swapped, pools.slots.acquire(), child.table)
    child.table.release()
    pools.blocks.audit({"swapped": swapped.kept.values()})
    assert discard(swapped, pools.blocks) == list(swapped.kept.values())
    pools.blocks.audit({})
