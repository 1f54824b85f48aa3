"""Fill in the middle: which documents, where the cuts fall, and the way back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import UserError
from headrace.train.data import special_tokens
from headrace.train.data.fim import Cut, draw_cut, encode_cut
from tests.train.data.small import encoder, tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)


def restore(ids: list[int]) -> str:
    """Put a rearranged document back together from its sentinels."""
    begin, hole, end = (
        ids.index(encoder().token_id(token))
        for token in (special_tokens.FIM_BEGIN, special_tokens.FIM_HOLE, special_tokens.FIM_END)
    )
    assert begin == 0
    prefix, suffix, middle = ids[begin + 1 : hole], ids[hole + 1 : end], ids[end + 1 :]
    return "".join(tokenizer().decode(part) for part in (prefix, middle, suffix))


@given(TEXT, st.integers(0, 1000))
def test_a_rearranged_document_can_be_restored(text: str, seed: int) -> None:
    cut = draw_cut(text, "name", seed, 1.0)
    assert cut is not None
    assert "".join(cut) == text
    assert restore(encode_cut(cut, encoder())) == text


def test_the_middle_comes_last() -> None:
    begin, hole, end = (
        encoder().token_id(t) for t in (special_tokens.FIM_BEGIN, special_tokens.FIM_HOLE, special_tokens.FIM_END)
    )
    a, b, c = (encoder().plain([x])[0][0] for x in "abc")
    assert encode_cut(Cut("a", "b", "c"), encoder()) == [begin, a, hole, c, end, b]


def test_a_cut_depends_on_the_seed_and_the_name_alone() -> None:
    text = "x" * 1000
    cuts = {(seed, name): draw_cut(text, name, seed, 1.0) for seed in (1, 2) for name in ("a", "b")}
    assert len(set(cuts.values())) == 4
    assert draw_cut(text, "b", 2, 1.0) == cuts[2, "b"]


def test_about_the_wanted_share_is_rearranged() -> None:
    done = [draw_cut("text", f"{i}", 0) for i in range(4000)]
    assert abs(sum(cut is not None for cut in done) / 4000 - 0.1) < 0.025
    assert draw_cut("text", "a", 0, 0.0) is None


def test_cuts_fall_everywhere() -> None:
    cuts = [draw_cut("abc", f"{i}", 0, 1.0) for i in range(200)]
    assert {(len(cut.prefix), len(cut.middle)) for cut in cuts if cut} == {
        (i, j) for i in range(4) for j in range(4 - i)
    }


@pytest.mark.parametrize("rate", [-0.1, 1.1])
def test_a_rate_that_is_no_share_is_refused(rate: float) -> None:
    with pytest.raises(UserError, match="accepted is a number from 0 to 1"):
        draw_cut("text", "a", 0, rate)
