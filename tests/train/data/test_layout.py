"""Entries, windows and look-backs of packed rows against the definitions, written out token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InternalError
from headrace.train.data.layout import group_tokens, window_starts
from headrace.train.data.packing import Span

lengths_of_segments = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def spans(lengths: list[int]) -> list[Span]:
    starts = np.cumsum([0, *lengths]).tolist()
    return [Span(start, length) for start, length in zip(starts, lengths, strict=False)]


@given(lengths_of_segments, st.integers(1, 4))
def test_entries_are_whole_groups_of_one_document(lengths: list[int], ratio: int) -> None:
    groups = group_tokens(spans(lengths), ratio)
    wanted = [
        (segment, entry * ratio, [span.start + entry * ratio + k for k in range(ratio)])
        for segment, span in enumerate(spans(lengths))
        for entry in range(span.length // ratio)
    ]
    found = list(
        zip(groups.document_ids.tolist(), groups.positions.tolist(), groups.members.tolist(), strict=True)
    )  # fmt: skip
    assert found == wanted


@given(lengths_of_segments, st.integers(1, 4), st.integers(1, 6))
def test_a_token_sees_complete_entries_and_the_window_of_its_document(
    lengths: list[int], ratio: int, window: int
) -> None:
    segments = spans(lengths)
    groups, starts = group_tokens(segments, ratio), window_starts(segments, window)
    for segment, span in enumerate(segments):
        for token in range(span.start, span.start + span.length):
            seen = range(groups.visible_from[token], groups.visible_to[token])
            complete = [
                entry
                for entry, members in enumerate(groups.members)
                if groups.document_ids[entry] == segment and members.max() <= token
            ]
            assert list(seen) == complete
            assert starts[token] == max(span.start, token - window + 1)


@pytest.mark.parametrize(("ratio", "counts"), [(2, [0, 1, 1, 2, 2]), (1, [1, 2, 3, 4, 5])])
def test_published_counts_of_visible_entries(ratio: int, counts: list[int]) -> None:
    assert group_tokens([Span(0, 5)], ratio).visible_to.tolist() == counts


def test_an_incomplete_pair_at_the_end_of_a_document_gives_no_entry() -> None:
    groups = group_tokens([Span(0, 3), Span(3, 4)], 2)
    assert groups.members.tolist() == [[0, 1], [3, 4], [5, 6]]
    assert groups.visible_from.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert groups.visible_to.tolist() == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("segments", [[], [Span(1, 2)], [Span(0, 2), Span(3, 1)], [Span(0, 0)]])
def test_segments_with_gaps_are_refused(segments: list[Span]) -> None:
    with pytest.raises(InternalError, match="without gaps"):
        group_tokens(segments, 2)
