"""How prompts are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.chunk_plan import plan_chunks
from headrace.engine.scheduler.chunk import next_chunk


def cut(total: int, chunk: int, tail: int) -> list[int]:
    """Return all chunks of a prompt whose steps have enough budget."""
    sizes = []
    while sum(sizes) < total:
        sizes.append(next_chunk(total - sum(sizes), chunk, tail, max(chunk, tail)))
    return sizes


@given(st.integers(1, 400), st.integers(1, 90), st.integers(1, 130))
def test_cutting_step_by_step_gives_the_chunk_plan(total: int, chunk: int, tail: int) -> None:
    assert cut(total, chunk, min(tail, total)) == plan_chunks(total, chunk, tail)


@pytest.mark.parametrize(
    ("left", "limit", "tail", "budget", "rows"),
    [
        (61, 7, 16, 99, 7),
        (19, 7, 16, 99, 3),  # shortened, so that 16 are left
        (16, 7, 16, 99, 16),  # the last one exceeds the limit
        (16, 7, 16, 16, 16),
        (16, 7, 16, 15, 0),  # but never the budget
        (16, 20, 16, 15, 0),
        (18, 20, 16, 15, 2),
        (18, 20, 16, 1, 1),
        (18, 20, 16, 0, 0),
        (5, 1, 1, 9, 1),
    ],
)
def test_a_chunk_keeps_to_limit_budget_and_tail(left: int, limit: int, tail: int, budget: int, rows: int) -> None:
    assert next_chunk(left, limit, tail, budget) == rows
