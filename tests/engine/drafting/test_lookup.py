"""The look-up drafter finds what a search through the whole text finds, and remembers no more than it may."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InternalError
from headrace.engine.drafting.choice import Choice
from headrace.engine.drafting.drafter import Committed, Drafter, Wanted
from headrace.engine.drafting.lookup import LookupDrafter
from headrace.engine.drafting.proposal import Proposal
from tests.engine.sampling.states import state_of


def searched(text: list[int], count: int, sizes: range, capacity: int) -> tuple[tuple[int, ...], int | None]:
    """Return guesses and tokens matched, by comparing the end of the text with every place in it."""
    text = text[-capacity:]
    for size in sorted(sizes, reverse=True):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                grown = list(text)
                for place in range(count):
                    grown.append(grown[end + place])
                return tuple(grown[len(text) :]), size
    return (), None


def committed(name: str, first: int, ids: list[int]) -> Committed:
    return Committed(name, first, np.array(ids, dtype=np.int64))


def wanted(name: str, token_id: int, count: int = 5) -> Wanted:
    return Wanted(name, token_id, count, Choice(state_of()))


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=120),
    low=st.integers(1, 3),
    more=st.integers(0, 3),
    capacity=st.integers(8, 40),
    count=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_guesses_are_what_a_search_finds(
    text: list[int], low: int, more: int, capacity: int, count: int, seed: int
) -> None:
    drafter = LookupDrafter(7, min_match=low, max_match=low + more, capacity=capacity)
    numbers, place = random.Random(seed), 0
    while place < len(text):
        proposal = drafter.propose([wanted("a", text[place], count)])[0]
        known = text[: place + 1] if place else []  # of a sequence nobody observed nothing is known
        assert (proposal.token_ids, proposal.match_tokens) == searched(
            known, count, range(low, low + more + 1), capacity
        )
        step = min(numbers.randrange(1, 9), len(text) - place)
        drafter.observe([committed("a", place, text[place : place + step])])
        place += step


def test_the_longest_match_wins_and_of_equals_the_newest() -> None:
    drafter = LookupDrafter(2, min_match=1, max_match=3)
    drafter.observe([committed("a", 0, [1, 2, 3, 9, 9, 3, 7, 8, 3, 6, 6, 1, 2])])
    assert drafter.propose([wanted("a", 3)])[0].token_ids == (9, 9)
    drafter.observe([committed("a", 13, [4])])
    assert drafter.propose([wanted("a", 3)])[0].token_ids == (6, 6)


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    drafter = LookupDrafter(7)
    drafter.observe([committed("a", 0, [1, 2, 3, 1, 2])])
    assert drafter.propose([wanted("a", 3, 7)])[0].token_ids == (1, 2, 3, 1, 2, 3, 1)


def test_sequences_do_not_mix_and_are_forgotten() -> None:
    drafter: Drafter = LookupDrafter(3)
    drafter.observe([committed("a", 0, [1, 2, 3, 4, 1]), committed("b", 0, [1, 2, 9, 9, 1])])
    both = drafter.propose([wanted("b", 2), wanted("a", 2), wanted("c", 2)])
    assert [one.token_ids for one in both] == [(9, 9, 1), (3, 4, 1), ()]
    drafter.forget(["a", "nobody"])
    assert drafter.propose([wanted("a", 2)])[0].token_ids == ()
    drafter.observe([committed("a", 0, [5])])


def test_the_index_stays_within_its_bound_and_works_on() -> None:
    drafter = LookupDrafter(4, min_match=2, max_match=5, capacity=50)
    numbers = random.Random(3)
    for place in range(3000):
        drafter.observe([committed("a", place, [numbers.randrange(1000)])])
        index = drafter._indices["a"]
        assert index.num_entries <= 4 * 2 * 50
    drafter.observe([committed("a", 3000, [7, 8, 9, 7])])
    assert drafter.propose([wanted("a", 8)])[0].token_ids == (9, 7, 8, 9)
    assert drafter.bytes_per_sequence < 200_000


def test_what_lies_before_the_bound_is_not_found_whenever_it_is_cleaned_away() -> None:
    for extra in range(40):
        drafter = LookupDrafter(2, capacity=20)
        drafter.observe([committed("a", 0, [1, 2, 3, *range(100, 120 + extra), 1])])
        assert drafter.propose([wanted("a", 2)])[0].token_ids == ()


@pytest.mark.parametrize("first", [0, 2, 4])
def test_a_position_left_out_or_twice_is_an_error(first: int) -> None:
    drafter = LookupDrafter()
    drafter.observe([committed("a", 0, [1, 2, 3])])
    with pytest.raises(InternalError, match=f"position {first} of a"):
        drafter.observe([committed("a", first, [1])])


@pytest.mark.parametrize(
    "shape", [{"min_match": 0}, {"min_match": 4, "max_match": 3}, {"max_guesses": 0}, {"capacity": 5, "max_match": 5}]
)
def test_a_shape_that_makes_no_sense_is_an_error(shape: dict[str, int]) -> None:
    with pytest.raises(InternalError, match="look-up"):
        LookupDrafter(**shape)


def test_a_proposal_says_who_made_it() -> None:
    drafter = LookupDrafter()
    assert drafter.propose([wanted("a", 1)])[0].drafter == Proposal("lookup").drafter
