"""A state after any steps and rollbacks against one that only ever saw the tokens that stayed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.cache.state_shape import StateShape
from headrace.core.errors import CapacityError, InternalError
from headrace.core.state_spec import Rollback
from tests.cache.pretend import SHAPE, WINDOW, forward

CPU = torch.device("cpu")
RELEASED = StateShape(
    head_dim=512,
    index_head_dim=128,
    window=128,
    num_layers=40,
    num_draft_layers=3,
    decoder_start=20,
    source_ratios={2: 2, 8: 2, 14: 2, 20: 1},
    lookback=3,
)


def new(shape: StateShape = SHAPE) -> SequenceState:
    return SequenceState(shape, CPU)


def seen(state: SequenceState) -> list[Tensor]:
    """Return everything that the next token may read, and the bytes of the stores."""
    parts = [plane for store in state.stores.values() for plane in store.stored_rows()]
    low = max(0, state.length - state.shape.window + 1)
    parts += [ring.read(max(low, ring.oldest), state.length) for ring in state.rings + state.draft_rings]
    if state.length % 2:
        parts += [part for pair in state.pairs.values() for part in pair.read(state.length - 1)]
    return [*parts, torch.from_numpy(state.previous_ids.copy())]


def same(state: SequenceState, other: SequenceState) -> bool:
    if state.length != other.length:
        return False
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(seen(state), seen(other), strict=True))


# ----------------------------------------------------------------------------------------------------------- rollback


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, WINDOW + 2)), min_size=1, max_size=8), st.integers(0, 9))
def test_rollback_and_replay_equals_never_drafted(steps: list[tuple[int, int]], last: int) -> None:
    state, kept, lowest = new(), list[int](), 0
    for step, (count, back) in enumerate(steps):
        tokens = [(17 * step + 5 * i) % 50 for i in range(count)]  # others than those that were taken back
        forward(state, tokens)
        kept += tokens
        length = len(kept) - back
        lowest_now = max(lowest, len(kept) - WINDOW)
        if length < lowest_now:
            with pytest.raises(CapacityError, match=f"accepted are {lowest_now} to {len(kept)}"):
                state.rollback(length)
        else:
            state.rollback(length)
            if back:
                lowest = lowest_now
            kept = kept[:length]
        plain = new()
        forward(plain, kept)
        assert same(state, plain)
    forward(state, list(range(last)))
    plain = new()
    forward(plain, kept + list(range(last)))
    assert same(state, plain)


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 12, 13, 25])
def test_up_to_a_window_of_tokens_can_be_taken_back(length: int) -> None:
    tokens = [(5 * i) % 50 for i in range(length)]
    for back in range(min(length, WINDOW) + 1):
        state, plain = new(), new()
        forward(state, tokens)
        state.rollback(length - back)
        forward(plain, tokens[: length - back])
        assert same(state, plain)
        # token by token, and other tokens than before
        for token in (3, 1, 4, 1, 5, 9, 2):
            forward(state, [token])
            forward(plain, [token])
            assert same(state, plain)


@pytest.mark.parametrize("length", [-1, 0, 13, 21, 100])
def test_going_back_further_or_forward_is_refused_and_changes_nothing(length: int) -> None:
    state, plain = new(), new()
    tokens = list(range(20))
    forward(state, tokens)
    forward(plain, tokens)
    with pytest.raises(CapacityError, match=f"cannot go back from 20 to {length} tokens; accepted are 14 to 20"):
        state.rollback(length)
    assert same(state, plain)


def test_a_second_rollback_counts_from_the_longest_length() -> None:
    # what the longer sequence overwrote is gone: two rollbacks in a row do not reach twice as far
    state = new()
    forward(state, list(range(20)))
    state.rollback(14)
    with pytest.raises(CapacityError, match="accepted are 14 to 14"):
        state.rollback(13)
    forward(state, [7, 8])
    with pytest.raises(CapacityError, match="accepted are 14 to 16"):
        state.rollback(13)
    state.rollback(14)
    forward(state, list(range(9)))  # now the newest 6 of 23 tokens may go
    with pytest.raises(CapacityError, match="accepted are 17 to 23"):
        state.rollback(16)
    state.rollback(17)
    plain = new()
    forward(plain, [*range(14), 0, 1, 2])
    assert same(state, plain)


def test_a_half_pair_is_open_again_after_a_rollback() -> None:
    state = new()
    forward(state, [1, 2, 3, 4, 5])
    forward(state, [6, 7])
    assert state.stores[0].length == 3
    state.rollback(5)
    assert state.stores[0].length == 2
    forward(state, [9])
    plain = new()
    forward(plain, [1, 2, 3, 4, 5, 9])
    assert same(state, plain)


# ------------------------------------------------------------------------------------------------------------- replay


def test_a_replay_starts_the_decoder_anew() -> None:
    state = new()
    forward(state, list(range(15)))
    state.start_decoder(11)
    assert [state.floor(layer_id) for layer_id in range(3)] == [0, 0, 11]
    assert state.rings[1].end == 15
    for ring in (state.rings[2], state.draft_rings[0]):
        assert (ring.oldest, ring.end) == (11, 11)
        with pytest.raises(InternalError):
            ring.read(10, 11)
        ring.store(11, torch.ones(4, 32).bfloat16())
    with pytest.raises(CapacityError, match="accepted are 11 to 15"):
        state.rollback(10)
    state.rollback(11)
    assert (state.rings[2].end, state.rings[0].end) == (11, 11)


def test_without_a_replay_nothing_is_below_the_floor() -> None:
    assert [new().floor(layer_id) for layer_id in range(3)] == [0, 0, 0]


# ---------------------------------------------------------------------------------------------------------- look-back


def test_the_newest_ids_are_remembered_oldest_first() -> None:
    state = new()
    assert state.previous_ids.tolist() == [-1, -1, -1]
    state.commit(2, np.array([7, 8]))
    assert state.previous_ids.tolist() == [-1, 7, 8]
    state.commit(30, np.arange(30))
    assert state.previous_ids.tolist() == [27, 28, 29]
    state.commit(1, np.array([-1]))  # a token inside an image
    assert state.previous_ids.tolist() == [28, 29, -1]
    assert state.length == 33
    state.rollback(31)
    assert state.previous_ids.tolist() == [26, 27, 28]


def test_ids_before_the_start_stay_missing_after_a_rollback() -> None:
    state = new()
    forward(state, [5, 6, 7, 8])
    state.rollback(1)
    assert state.previous_ids.tolist() == [-1, -1, 5]
    state.rollback(0)
    assert state.previous_ids.tolist() == [-1, -1, -1]


def test_a_model_without_ngrams_needs_no_ids() -> None:
    state = new(replace(SHAPE, lookback=0))
    state.commit(9, None)
    assert state.length == 9
    assert state.previous_ids.shape == (0,)
    state.rollback(5)
    assert state.length == 5


# -------------------------------------------------------------------------------------------------------------- bytes


def test_released_state_takes_890_bytes_a_token_in_its_buffers() -> None:
    state = new(RELEASED)
    tokens = 1000
    state.reserve(tokens)
    for layer_id, store in state.stores.items():
        rows = tokens // RELEASED.source_ratios[layer_id]
        store.append(torch.randn(rows, 512).bfloat16(), torch.randn(rows, 128).bfloat16())
        assert store.row_bytes == 288 + 68
    assert state.global_bytes == 890 * tokens
    planes = [plane for store in state.stores.values() for plane in store.stored_rows()]
    assert sum(plane.untyped_storage().nbytes() for plane in planes) == 890 * tokens
    parts = {part.name: part for part in state.describe()}
    assert parts["global KV and index keys"].bytes_per_token == 890
    assert parts["global KV and index keys"].bytes_per_token * (1 << 20) == 933_232_640
    assert all(ring.row_bytes == 528 for ring in state.rings + state.draft_rings)


def test_released_windows_take_528_bytes_a_row_whatever_the_length() -> None:
    state = new(RELEASED)
    parts = {part.name: part for part in state.describe()}
    # twice the window, so that a window of tokens can be taken back
    assert parts["window rings"].bytes_fixed == 40 * 256 * 528
    assert parts["draft window rings"].bytes_fixed == 3 * 256 * 528
    assert parts["pair histories"].bytes_fixed == 3 * 129 * 2 * 512 * 4
    assert all(part.bytes_per_token == 0 for name, part in parts.items() if name != "global KV and index keys")


def test_every_part_says_how_it_goes_back() -> None:
    kinds = {part.name: part.rollback for part in new().describe()}
    assert kinds == {
        "global KV and index keys": Rollback.APPEND,
        "window rings": Rollback.RING,
        "draft window rings": Rollback.RING,
        "pair histories": Rollback.HALF_PAIR,
        "n-gram look-back": Rollback.DERIVED,
    }


def test_described_bytes_are_those_of_the_buffers() -> None:
    state = new()
    forward(state, list(range(12)))
    parts = {part.name: part for part in state.describe()}
    rings = [buffer for ring in state.rings for buffer in (ring._codes, ring._scales)]
    assert parts["window rings"].bytes_fixed == sum(buffer.untyped_storage().nbytes() for buffer in rings)
    assert parts["global KV and index keys"].bytes_per_token * 12 == state.global_bytes
    assert state.global_bytes == sum(p.numel() for store in state.stores.values() for p in store.stored_rows())


def test_reserved_room_holds_the_tokens_without_growing() -> None:
    state = new()
    state.reserve(30)
    forward(state, [1, 2])
    places = [store.stored_rows()[0].data_ptr() for store in state.stores.values()]
    forward(state, list(range(28)))
    assert [store.stored_rows()[0].data_ptr() for store in state.stores.values()] == places


@pytest.mark.parametrize("source", [None, 1, 3])
def test_only_sources_have_a_store(source: int | None) -> None:
    state = new()
    assert state.store_of(2) is state.stores[2]
    with pytest.raises(InternalError, match=f"layer {source} is not a KV source"):
        state.store_of(source)
    assert list(state.pairs) == [0]  # a source of ratio 1 never waits for a partner
