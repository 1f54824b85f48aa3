"""Blocks counted by their holders."""

import pytest

from headrace.core.errors import InternalError
from headrace.engine.scheduler.holdings import Holdings
from headrace.engine.scheduler.request import count_holders

A, B, C, AB, ABC = (frozenset(names) for names in ("a", "b", "c", "ab", "abc"))


def test_matched_blocks_are_counted_by_who_has_them_at_the_same_place() -> None:
    tables = {"a": [5, 6, 7], "b": [5, 6], "c": [6, 5]}
    assert count_holders([5, 6, 7, 8], tables) == ((AB, 2), (A, 1), (frozenset(), 1))


def test_blocks_shared_with_a_new_request_change_their_group() -> None:
    held = Holdings({A: 5})
    held.share(A, "b", 2)
    held.share(frozenset(), "b", 1)
    assert dict(held.groups()) == {A: 3, AB: 2, B: 1}
    assert held.held == 6


def test_only_blocks_that_nobody_else_holds_are_released() -> None:
    held = Holdings({A: 3, AB: 2, B: 1})
    assert held.drop("b") == 1
    assert dict(held.groups()) == {A: 5}
    assert held.drop("b") == 0


def test_a_fork_shares_all_but_the_open_block() -> None:
    held = Holdings({A: 3, AB: 2})
    held.fork("a", ["c"], kept=1)
    assert dict(held.groups()) == {A: 1, frozenset("ac"): 2, ABC: 2}


def test_a_copy_is_independent() -> None:
    held = Holdings({A: 3})
    held.copy().add("a", 2)
    assert held.private("a") == 3


def test_blocks_that_are_not_there_cannot_be_taken() -> None:
    held = Holdings({A: 3})
    with pytest.raises(InternalError, match=r"4 blocks of \['a'\] were asked for; they hold 3"):
        held.share(A, "b", 4)
