import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cache.chain import Chain
from headrace.core.errors import InternalError

NAMESPACE = {"model": "tiny", "lineage": "exact"}
IDS = np.arange(400) % 251


def chain(ids: np.ndarray = IDS, marks: dict[int, bytes] | None = None, **namespace: str) -> Chain:
    one = Chain({**NAMESPACE, **namespace})
    one.append(ids, marks)
    return one


def test_keys_are_of_whole_blocks_and_of_all_that_came_before() -> None:
    keys = chain().keys
    assert len(keys) == len(set(keys)) == 1 + 3
    other = IDS.copy()
    other[130] += 1
    changed = chain(other).keys
    assert [a == b for a, b in zip(keys, changed, strict=True)] == [True, True, False, False]
    # the same 128 ids after others are another block
    assert chain(np.concatenate([IDS[128:256], IDS[128:256]])).keys[2] != keys[2]
    assert all(len(key) == 16 for key in keys)


@given(st.lists(st.integers(0, 150), max_size=8))
def test_pieces_add_up_to_the_same_keys(sizes: list[int]) -> None:
    total = sum(sizes)
    ids = np.arange(total) % 97
    whole, pieces = Chain(NAMESPACE), Chain(NAMESPACE)
    whole.append(ids)
    low = 0
    for size in sizes:
        pieces.append(ids[low : low + size])
        low += size
    assert pieces.keys == whole.keys
    assert pieces.num_tokens == total
    assert np.array_equal(pieces.token_ids, ids)


def test_namespaces_never_share_a_key() -> None:
    spaces = [
        {},
        {"lineage": "approximate"},
        {"salt": "a"},
        {"salt": ""},
        {"sal": "ta"},
        {"model": "tinylineage", "lineage": ""},
    ]
    keys = [key for space in spaces for key in chain(**space).keys]
    assert len(keys) == len(set(keys))
    assert chain(salt="a", tenant="b").keys == chain(tenant="b", salt="a").keys


def test_marks_tell_equal_ids_apart_from_their_place_on() -> None:
    plain, marked = chain(), chain(marks={200: b"picture 1"})
    assert [a == b for a, b in zip(plain.keys, marked.keys, strict=True)] == [True, True, False, False]
    for other in ({200: b"picture 2"}, {201: b"picture 1"}, {200: b"picture 1", 201: b""}):
        assert chain(marks=other).keys[2] != marked.keys[2]
    assert chain(marks={200: b"picture 1"}).keys == marked.keys


def test_marks_belong_to_tokens_that_come_with_them() -> None:
    one = chain()
    one.append(IDS[:10], {405: b"x"})
    for place in (399, 410):
        with pytest.raises(InternalError, match=f"a mark at token {place} came with tokens 410 to 409"):
            one.append(IDS[:0], {place: b"x"})


@pytest.mark.parametrize(
    ("marks", "others", "common"),
    [
        ({}, {}, 100),
        ({50: b"a"}, {50: b"a"}, 100),
        ({50: b"a"}, {50: b"b"}, 50),
        ({50: b"a"}, {}, 50),
        ({}, {99: b"a"}, 99),
        ({120: b"a"}, {}, 100),  # after the place where the ids differ
    ],
)
def test_pieces_have_in_common_what_ids_and_marks_allow(
    marks: dict[int, bytes], others: dict[int, bytes], common: int
) -> None:
    other = IDS.copy()
    other[100:] += 1
    a, b = chain(marks=marks).piece(0), chain(other, others).piece(0)
    assert a.common(b) == b.common(a) == common


def test_a_piece_ends_where_it_is_told_to() -> None:
    piece = chain(marks={130: b"a", 200: b"b"}).piece(1, 200)
    assert np.array_equal(piece.token_ids, IDS[128:200])
    assert piece.marks == ((2, b"a"),)
    assert piece.common(chain(marks={130: b"a"}).piece(1)) == 72
