import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.chunk_plan import plan_chunks
from headrace.core.errors import UserError


def test_the_last_chunk_is_as_long_as_the_tail() -> None:
    assert plan_chunks(61, 7, 16) == [7, 7, 7, 7, 7, 7, 3, 16]
    assert plan_chunks(61, 16, 16) == [16, 16, 13, 16]
    assert plan_chunks(61, 61, 16) == [61]
    assert plan_chunks(61, 1, 16) == [1] * 45 + [16]
    assert plan_chunks(10, 7, 16) == [10]


def test_without_a_tail_chunks_are_plain() -> None:
    assert plan_chunks(61, 7, 1) == [7] * 8 + [5]
    assert plan_chunks(14, 7, 1) == [7, 7]
    assert plan_chunks(3, 7, 1) == [3]
    assert plan_chunks(1, 1, 1) == [1]


@given(st.integers(1, 3000), st.integers(1, 3500), st.integers(1, 300))
def test_every_plan_covers_the_prompt_in_chunks_of_the_allowed_size(tokens: int, chunk: int, tail: int) -> None:
    sizes = plan_chunks(tokens, chunk, tail)
    assert sum(sizes) == tokens
    assert all(1 <= size <= chunk for size in sizes[:-1])
    assert min(tail, tokens) <= sizes[-1] <= max(chunk, tail)
    assert len(sizes) <= tokens // chunk + 2  # no more passes than needed, plus the tail's


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_without_tokens_is_refused(chunk: int) -> None:
    with pytest.raises(UserError, match=f"a chunk of {chunk} tokens is not possible; accepted is 1 or more") as caught:
        plan_chunks(5, chunk, 1)
    assert caught.value.param == "chunk"
