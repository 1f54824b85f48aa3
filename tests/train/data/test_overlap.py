"""Overlap of two texts against a set of tuples."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.train.data.documents import TokenizedText
from headrace.train.data.overlap import shared_share

some_text = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=15), min_size=1, max_size=5)


def text(documents: list[list[int]]) -> TokenizedText:
    flat = np.array([token for document in documents for token in document], dtype=np.int32)
    offsets = np.cumsum([0, *map(len, documents)])
    return TokenizedText(token_ids=flat, offsets=offsets, names=("d",) * len(documents), num_bytes=0)


def ngrams(documents: list[list[int]], size: int) -> list[tuple[int, ...]]:
    return [tuple(d[i : i + size]) for d in documents for i in range(len(d) - size + 1)]


@given(some_text, some_text, st.integers(1, 6))
def test_the_share_is_that_of_ngrams_inside_documents(train: list[list[int]], held: list[list[int]], size: int) -> None:
    asked, known = ngrams(held, size), set(ngrams(train, size))
    wanted = sum(ngram in known for ngram in asked) / len(asked) if asked else 0.0
    assert shared_share(text(train), text(held), size) == wanted
