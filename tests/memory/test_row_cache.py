"""The row cache gives back what it was given, keeps to its budget, and forgets what was not used."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.memory.row_cache import WAYS, RowCache

HEAD_DIM, SCALES = 64, 2
SET_BYTES = WAYS * (HEAD_DIM + SCALES + 9) + 1


def row(key: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(key)
    return rng.integers(0, 256, HEAD_DIM).astype(np.uint8), rng.integers(0, 256, SCALES).astype(np.uint8)


def rows(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    made = [row(int(key)) for key in keys]
    shape = (len(keys), -1)
    codes = np.concatenate([codes for codes, _ in made]) if made else np.empty(0, np.uint8)
    scales = np.concatenate([scales for _, scales in made]) if made else np.empty(0, np.uint8)
    return codes.reshape(shape) if made else codes.reshape(0, HEAD_DIM), (
        scales.reshape(shape) if made else scales.reshape(0, SCALES)
    )


def kept(cache: RowCache, keys: np.ndarray) -> np.ndarray:
    """Which keys are found; what is found is compared with what was given."""
    places = cache.find(keys)
    hits = places >= 0
    codes, scales = np.empty((hits.sum(), HEAD_DIM), np.uint8), np.empty((hits.sum(), SCALES), np.uint8)
    cache.copy(places[hits], codes, scales)
    wanted = rows(keys[hits])
    assert np.array_equal(codes, wanted[0])
    assert np.array_equal(scales, wanted[1])
    return hits


def in_cache(cache: RowCache, keys: np.ndarray) -> np.ndarray:
    """Which keys are there, without using them."""
    return np.isin(keys + 1, cache._keys)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 7 * SET_BYTES),
    st.lists(st.lists(st.integers(0, 200), max_size=60, unique=True), max_size=12),
)
def test_a_found_row_is_the_row_that_was_given(budget: int, batches: list[list[int]]) -> None:
    cache = RowCache(budget, HEAD_DIM, SCALES)
    for batch in batches:
        keys = np.array(sorted(batch), dtype=np.int64)
        missing = keys[~kept(cache, keys)]
        cache.add(missing, *rows(missing))
        kept(cache, keys)
        assert kept(cache, np.arange(201)).sum() <= budget // SET_BYTES * WAYS


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.lists(st.integers(0, 300), max_size=120, unique=True), max_size=12),
)
def test_compiled_code_leaves_the_same_bytes(sets: int, batches: list[list[int]]) -> None:
    """Places, marks and hands too; without a compiler both are numpy's."""
    caches = [RowCache(sets * SET_BYTES, HEAD_DIM, SCALES, is_native=is_native) for is_native in (True, False)]
    for batch in batches:
        keys = np.array(batch, dtype=np.int64)
        found = [cache.find(keys) for cache in caches]
        assert np.array_equal(*found)
        for cache in caches:
            cache.add(keys, *rows(keys))
        for part in ("_keys", "_used", "_hands", "_codes", "_scales"):
            assert np.array_equal(*(vars(cache)[part] for cache in caches)), part


def test_everything_fits_a_cache_with_room_and_nothing_a_cache_without() -> None:
    keys = np.arange(0, 10_000, 7, dtype=np.int64) * 7919
    roomy, empty = RowCache(40 * 10_000 * 75, HEAD_DIM, SCALES), RowCache(SET_BYTES - 1, HEAD_DIM, SCALES)
    for cache in (roomy, empty):
        cache.add(keys, *rows(keys))
    assert kept(roomy, keys).all()
    assert not kept(empty, keys).any()
    assert (roomy.num_bytes <= 40 * 10_000 * 75, empty.num_bytes) == (True, 0)


def test_the_budget_bounds_everything_the_cache_holds() -> None:
    cache = RowCache(10 * SET_BYTES + 17, HEAD_DIM, SCALES)
    held = sum(value.nbytes for value in vars(cache).values() if isinstance(value, np.ndarray))
    assert cache.num_bytes == held == 10 * SET_BYTES


def test_the_clock_spares_what_was_used_since_the_hand_passed() -> None:
    cache = RowCache(SET_BYTES, HEAD_DIM, SCALES)  # one set: every key meets every other
    keys = np.arange(WAYS, dtype=np.int64)
    cache.add(keys, *rows(keys))
    used = keys[::2]
    assert kept(cache, used).all()
    news = np.arange(100, 100 + WAYS // 2, dtype=np.int64)
    for key in news:  # the hand passes everything once
        cache.add(np.array([key]), *rows(np.array([key])))
    assert (np.isin(keys, used) == [bool(one) for one in in_cache(cache, keys)]).all()
    cache.add(np.array([999]), *rows(np.array([999])))
    assert in_cache(cache, np.append(used, news)).tolist() == [False] + [True] * (len(used) - 1 + len(news))


def test_when_all_were_used_the_hand_takes_the_first_after_once_round() -> None:
    cache = RowCache(SET_BYTES, HEAD_DIM, SCALES)
    keys = np.arange(WAYS, dtype=np.int64)
    cache.add(keys, *rows(keys))
    assert kept(cache, keys).all()
    cache.add(np.array([50]), *rows(np.array([50])))
    assert (cache.find(np.append(keys, 50)) >= 0).tolist() == [False] + [True] * WAYS


@pytest.mark.parametrize("is_native", [True, False], ids=["compiled", "numpy"])
@pytest.mark.parametrize("count", [WAYS, WAYS + 1, 5 * WAYS])
def test_of_more_new_rows_than_a_set_has_places_it_keeps_the_first(count: int, is_native: bool) -> None:
    cache = RowCache(SET_BYTES, HEAD_DIM, SCALES, is_native=is_native)
    keys = np.arange(count, dtype=np.int64)
    cache.add(keys, *rows(keys))
    assert kept(cache, keys).tolist() == [True] * WAYS + [False] * (count - WAYS)
