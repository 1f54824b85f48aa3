"""Retrieval in the chat format: one line answers, it lies where it should, and the prompt is what a server encodes."""

import re

import pytest

from headrace.core.errors import UserError
from headrace.train.data import special_tokens
from headrace.train.data.draws import Draws
from headrace.train.data.packing import IGNORE, Sample
from headrace.train.data.tasks.puzzles import PUZZLES
from headrace.train.data.tasks.retrieval import RetrievalTask
from tests.train.data.small import encoder, tokenizer

ROOM = 2500


def task(name: str, **options) -> RetrievalTask:
    return RetrievalTask(encoder=encoder(), name=name, puzzle=PUZZLES[name], **options)


def make(name: str, seed: int = 0, room: int = ROOM, **options) -> Sample:
    sample = task(name, **options).make(Draws(seed), room)
    assert sample is not None
    return sample


def clue_pattern(name: str, question: str) -> str:
    """What the line looks like that answers a question, with the answer as its one group."""
    subject = re.escape(question.removesuffix("?").removesuffix("() return").split()[-1])
    return {
        "config_value": rf"{subject} = (\d+)\n",
        "log_error": r"ERROR .* failed with code (\d+)\n",
        "definition": rf"def {subject}\(\):\n    return (\d+)\n",
        "tool_result": rf'string="true">{subject}</.*?<tool_result>(\d+)</tool_result>',
    }[name]


def questions(sample: Sample) -> list[tuple[str, str]]:
    """The question before each judged answer, and the answer."""
    found = []
    for answer in sample.answers:
        before = tokenizer().decode(sample.token_ids[: answer.start + 1].tolist())
        question = re.split(r"<｜User｜>|\n", before.removesuffix("<｜Assistant｜></think>"))[-1]
        labels = sample.labels[answer.start : answer.start + answer.length].tolist()
        found.append((question, tokenizer().decode(labels)))
    return found


@pytest.mark.parametrize("name", PUZZLES)
@pytest.mark.parametrize("num_questions", [1, 3])
def test_exactly_one_place_in_the_prompt_answers_a_question(name: str, num_questions: int) -> None:
    for seed in range(5):
        sample = make(name, seed, num_questions=num_questions)
        asked = questions(sample)
        assert len(asked) == (1 if name == "log_error" else num_questions)
        prompt = tokenizer().decode(sample.token_ids[: sample.answers[0].start + 1].tolist())
        for question, answer in asked:
            assert re.findall(clue_pattern(name, question), prompt, re.S) == [answer]


@pytest.mark.parametrize("name", PUZZLES)
def test_the_distance_is_from_the_end_of_the_clue_to_the_answer(name: str) -> None:
    for seed in range(5):
        sample = make(name, seed, num_questions=2)
        for (question, _), answer in zip(questions(sample), sample.answers, strict=True):
            assert answer.distance is not None
            last = answer.start - answer.distance
            until = tokenizer().decode(sample.token_ids[: last + 1].tolist())
            tail = f"</tool_result><｜Assistant｜></think>Done.{special_tokens.END}" if name == "tool_result" else "\n"
            assert until.endswith(tail)
            assert re.search(clue_pattern(name, question), until, re.S)
            shorter = tokenizer().decode(sample.token_ids[: last - 3].tolist())
            assert len(re.findall(clue_pattern(name, question), shorter, re.S)) == (name == "tool_result")


@pytest.mark.parametrize("name", PUZZLES)
def test_the_least_distance_is_kept_and_depth_moves_the_clue(name: str) -> None:
    for seed in range(5):
        late = make(name, seed, depth=(1.0, 1.0), min_distance=400)
        early = make(name, seed, depth=(0.0, 0.0))
        assert late.answers[0].distance is not None
        assert 400 <= late.answers[0].distance < 650
        assert early.answers[0].distance is not None
        assert early.answers[0].distance > ROOM - 400


@pytest.mark.parametrize("name", PUZZLES)
def test_prompts_fill_their_room(name: str) -> None:
    for room in (1200, ROOM):
        sizes = [len(make(name, seed, room)) for seed in range(5)]
        assert max(sizes) <= room
        assert min(sizes) > room - 200
    assert len(make(name, 0, ROOM, num_tokens=900)) <= 900


@pytest.mark.parametrize("name", PUZZLES)
def test_only_answers_and_ends_are_learned(name: str) -> None:
    sample = make(name, 1, num_questions=2)
    labels = sample.labels[sample.labels != IGNORE].tolist()
    assert tokenizer().decode(labels) == "".join(f"{answer}{special_tokens.END}" for _, answer in questions(sample))


@pytest.mark.parametrize("name", PUZZLES)
def test_a_server_encodes_the_prompt_to_the_same_ids(name: str) -> None:
    sample = make(name, 2)
    start = sample.answers[0].start
    prompt = tokenizer().decode(sample.token_ids[: start + 1].tolist())
    assert tokenizer().encode(prompt) == sample.token_ids[: start + 1].tolist()
    assert sample.token_ids[0] == special_tokens.BEGIN_ID


@pytest.mark.parametrize("name", PUZZLES)
def test_a_prompt_is_a_function_of_its_draws(name: str) -> None:
    assert make(name, 7).token_ids.tolist() == make(name, 7).token_ids.tolist()
    assert make(name, 7).token_ids.tolist() != make(name, 8).token_ids.tolist()


def test_a_prompt_without_room_is_none() -> None:
    assert task("config_value").make(Draws(0), 20) is None
    assert task("config_value", min_distance=1000).make(Draws(0), 900) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": (0.5, 0.4)}, "accepted are two numbers from 0 to 1"),
        ({"depth": (0.0, 1.5)}, "accepted are two numbers from 0 to 1"),
        ({"num_questions": 0}, "at least one question"),
    ],
)
def test_what_cannot_be_asked_is_refused(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task("definition", **options)
