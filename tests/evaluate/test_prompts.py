"""Rows that only far context can answer: clues outside the window, in the third they say, at every length."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import UserError
from headrace.evaluate.bits_per_byte import _is_near, choose_pieces
from headrace.evaluate.held_out import held_out_lines, read_held_out
from headrace.evaluate.prompts import POSITIONS, QUESTIONS, natural_prompts, pair_prompts, usable_lengths
from headrace.evaluate.retrieval import Answered
from headrace.evaluate.settings import Settings
from headrace.evaluate.trial import Judged
from headrace.train.data import special_tokens
from headrace.train.data.corpus import Document
from headrace.train.data.packing import IGNORE
from headrace.train.data.tasks.puzzles import PUZZLES
from tests.evaluate.subjects import SETTINGS, small_held_out, small_subject


def test_pair_clues_lie_outside_the_window_and_in_their_third() -> None:
    subject = small_subject()
    prompts = pair_prompts(subject.config, subject.encoder, small_held_out(), SETTINGS, 200, 6)
    last_place = 200 - 7 - (subject.config.window + 1)
    for prompt in prompts:
        assert len(prompt.trial.token_ids) == 200
        assert prompt.trial.runs == ((193, 200),)
        assert len(prompt.questions) == 7
        for question in prompt.questions:
            place = question.first - question.distance
            assert question.distance > subject.config.window
            assert POSITIONS[3 * place // (last_place + 1)] == question.position
            pair = prompt.trial.token_ids[place] - special_tokens.FIRST_RESERVED_ID
            asked = prompt.trial.token_ids[question.first] - special_tokens.FIRST_RESERVED_ID - 30
            assert pair // 5 == asked
            assert prompt.trial.labels[question.first] == special_tokens.FIRST_RESERVED_ID + 36 + pair % 5
    assert {one.position for prompt in prompts for one in prompt.questions} == set(POSITIONS)


@pytest.mark.parametrize("puzzle", PUZZLES)
def test_natural_clues_lie_outside_the_window_in_every_third(puzzle: str) -> None:
    subject, length = small_subject(), 600  # this vocabulary spells most words in letters
    prompts = natural_prompts(subject.config, subject.encoder, puzzle, SETTINGS, length, 3)
    assert [prompt.questions[0].position for prompt in prompts] == list(POSITIONS)
    for prompt in prompts:
        assert len(prompt.questions) == QUESTIONS.get(puzzle, 1) == len(prompt.trial.runs)
        assert len(prompt.trial.token_ids) <= length
        assert (prompt.trial.labels[: prompt.questions[0].first] == IGNORE).all()
        for question, run in zip(prompt.questions, prompt.trial.runs, strict=True):
            assert question.distance > subject.config.window
            assert question.first == run[0]
            answer = prompt.trial.labels[question.first : question.stop]
            assert subject.tokenizer.decode(answer.tolist()).isdigit()
    assert prompts[0].questions[0].distance > prompts[2].questions[0].distance


def test_lengths_outside_the_context_are_left_out_and_none_is_refused() -> None:
    config = small_subject().config
    assert usable_lengths(config, replace(SETTINGS, lengths=(16, 128, 512, 1024))) == (128, 512)
    with pytest.raises(UserError, match="context of 512"):
        usable_lengths(config, replace(SETTINGS, lengths=(1024,)))


def test_a_tokenizer_without_reserved_ids_is_refused() -> None:
    subject = small_subject()
    with pytest.raises(UserError, match="287"):
        pair_prompts(subject.config, subject.encoder, small_held_out(), Settings(), 400, 2)


def test_settings_without_a_standard_error_are_refused() -> None:
    with pytest.raises(UserError, match="rows is 1"):
        Settings(rows=1)


def test_an_answer_counts_where_all_of_its_tokens_are_right_and_rows_are_clusters() -> None:
    subject = small_subject()
    prompts = natural_prompts(subject.config, subject.encoder, "log_error", SETTINGS, 400, 3)
    judged = []
    for wrong, prompt in enumerate(prompts):
        rows = np.flatnonzero(prompt.trial.labels != IGNORE)
        is_right = np.ones(len(rows), dtype=bool)
        is_right[wrong] = wrong == 0  # the first prompt is right, one token of the others is wrong
        judged.append({"full": Judged(rows, np.zeros(len(rows)), is_right)})
    cell = Answered(prompts, judged).cell("full", "all")
    assert (cell.accuracy, cell.n, cell.rows) == (pytest.approx(1 / 3), 3, 3)
    assert cell.stderr == pytest.approx((1 / 3 * 2 / 3 / 2) ** 0.5)
    assert Answered(prompts, judged).cell("full", "early").accuracy == 1.0
    assert Answered(prompts, judged).cell("full", "late").accuracy == 0.0


def test_pieces_cover_documents_in_turn_and_are_cut_every_two_windows() -> None:
    pieces = choose_pieces(small_held_out(), SETTINGS, 8)
    documents = [piece.document for piece in pieces]
    assert documents[:2] == [0, 1]
    assert len(set(documents)) == 6 or sum(len(piece.trial.token_ids) for piece in pieces) > SETTINGS.text_tokens - 32
    for piece in pieces:
        runs = piece.trial.runs
        assert runs[0][0] == 15
        assert runs[-1][1] == len(piece.trial.token_ids) - 1
        assert all(stop == first for (_, stop), (first, _) in pairwise(runs))
        assert (piece.trial.labels[:-1] == piece.trial.token_ids[1:]).all()
    with pytest.raises(UserError, match="least that can be judged"):
        choose_pieces(small_held_out(), SETTINGS, 400)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no text"),
        (b'{"name": "a", "licence": "MIT"}\n', "line 1"),
        (b'{"name": "a", "licence": "MIT", "text": "x"}\n[1]\n', "line 2"),
        (b"\xff\n", "UTF-8"),
    ],
)
def test_held_out_text_of_another_form_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "held.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_held_out(path, small_subject().encoder)


def test_tokens_near_a_cut_are_the_first_of_every_run() -> None:
    rows = np.array([20, 21, 35, 36, 37, 52, 53, 70])
    assert _is_near(rows, [(20, 37), (37, 100)]).tolist() == [True] * 3 + [False, True, True, False, False]


def test_a_shipped_file_takes_documents_of_every_group_in_turn_and_reads_back(tmp_path: Path) -> None:
    documents = [
        Document(f"package:{group}:{place}.py", f"package:{group}", f"# é {group}{place}\n" * 300)
        for group in ("one", "two", "three")
        for place in range(4)
    ]
    documents += [Document("package:one:tiny.py", "package:one", "x = 1\n")]
    licences = {f"package:{group}": f"licence of {group}" for group in ("one", "two", "three")}
    lines = list(held_out_lines(documents, licences, 20_000))
    assert sum(len(line.encode()) for line in lines) <= 20_000
    taken = [json.loads(line) for line in lines]
    assert len(taken) > 3
    assert {one["licence"] for one in taken[:3]} == set(licences.values())
    assert lines == list(held_out_lines(documents[::-1], licences, 20_000))
    (tmp_path / "held.jsonl").write_text("".join(lines), encoding="utf-8")
    found = read_held_out(tmp_path / "held.jsonl", small_subject().encoder)
    assert found.text.names == tuple(one["name"] for one in taken)
    assert found.text.num_bytes == sum(len(one["text"].encode()) for one in taken)
