"""Anchors: where drafts are trained, and which drafted tokens count."""

import numpy as np
import pytest

from headrace.train.anchors import anchors_at, draw_anchors, eligible
from headrace.train.data.draws import Draws
from headrace.train.data.packing import IGNORE, Sample, next_token_labels, text_sample

BLOCK = 3


def test_every_anchor_of_text_has_the_block_behind_it() -> None:
    assert eligible(text_sample(np.arange(9)), BLOCK).tolist() == [0, 1, 2, 3, 4]
    assert eligible(text_sample(np.arange(5)), BLOCK).tolist() == [0]
    assert eligible(text_sample(np.arange(4)), BLOCK).tolist() == []
    assert eligible(text_sample(np.arange(1)), BLOCK).tolist() == []


def test_drafts_count_up_to_the_first_token_that_is_not_asked() -> None:
    ids = np.arange(10)
    is_asked = np.array([True, True, True, True, True, False, True, True, False, True])
    sample = Sample(token_ids=ids, labels=next_token_labels(ids, is_asked))
    positions = eligible(sample, BLOCK)
    assert positions.tolist() == [0, 1, 2, 4, 5], "token 5, the first draft behind anchor 3, is not asked"
    valid = anchors_at(0, sample, positions, BLOCK).valid
    assert valid.tolist() == [
        [True, True, True],
        [True, True, False],
        [True, False, False],
        [True, True, False],
        [True, False, False],
    ]


def test_anchors_are_drawn_once_each_from_all_documents_together() -> None:
    samples = [text_sample(np.arange(12)), text_sample(np.arange(4)), text_sample(np.arange(30))]
    drawn = draw_anchors(samples, 20, BLOCK, Draws(3, "a"))
    assert [one.document for one in drawn] == [0, 2]
    positions = [one.positions.tolist() for one in drawn]
    assert sum(map(len, positions)) == 20
    assert all(part == sorted(set(part)) for part in positions)
    again = draw_anchors(samples, 20, BLOCK, Draws(3, "a"))
    assert [one.positions.tolist() for one in again] == positions
    other = draw_anchors(samples, 20, BLOCK, Draws(4, "a"))
    assert [one.positions.tolist() for one in other] != positions


@pytest.mark.parametrize("count", [34, 1000])
def test_all_positions_are_taken_where_there_are_no_more(count: int) -> None:
    drawn = draw_anchors([text_sample(np.arange(12)), text_sample(np.arange(30))], count, BLOCK, Draws(0))
    assert [len(one.positions) for one in drawn] == [8, 26]


def test_nothing_is_drawn_where_nothing_is_asked() -> None:
    silent = Sample(token_ids=np.arange(9), labels=np.full(9, IGNORE))
    assert draw_anchors([silent], 5, BLOCK, Draws(0)) == []
