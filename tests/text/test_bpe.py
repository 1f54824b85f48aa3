"""Encoding of training text: nothing special in plain text, special tokens and characters in marked text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import UserError
from headrace.text.bpe import NUM_BYTES, Encoder, train_document

SPECIAL = ["<s>", "<user>"]
DOCUMENT = train_document(["def name(x):\n    return x\n" * 3, "naïve lines\n" * 3], 300, SPECIAL)
ENCODER = Encoder(json.dumps(DOCUMENT))


def test_ids_are_special_tokens_then_bytes_then_merges() -> None:
    vocabulary = sorted(DOCUMENT["model"]["vocab"], key=DOCUMENT["model"]["vocab"].get)
    assert vocabulary[:2] == SPECIAL
    assert all(len(token) == 1 for token in vocabulary[2 : 2 + NUM_BYTES])
    assert all(len(token) > 1 for token in vocabulary[2 + NUM_BYTES :])


def test_a_special_token_in_plain_text_stays_letters() -> None:
    assert set(ENCODER.plain(["a<user>b"])[0]).isdisjoint({0, 1})
    assert ENCODER.marked("a<user>b").ids[1] == 1


def test_marked_ids_say_which_character_they_start_at() -> None:
    text = "<s>def naïve 1<user>"
    ids, starts = ENCODER.marked(text)
    assert (ids[0], ids[-1]) == (0, 1)
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (0, text.index("<user>"))
    assert text.index("1") in starts


@given(st.lists(st.text(st.sampled_from("ab1 .:=("), min_size=1), min_size=2, max_size=5))
def test_lines_encode_alone_as_they_do_in_a_text(lines: list[str]) -> None:
    """A line that begins with something to see never joins with the one before it."""
    lines = [f"x{line}\n" for line in lines]
    assert [token_id for ids in ENCODER.plain(lines) for token_id in ids] == ENCODER.plain(["".join(lines)])[0]


def test_no_pair_of_digits_is_merged() -> None:
    document = train_document(["123123123 " * 9], 300, [])
    assert not [token for token in document["model"]["vocab"] if len(token) > 1 and any(map(str.isdigit, token))]


@pytest.mark.parametrize("text", ["", "{}", "[1"])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not a tokenizer file"):
        Encoder(text)


def test_an_unknown_token_is_named() -> None:
    with pytest.raises(UserError, match="no token '<nothing>'"):
        ENCODER.token_id("<nothing>")
    assert ENCODER.token_id("<user>") == 1
