import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import UserError
from headrace.text.stops import StopChecker


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    checker, shown = StopChecker(stops), ""
    for piece in pieces:
        safe, stopped = checker.push(piece)
        shown += safe
        assert stopped == (checker.matched is not None)
    return shown + checker.flush(), checker.matched


def read_one_by_one(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: read characters until some stop string ends here; of several, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[list[str], str, list[str]]:
    alphabet = "ab<汉👩"
    stops = draw(st.lists(st.text(alphabet, min_size=1, max_size=4), max_size=3))
    text = "".join(draw(st.lists(st.one_of(st.text(alphabet, max_size=3), st.sampled_from(stops or [""])), max_size=6)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    return stops, text, [text[a:b] for a, b in itertools.pairwise(edges)]


@given(cut_texts())
def test_result_is_that_of_reading_character_by_character_however_cut(case: tuple[list[str], str, list[str]]) -> None:
    stops, text, pieces = case
    assert run(stops, pieces) == read_one_by_one(stops, text)


@given(cut_texts())
def test_only_a_beginning_of_a_stop_string_is_ever_held_back(case: tuple[list[str], str, list[str]]) -> None:
    stops, _, pieces = case
    checker, shown, fed = StopChecker(stops), "", ""
    for piece in pieces:
        safe, stopped = checker.push(piece)
        if stopped:
            break
        shown, fed = shown + safe, fed + piece
        held = fed[len(shown) :]
        assert fed.startswith(shown)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("before", ["banana", "香蕉", "👩‍👩‍👧‍👦", ""])
def test_stop_string_spread_over_pieces_is_found_behind_any_text(before: str, size: int) -> None:
    text = before + "<END>" + "apple"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert run(["<END>"], pieces) == (before, "<END>")


def test_stop_string_complete_first_wins_over_one_that_begins_first() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == run(["abcd", "bc"], list("abcd")) == ("a", "bc")
    assert run(["<END>", "<EN"], ["x<END>"]) == ("x", "<EN")


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert run(["END", "<END"], ["x<END>"]) == ("x", "<END")


def test_false_start_is_released_and_the_real_one_found() -> None:
    checker = StopChecker(["aab"])
    assert checker.push("a") == ("", False)
    assert checker.push("a") == ("", False)
    assert checker.push("a") == ("a", False)
    assert checker.push("b") == ("", True)


def test_nothing_is_shown_after_the_stop() -> None:
    checker = StopChecker(["#"])
    assert checker.push("a#b") == ("a", True)
    assert checker.push("c") == ("", True)
    assert checker.flush() == ""


def test_held_text_comes_out_at_the_end() -> None:
    checker = StopChecker(["<END>"])
    assert checker.push("x<EN") == ("x", False)
    assert checker.flush() == "<EN"
    assert checker.flush() == ""


def test_no_stop_strings_hold_nothing_back() -> None:
    assert StopChecker([]).push("anything") == ("anything", False)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [None], [3], "END"])
def test_empty_or_wrong_stop_string_is_refused(stops: list) -> None:
    with pytest.raises(UserError, match="stop string"):
        StopChecker(stops)
