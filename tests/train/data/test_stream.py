"""The stream of a run: exact resume, every token once per epoch, shares, and independence of process and order."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import UserError
from headrace.train.data.cursor import TextCursor
from headrace.train.data.documents import TokenizedText
from headrace.train.data.packing import Batch
from headrace.train.data.stream import Stream, WeightedTask, task_row
from headrace.train.data.tasks.pairs import PairTask, PairVocabulary
from headrace.train.data.tasks.puzzles import PUZZLES
from headrace.train.data.tasks.retrieval import RetrievalTask
from headrace.train.data.tasks.symbols import AdditionTask, CopyTask
from tests.train.data.small import encoder

PAIRS = PairTask(vocabulary=PairVocabulary.alone(num_keys=8, num_values=4), num_pairs=8, num_queries=8)
SIZES = [(32, 3), (32, 3), (64, 2), (64, 2), (48, 4), (16, 1), (128, 2), (128, 2)]


def text(lengths: list[int]) -> TokenizedText:
    """Documents of the given numbers of tokens; every token of the text is a different id."""
    offsets = np.cumsum([0, *lengths])
    names = tuple(f"d{index}" for index in range(len(lengths)))
    return TokenizedText(
        token_ids=np.arange(3, 3 + offsets[-1], dtype=np.int32), offsets=offsets, names=names, num_bytes=0
    )


LENGTHS = [5, 90, 33, 1, 200, 17, 64, 8, 8, 40, 31, 2]


def stream(seed: int = 1, lengths: list[int] = LENGTHS, **options: Any) -> Stream:
    tasks = [WeightedTask(CopyTask(encoder=encoder(), max_letters=5, min_letters=2, name=name), 0.25) for name in "ab"]
    return Stream(
        **{"seed": seed, "text": text(lengths), "text_weight": 0.5, "tasks": tasks, "pool_pieces": 8} | options
    )


def contents(batch: Batch) -> tuple:
    arrays = [batch.token_ids, batch.labels, batch.positions, batch.loss_mask, batch.is_padding, batch.document_ids]
    return *((array.shape, array.tobytes()) for array in arrays), batch.spans, batch.kinds, batch.answers


def run(made: Stream, first: int, last: int) -> list[tuple]:
    """Take the batches of some steps; lengths and rows grow and shrink on the way."""
    return [
        contents(made.next_batch(step, max(32, SIZES[step % 8][0]), SIZES[step % 8][1])) for step in range(first, last)
    ]


@pytest.mark.parametrize("stop", [0, 1, 7, 19])
def test_stopping_and_resuming_gives_the_batches_of_a_straight_run(stop: int) -> None:
    straight = run(stream(), 0, 24)
    first = stream()
    before = run(first, 0, stop)
    state = json.loads(json.dumps(first.state()))
    resumed = stream()
    resumed.restore(state)
    assert resumed.step == stop
    assert before + run(resumed, stop, 24) == straight


def test_saving_a_state_does_not_disturb_the_stream() -> None:
    made, other = stream(), stream()
    batches = []
    for step in range(12):
        made.state()
        batches += run(made, step, step + 1)
    assert batches == run(other, 0, 12)


PROGRAM = """
from tests.train.data.test_stream import *
print(hashlib.sha256(repr(run(stream(), 0, 12)).encode()).hexdigest())
"""


@pytest.mark.parametrize(("hash_seed", "threads"), [("0", "1"), ("99", "2")])
def test_batches_are_the_same_in_every_process(hash_seed: str, threads: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    assert done.stdout.strip() == hashlib.sha256(repr(run(stream(), 0, 12)).encode()).hexdigest()


def test_seeds_give_different_batches() -> None:
    assert run(stream(1), 0, 4) != run(stream(2), 0, 4)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_every_token_is_used_once_per_epoch_whatever_the_lengths(lengths: list[int], rows: list[int]) -> None:
    cursor = TextCursor(text(lengths), 3, pool_pieces=4)
    used: Counter[int] = Counter()
    for step in range(60):
        row = cursor.next_row(rows[step % len(rows)], 0)
        for span in row.spans:
            used.update(row.token_ids[span.start : span.start + span.length].tolist())
    waiting = Counter(
        3 + int(text(lengths).offsets[document]) + start + i
        for document, start, length in cursor.state()["pool"]
        for i in range(length)
    )
    taken = used + waiting
    started = {token: count for token, count in taken.items() if count > cursor.epoch}
    assert all(taken[3 + token] >= cursor.epoch for token in range(sum(lengths)))
    assert all(count == cursor.epoch + 1 for count in started.values())


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30))
def test_documents_that_fit_into_a_row_are_never_cut(lengths: list[int]) -> None:
    source = text(lengths)
    cursor = TextCursor(source, 0, pool_pieces=5)
    whole = {(3 + int(start), length) for start, length in zip(source.offsets, lengths, strict=False)}
    for _ in range(40):
        row = cursor.next_row(30, 0)
        assert {(int(row.token_ids[span.start]), span.length) for span in row.spans} <= whole


def test_pieces_of_one_document_lie_apart() -> None:
    cursor = TextCursor(text([3200]), 0, pool_pieces=50)
    first = [int(cursor.next_row(32, 0).token_ids[0]) for _ in range(90)]
    assert sum(after - before == 32 for before, after in itertools.pairwise(first)) < 10


def test_long_documents_are_cut_at_row_lengths() -> None:
    cursor = TextCursor(text([70]), 0, pool_pieces=3)
    spans = [cursor.next_row(32, 0) for _ in range(30)]
    assert {span.length for row in spans for span in row.spans} == {32, 6}


def test_pieces_made_for_long_rows_are_cut_when_rows_get_shorter() -> None:
    made = stream(tasks=[], text_weight=1.0)
    made.next_batch(0, 128, 1)
    batch = made.next_batch(1, 16, 8)
    assert batch.token_ids.shape == (8, 16)


def test_rows_are_well_filled() -> None:
    draws = np.random.default_rng(0)
    lengths = draws.integers(10, 400, 600).tolist()
    made = stream(lengths=lengths, tasks=[], pool_pieces=256)
    batches = [made.next_batch(step, 256, 8) for step in range(30)]
    assert np.mean([batch.utilisation for batch in batches]) > 0.99


def test_each_kind_gets_its_share_of_every_batch() -> None:
    made = stream()
    for step in range(10):
        kinds = Counter(kinds[0] for kinds in made.next_batch(step, 64, 8).kinds)
        assert kinds == {"text": 4, "a": 2, "b": 2}


def test_a_batch_can_have_shares_of_its_own() -> None:
    made = stream()
    kinds = Counter(kinds[0] for kinds in made.next_batch(0, 64, 8, {"text": 0.0, "a": 1.5, "b": 0.5}).kinds)
    assert kinds == {"a": 6, "b": 2}
    assert Counter(kinds[0] for kinds in made.next_batch(1, 64, 8).kinds) == {"text": 4, "a": 2, "b": 2}
    for shares, said in (({"c": 1.0}, "'c'"), ({"text": 0.0, "a": 0.0, "b": 0.0}, "not all 0"), ({"a": -1.0}, "-1")):
        with pytest.raises(UserError, match=said):
            made.next_batch(2, 64, 8, shares)


def test_shares_smaller_than_a_row_come_out_right_over_many_steps() -> None:
    made = stream(text_weight=0.9, tasks=[WeightedTask(AdditionTask(encoder=encoder()), 0.1)])
    counts = Counter(made.next_batch(step, 64, 1).kinds[0][0] for step in range(400))
    assert 20 <= counts["addition"] <= 60


def test_a_task_row_can_be_made_alone() -> None:
    made = stream(5)
    for step in range(3):
        batch = made.next_batch(step, 64, 8)
        for row, kinds in enumerate(batch.kinds):
            if kinds[0] != "text":
                task = CopyTask(encoder=encoder(), max_letters=5, min_letters=2, name=kinds[0])
                alone = task_row(task, 5, step, row, 64)
                assert alone.token_ids.tolist() == batch.token_ids[row].tolist()
                assert len(set(kinds)) == 1
                assert len(kinds) > 1


def test_rows_steps_and_seeds_of_a_task_differ() -> None:
    rows = [task_row(PAIRS, *where, 64).token_ids.tobytes() for where in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]]
    assert len(set(rows)) == 4


def test_a_stream_of_tasks_alone_needs_no_text() -> None:
    made = stream(text=None, tasks=[WeightedTask(PAIRS, 1)])
    assert made.next_batch(0, 64, 2).kinds == (("pairs",), ("pairs",))
    other = stream(text=None, tasks=[WeightedTask(PAIRS, 1)])
    other.restore(made.state())
    assert contents(other.next_batch(1, 64, 2)) == contents(made.next_batch(1, 64, 2))
    assert made.epoch == 0


def test_retrieval_rows_grow_with_the_sequence() -> None:
    task = RetrievalTask(encoder=encoder(), name="config_value", puzzle=PUZZLES["config_value"])
    made = stream(text=None, tasks=[WeightedTask(task, 1)])
    for step, seq_len in enumerate([300, 600, 1200]):
        batch = made.next_batch(step, seq_len, 2)
        assert batch.utilisation > 0.8


def test_a_step_out_of_order_is_refused() -> None:
    made = stream()
    with pytest.raises(UserError, match="stands at step 0, not at 1"):
        made.next_batch(1, 32, 1)


@pytest.mark.parametrize(("seq_len", "rows"), [(0, 1), (1, 0)])
def test_an_empty_batch_is_refused(seq_len: int, rows: int) -> None:
    with pytest.raises(UserError, match="both must be at least 1"):
        stream().next_batch(0, seq_len, rows)


def test_a_task_that_does_not_fit_is_named() -> None:
    with pytest.raises(UserError, match="task 'pairs' does not fit into a row of 12 tokens"):
        task_row(PAIRS, 0, 0, 0, 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": None, "tasks": []}, "not all 0"),
        ({"text_weight": -1.0}, "numbers from 0 on"),
        ({"tasks": [WeightedTask(PAIRS, 1), WeightedTask(PAIRS, 1)]}, "need different names"),
    ],
)
def test_a_mixture_of_nothing_is_refused(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        stream(**options)


def test_the_state_of_another_run_is_refused() -> None:
    state = stream().state()
    with pytest.raises(UserError, match="is of seed 1 and step 0; this run has seed 2"):
        stream(2).restore(state)
    with pytest.raises(UserError, match="belongs to another text"):
        stream(lengths=[*LENGTHS[:-1], 3]).restore(state)


@pytest.mark.parametrize(
    "damage",
    [
        {"step": None}, {"step": "x"}, {"step": -1}, {"text": None}, {"text": {"epoch": 0}}, {"text": []},
        {"text": {"epoch": 0, "next": 99, "row": 0, "pool": []}},
        {"text": {"epoch": 0, "next": 0, "row": -1, "pool": []}},
        {"text": {"epoch": 0, "next": 0, "row": 0, "pool": [[0, 0, 6]]}},
        {"text": {"epoch": 0, "next": 0, "row": 0, "pool": [[0, 0, 0]]}},
        {"text": {"epoch": 0, "next": 0, "row": 0, "pool": [[99, 0, 1]]}},
        {"text": {"epoch": 0, "next": 0, "row": 0, "pool": [[0, 0]]}},
        {"text": {"epoch": 0, "next": 0, "row": 0, "pool": 7}},
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused_and_changes_nothing(damage: dict) -> None:
    made = stream()
    with pytest.raises(UserError, match="resume state"):
        made.restore({**made.state(), **damage})
    assert run(made, 0, 3) == run(stream(), 0, 3)
