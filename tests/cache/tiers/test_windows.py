"""Which window rows are written, that they come back, and what a prompt can begin from."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.cache.snapshot import Snapshot
from headrace.cache.tiers.segment import Damaged
from headrace.cache.tiers.windows import Cut, best_window, join_rows, pack_rows, policy_of, unpack_rows, window_key

WINDOW = 128


def rows(low: int, high: int, floor: int = 0) -> Snapshot:
    """Rows whose bytes say their position."""
    positions = torch.arange(low, high, dtype=torch.int64)
    codes = torch.stack([(positions * 7 + layer) % 251 for layer in range(3)]).to(torch.uint8)
    return Snapshot(high, low, WINDOW, floor, codes[..., None].repeat(1, 1, 6), codes[..., None].repeat(1, 1, 2) + 1)


def is_same(one: Snapshot, other: Snapshot) -> bool:
    marks = (one.num_tokens, one.oldest, one.window, one.encoder_floor)
    return (
        marks == (other.num_tokens, other.oldest, other.window, other.encoder_floor)
        and torch.equal(one.codes, other.codes)
        and torch.equal(one.scales, other.scales)
    )


def test_rows_come_back_as_they_were() -> None:
    taken = rows(300, 556, floor=280)
    for cut in (Cut(300, 512), Cut(384, 512)):
        assert is_same(unpack_rows(pack_rows(taken, cut)), rows(cut.first, cut.end, floor=280))
    assert is_same(join_rows(rows(256, 384), rows(384, 512)), rows(256, 512))


@pytest.mark.parametrize("size", [0, 10, 43, 1000])
def test_bytes_that_are_no_rows_are_damage(size: int) -> None:
    with pytest.raises(Damaged):
        unpack_rows(pack_rows(rows(384, 512), Cut(384, 512))[:size])


def test_full_writes_every_row_once() -> None:
    policy, written, cuts = policy_of("full", 0), 0, []
    for end in range(256, 1537, 256):
        due = policy.due(max(0, end - 256), end, written, WINDOW)
        cuts += due
        written = due[-1].end if due else written
    assert [(cut.first, cut.end) for cut in cuts] == [(end - 128, end) for end in range(128, 1537, 128)]


def test_full_leaves_out_what_is_no_longer_held() -> None:
    due = policy_of("full", 0).due(1000, 1256, 0, WINDOW)
    assert [(cut.first, cut.end) for cut in due] == [(1024, 1152)]


def test_periodic_writes_what_one_place_needs_every_p_tokens() -> None:
    policy = policy_of("periodic", 500)
    assert policy.due(0, 499, 0, WINDOW) == []
    assert policy.due(244, 500, 0, WINDOW) == []  # the last whole block ends at 384
    assert policy.due(300, 556, 0, WINDOW) == [Cut(300, 512)]
    assert policy.due(600, 856, 512, WINDOW) == []
    assert policy.due(800, 1056, 512, WINDOW) == [Cut(800, 1024)]


def test_none_writes_nothing() -> None:
    assert policy_of("none", 1).due(0, 1 << 20, 0, WINDOW) == []


def test_what_is_encoded_again_by_policy() -> None:
    found = {name: policy_of(name, 1024).recomputed(7000, WINDOW, 43) for name in ("none", "periodic", "full")}  # type: ignore[arg-type]
    assert found == {"none": 5504, "periodic": 856, "full": 0}
    assert policy_of("none", 0).recomputed(1 << 20, WINDOW, 61) == 7808


@given(st.integers(0, 1 << 32))
def test_the_best_window_is_the_best_of_all(seed: int) -> None:
    """Against trying every record, alone and joined with those before it."""
    random = np.random.default_rng(seed)
    ends = sorted(random.choice(np.arange(128, 2049, 128), random.integers(0, 12), replace=False).tolist())
    is_full = bool(random.integers(2))
    stored = {end: rows(max(0, end - (128 if is_full else 256)), end) for end in ends}
    target = int(random.integers(2, 2100)) // 2 * 2
    best = 0
    for end in ends:
        joined = stored[end]
        while joined.oldest in stored:
            joined = join_rows(stored[joined.oldest], joined)
        row = min(target, end)
        if end <= target + WINDOW and joined.covers(row):
            best = max(best, row)
    found = best_window(ends, target, WINDOW, 2, stored.get)
    assert (0 if found is None else found[1]) == best
    if found is not None:
        assert found[0].covers(found[1])
        assert is_same(found[0], rows(found[0].oldest, found[0].num_tokens))


def test_a_window_has_a_key_of_its_own() -> None:
    assert len({b"a" * 16, window_key(b"a" * 16), window_key(b"b" * 16)}) == 3
