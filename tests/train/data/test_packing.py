"""Documents in one row stay apart: positions, labels, groups, windows and n-grams are those of the document alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InternalError, UserError
from headrace.memory.addressing import Addressing, hash_primes
from headrace.train.data.layout import group_tokens, ngram_histories, window_starts
from headrace.train.data.packing import (
    IGNORE,
    Answer,
    Sample,
    Span,
    best_fit,
    best_fitting,
    next_token_labels,
    pack_all,
    pack_row,
    pre_split,
    stack_rows,
    text_sample,
)

PAD = 2
VOCAB = 50
lengths_and_row = st.integers(1, 60).flatmap(
    lambda row: st.tuples(st.lists(st.integers(1, row), max_size=40), st.just(row))
)
some_documents = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9).map(lambda ids: np.array(ids, dtype=np.int64)),
    min_size=1, max_size=6,
)  # fmt: skip


def addressing() -> Addressing:
    rows = int(hash_primes(1, 3, 2, 11).sum())
    return Addressing([0], [rows], 3, 11, 2, PAD, VOCAB, np.arange(VOCAB))


@given(lengths_and_row)
def test_best_fit_places_every_document_once_and_whole(case: tuple[list[int], int]) -> None:
    lengths, row_tokens = case
    rows = best_fit(lengths, row_tokens)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= row_tokens for row in rows)


@given(lengths_and_row)
def test_no_two_rows_of_best_fit_would_fit_into_one(case: tuple[list[int], int]) -> None:
    lengths, row_tokens = case
    fills = sorted(sum(lengths[index] for index in row) for row in best_fit(lengths, row_tokens))
    assert len(fills) < 2 or fills[0] + fills[1] > row_tokens


def test_best_fit_takes_the_fullest_row_with_room() -> None:
    # 6 and 5 open rows with 4 and 5 free; 4 goes where it leaves nothing, 3 into the other
    assert best_fit([3, 5, 4, 6], 10) == [[0, 1], [2, 3]]
    assert best_fit([3, 5, 2, 4], 7) == [[0, 3], [1, 2]]
    assert best_fit([], 7) == []


@pytest.mark.parametrize("length", [0, 8])
def test_a_document_that_cannot_be_in_a_row_is_named(length: int) -> None:
    with pytest.raises(UserError, match=f"document 1 has {length} tokens; a row holds documents of 1 to 7"):
        best_fit([3, length], 7)


def test_best_fitting_is_the_first_of_the_longest_that_fit() -> None:
    assert best_fitting([9, 3, 5, 5, 1], 6) == 2
    assert best_fitting([9, 7], 6) is None


@given(st.integers(1, 300), st.integers(1, 40))
def test_pre_split_cuts_only_what_is_longer_than_a_row(length: int, row_tokens: int) -> None:
    spans = pre_split(length, row_tokens)
    assert [token for span in spans for token in range(span.start, span.start + span.length)] == list(range(length))
    assert all(span.length == row_tokens for span in spans[:-1])
    assert 1 <= spans[-1].length <= row_tokens


@given(some_documents, st.integers(0, 5))
def test_labels_are_the_next_token_of_the_same_document(documents: list[np.ndarray], padding: int) -> None:
    total = sum(map(len, documents)) + padding
    row = pack_row([text_sample(ids) for ids in documents], total, PAD)
    for ids, span in zip(documents, row.spans, strict=True):
        piece = slice(span.start, span.start + span.length)
        assert row.token_ids[piece].tolist() == ids.tolist()
        assert row.labels[piece].tolist() == [*ids[1:].tolist(), IGNORE]
        assert row.positions[piece].tolist() == list(range(len(ids)))
    assert (row.token_ids[total - padding :] == PAD).all()
    assert (row.labels[total - padding :] == IGNORE).all()


@given(some_documents, st.integers(0, 5), st.integers(1, 3), st.integers(1, 5))
def test_a_packed_document_sees_what_it_sees_alone(
    documents: list[np.ndarray], padding: int, ratio: int, window: int
) -> None:
    batch = stack_rows([pack_row([text_sample(i) for i in documents], sum(map(len, documents)) + padding, PAD)])
    segments = batch.segments(0)
    groups, starts = group_tokens(segments, ratio), window_starts(segments, window)
    histories = ngram_histories(addressing(), batch.token_ids[0], segments)
    first_entry = 0
    for index, (ids, span) in enumerate(zip(documents, batch.spans[0], strict=True)):
        alone = [Span(0, len(ids))]
        own = group_tokens(alone, ratio)
        piece, entries = slice(span.start, span.start + span.length), groups.document_ids == index
        assert (groups.members[entries] - span.start == own.members).all()
        assert (groups.positions[entries] == own.positions).all()
        assert (groups.visible_from[piece] == first_entry).all()
        assert (groups.visible_to[piece] - first_entry == own.visible_to).all()
        assert (starts[piece] - span.start == window_starts(alone, window)).all()
        assert (histories[piece] == ngram_histories(addressing(), ids, alone)).all()
        first_entry += len(own.members)


@given(some_documents.filter(lambda documents: len(documents) > 1), st.data())
def test_a_changed_document_changes_nothing_of_the_others(documents: list[np.ndarray], data: st.DataObject) -> None:
    changed = data.draw(st.integers(0, len(documents) - 1))
    other = [ids if index != changed else (ids + 1) % VOCAB for index, ids in enumerate(documents)]
    rows = [pack_row([text_sample(ids) for ids in version], 60, PAD) for version in (documents, other)]
    batches = [stack_rows([row]) for row in rows]
    histories = [ngram_histories(addressing(), batch.token_ids[0], batch.segments(0)) for batch in batches]
    is_other = batches[0].document_ids[0] != changed
    for before, after in [
        (batches[0].labels[0], batches[1].labels[0]),
        (batches[0].positions[0], batches[1].positions[0]),
        (histories[0], histories[1]),
    ]:
        assert before[is_other].tobytes() == after[is_other].tobytes()


def test_asked_tokens_alone_are_labels() -> None:
    ids = np.array([5, 6, 7, 8])
    is_asked = np.array([True, False, True, False])
    assert next_token_labels(ids, is_asked).tolist() == [IGNORE, 7, IGNORE, IGNORE]


def test_a_batch_knows_its_padding_and_its_answers() -> None:
    probe = Sample(token_ids=np.array([4, 5]), labels=np.array([IGNORE, 9]), kind="p", answers=(Answer(1, 1, None),))
    rows = [
        pack_row([text_sample(np.array([1, 2, 3])), probe], 6, PAD),
        pack_row([text_sample(np.arange(6))], 6, PAD),
    ]
    batch = stack_rows(rows)
    assert batch.is_padding.tolist() == [[False] * 5 + [True], [False] * 6]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 2], [0] * 6]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert batch.loss_mask.tolist()[0] == [True, True, False, False, True, False]
    assert batch.kinds == (("text", "p"), ("text",))
    assert batch.answers == ((Answer(4, 1, None),), ())
    assert batch.segments(0) == (Span(0, 3), Span(3, 2), Span(5, 1))
    assert batch.segments(1) == (Span(0, 6),)
    assert batch.num_tokens == 11
    assert batch.utilisation == 11 / 12


def test_pack_all_keeps_every_document() -> None:
    samples = [text_sample(np.full(length, length)) for length in [3, 5, 2, 4]]
    rows = pack_all(samples, 7, PAD)
    assert [[span.length for span in row.spans] for row in rows] == [[3, 4], [5, 2]]


def test_what_makes_no_row_or_batch_is_refused() -> None:
    with pytest.raises(InternalError, match="do not make a row of 3"):
        pack_row([text_sample(np.arange(4))], 3, PAD)
    with pytest.raises(InternalError, match="all of one length"):
        stack_rows([pack_row([text_sample(np.arange(2))], size, PAD) for size in (3, 4)])
