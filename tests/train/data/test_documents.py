"""Documents as tokens: begin and end, pieces, cutting of long texts, fill in the middle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import UserError
from headrace.train.data import special_tokens
from headrace.train.data.corpus import Document
from headrace.train.data.documents import cut_at_line_ends, tokenize
from headrace.train.data.packing import IGNORE
from tests.train.data.small import documents, encoder, tokenizer

LENGTHS = [300, 5, 120, 77]


def test_every_document_is_begin_text_end() -> None:
    made = documents(LENGTHS)
    text = tokenize(made, encoder())
    assert len(text) == len(made)
    assert text.num_bytes == sum(len(document.text.encode()) for document in made)
    for index, document in enumerate(made):
        ids = text.piece(index, 0, text.length(index)).token_ids.tolist()
        assert (ids[0], ids[-1]) == (special_tokens.BEGIN_ID, special_tokens.END_ID)
        assert tokenizer().decode(ids[1:-1]) == document.text


def test_a_piece_is_a_document_of_its_own() -> None:
    text = tokenize(documents(LENGTHS), encoder())
    whole, piece = text.piece(2, 0, text.length(2)), text.piece(2, 3, 5)
    assert piece.token_ids.tolist() == whole.token_ids[3:8].tolist()
    assert piece.labels.tolist() == [*whole.token_ids[4:8].tolist(), IGNORE]


def test_samples_of_a_row_length_hold_every_token_once() -> None:
    text = tokenize(documents(LENGTHS), encoder())
    samples = text.samples(16)
    assert max(map(len, samples)) <= 16
    assert np.concatenate([sample.token_ids for sample in samples]).tolist() == text.token_ids.tolist()


def test_special_tokens_in_a_text_are_letters() -> None:
    text = tokenize([Document("a", "a", f"x{special_tokens.END}<think>")], encoder())
    ids = text.token_ids.tolist()
    assert sorted(ids)[:2] == [special_tokens.BEGIN_ID, special_tokens.END_ID]
    assert min(ids[1:-1]) > special_tokens.FIRST_RESERVED_ID


@given(st.text(st.sampled_from("ab\n"), max_size=80), st.integers(1, 12))
def test_long_texts_are_cut_after_line_ends(text: str, limit: int) -> None:
    parts = list(cut_at_line_ends(text, limit))
    assert "".join(parts) == text
    assert all(len(part) <= limit for part in parts)
    assert all(part.endswith("\n") or "\n" not in part for part in parts[:-1])


def test_parts_are_documents_with_names_of_their_own() -> None:
    text = tokenize(documents([300, 5]), encoder(), max_characters=100)
    assert text.names[0] == "made:0#0"
    assert text.names[-1] == "made:1"
    assert len(text) > 4


def test_fill_in_the_middle_happens_to_some_and_keeps_the_others() -> None:
    made = documents([60 + i for i in range(80)])
    plain, mixed = tokenize(made, encoder()), tokenize(made, encoder(), seed=5, fim_rate=0.5)
    hole = encoder().token_id(special_tokens.FIM_HOLE)
    rearranged = [hole in mixed.piece(i, 0, mixed.length(i)).token_ids for i in range(80)]
    assert 20 < sum(rearranged) < 60
    for index in range(80):
        if not rearranged[index]:
            same = mixed.piece(index, 0, mixed.length(index)).token_ids
            assert same.tolist() == plain.piece(index, 0, plain.length(index)).token_ids.tolist()


def test_a_document_is_rearranged_alike_wherever_it_stands() -> None:
    made = documents(LENGTHS)
    forward = tokenize(made, encoder(), seed=5, fim_rate=1.0)
    backward = tokenize(made[::-1], encoder(), seed=5, fim_rate=1.0)
    for index in range(len(made)):
        other = len(made) - 1 - index
        ids = forward.piece(index, 0, forward.length(index)).token_ids
        assert ids.tolist() == backward.piece(other, 0, backward.length(other)).token_ids.tolist()


def test_no_documents_and_no_room_are_refused() -> None:
    with pytest.raises(UserError, match="no documents to tokenize"):
        tokenize([], encoder())
    with pytest.raises(UserError, match="max_characters is 0"):
        tokenize(documents([5]), encoder(), max_characters=0)
