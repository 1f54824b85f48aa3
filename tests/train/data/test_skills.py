"""Small generated skills, solved from the text of their questions alone."""

import math
import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from headrace.core.errors import UserError
from headrace.train.data import special_tokens
from headrace.train.data.draws import Draws
from headrace.train.data.packing import IGNORE, Sample
from headrace.train.data.tasks.facts import FactTask
from headrace.train.data.tasks.machines import BracketTask, MachineTask
from headrace.train.data.tasks.markov import MarkovTask
from headrace.train.data.tasks.relay import RelayTask
from headrace.train.data.tasks.symbols import AdditionTask, CopyTask, DigitTask
from headrace.train.data.tasks.task import Task
from tests.train.data.small import encoder, tokenizer

TASKS: dict[str, Task] = {
    "copy": CopyTask(encoder=encoder()),
    "addition": AdditionTask(encoder=encoder()),
    "scratch": AdditionTask(encoder=encoder(), name="scratch", has_scratch=True),
    "sort": DigitTask(encoder=encoder(), order="sort"),
    "reverse": DigitTask(encoder=encoder(), order="reverse"),
    "brackets": BracketTask(encoder=encoder()),
    "machine": MachineTask(encoder=encoder()),
}


def close(text: str) -> str:
    stack: list[str] = []
    for bracket in text.split():
        if bracket in "([{<":
            stack.append(dict(zip("([{<", ")]}>", strict=True))[bracket])
        else:
            assert stack.pop() == bracket
    return " ".join(reversed(stack))


def run_machine(modulus: int, letters: str) -> str:
    state = 0
    for letter in letters.split():
        state = {"a": state + 1, "b": state * 2, "c": -state}[letter]
    return str(state % modulus)


SOLVERS: dict[str, Callable[[str], str]] = {
    "copy": lambda q: q.removeprefix("Copy: "),
    "addition": lambda q: str(sum(map(int, q.split("+")))),
    "scratch": lambda q: str(sum(map(int, q.split("+")))),
    "sort": lambda q: "".join(sorted(q.removeprefix("Sort: "))),
    "reverse": lambda q: q.removeprefix("Reverse: ")[::-1],
    "brackets": lambda q: close(q.removeprefix("Close: ")),
    "machine": lambda q: run_machine(int(q.split(":")[0].split()[1]), q.split(": ")[1]),
}


def make(task: Task, seed: int, room: int = 400) -> Sample:
    sample = task.make(Draws(seed), room)
    assert sample is not None
    return sample


@pytest.mark.parametrize("name", TASKS)
def test_the_question_gives_the_answer(name: str) -> None:
    for seed in range(40):
        sample = make(TASKS[name], seed)
        text = tokenizer().decode(sample.token_ids.tolist())
        found = re.fullmatch(
            f"{re.escape(special_tokens.BEGIN + special_tokens.USER)}(.*){re.escape(special_tokens.ASSISTANT)}"
            f"(?:<think>(.*))?</think>(.*){re.escape(special_tokens.END)}",
            text,
        )
        assert found, text
        question, reasoning, answer = found.groups()
        assert answer == SOLVERS[name](question)
        (judged,) = sample.answers
        assert tokenizer().decode(sample.labels[judged.start : judged.start + judged.length].tolist()) == answer
        learned = f"{reasoning}</think>{answer}" if reasoning else answer
        labels = sample.labels[sample.labels != IGNORE].tolist()
        assert tokenizer().decode(labels) == learned + special_tokens.END
        assert sample.labels[-1] == IGNORE
        assert sample.labels[-2] == special_tokens.END_ID


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_is_a_function_of_its_draws_and_fits_its_room(name: str) -> None:
    first, again, other = (make(TASKS[name], seed) for seed in (3, 3, 4))
    assert first.token_ids.tolist() == again.token_ids.tolist()
    assert first.token_ids.tolist() != other.token_ids.tolist()
    assert TASKS[name].make(Draws(3), len(first)) is not None
    assert TASKS[name].make(Draws(3), len(first) - 1) is None


def test_scratch_is_the_carries_from_the_last_digit_on() -> None:
    texts = [tokenizer().decode(make(TASKS["scratch"], seed).token_ids.tolist()) for seed in range(30)]
    for text in texts:
        left, right, scratch = re.search(r"(\d+)\+(\d+).*<think>(.*)</think>", text).groups()  # type: ignore[union-attr]
        steps = [tuple(map(int, step.split())) for step in scratch.split(",")]
        for place, (digit, carry) in enumerate(steps):
            low = int(left[len(left) - 1 - place :]) + int(right[len(right) - 1 - place :])
            assert (digit, carry) == (low // 10**place % 10, low // 10 ** (place + 1))


def test_symbols_are_one_token_each() -> None:
    digits = make(TASKS["sort"], 1)
    assert digits.answers[0].length == len(tokenizer().decode(digits.labels[digits.labels != IGNORE].tolist()[:-1]))
    for name in ("copy", "brackets"):
        sample = make(TASKS[name], 1)
        answer = tokenizer().decode(sample.labels[sample.labels != IGNORE].tolist()[:-1])
        assert sample.answers[0].length <= 2 * len(answer.split()) - 1


def test_brackets_are_never_deeper_than_allowed_and_always_leave_one_open() -> None:
    for steps in (1, 2, 3, 30):
        for seed in range(30):
            sample = make(BracketTask(encoder=encoder(), num_steps=steps, max_depth=2), seed)
            question = re.search(r"Close: (.*)<｜A", tokenizer().decode(sample.token_ids.tolist())).group(1)  # type: ignore[union-attr]
            depths = np.cumsum([1 if bracket in "([{<" else -1 for bracket in question.split()])
            assert len(depths) == steps
            assert depths.max() <= 2
            assert depths[-1] >= 1


def test_states_of_the_machine_are_all_reached() -> None:
    counts = Counter(
        tokenizer().decode(make(TASKS["machine"], seed).token_ids.tolist()).split("</think>")[1][0]
        for seed in range(300)
    )
    assert set(counts) == set("0123456")


def test_a_chain_keeps_to_its_successors_and_its_entropy() -> None:
    ids = np.arange(100, 120)
    task = MarkovTask(symbol_ids=ids, num_tokens=200)
    samples = [make(task, seed) for seed in range(100)]
    steps = Counter(pair for s in samples for pair in zip(s.token_ids.tolist(), s.token_ids[1:].tolist(), strict=False))
    expected = {
        (100 + symbol, 100 + int(successor)): p
        for symbol in range(20)
        for successor, p in zip(task.successors[symbol], task.probabilities, strict=True)
    }
    assert set(steps) <= set(expected)
    losses = [-math.log(expected[pair]) * count for pair, count in steps.items()]
    assert abs(sum(losses) / sum(steps.values()) - task.entropy) < 0.02
    assert abs(task.entropy - 1.75 * math.log(2)) < 1e-12
    assert samples[0].labels[:-1].tolist() == samples[0].token_ids[1:].tolist()
    assert task.make(Draws(0), 199) is None


def test_chains_of_one_seed_are_one_chain() -> None:
    ids = np.arange(20)
    assert (MarkovTask(symbol_ids=ids).successors == MarkovTask(symbol_ids=ids + 5).successors).all()
    assert (MarkovTask(symbol_ids=ids).successors != MarkovTask(symbol_ids=ids, chain_seed=1).successors).any()


@pytest.mark.parametrize(
    ("make_wrong", "message"),
    [
        (lambda: MachineTask(encoder=encoder(), modulus=11), "accepted are 2 to 10"),
        (lambda: BracketTask(encoder=encoder(), max_depth=1), "a depth of at least 2"),
        (lambda: MarkovTask(symbol_ids=np.arange(9), probabilities=(0.5, 0.4)), "must be positive and sum to 1"),
        (lambda: MarkovTask(symbol_ids=np.arange(3)), "at most 3 successors"),
        (lambda: RelayTask(digit_ids=np.arange(3), state_ids=np.arange(2), query_id=9), "as many answers as digits"),
        (lambda: FactTask(encoder=encoder(), weights=(1, 0)), "weights of at least 1"),
    ],
)
def test_what_cannot_be_made_is_refused(make_wrong, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_wrong()


RELAY = RelayTask(digit_ids=np.arange(10, 18), state_ids=np.arange(20, 28), query_id=5, gap=6)


def test_a_relay_asks_for_the_sum_of_all_digits_so_far() -> None:
    for seed in range(20):
        sample = make(RELAY, seed, 100)
        total, asked = 0, 0
        for token_id, label in zip(sample.token_ids.tolist(), sample.labels.tolist(), strict=True):
            if token_id == RELAY.query_id:
                assert label == 20 + total % 8
                asked += 1
            else:
                assert label == IGNORE
                total += token_id - 10
        assert asked == 100 // 7
        assert [answer.start for answer in sample.answers] == list(range(6, 100, 7))
    assert RELAY.make(Draws(0), 6) is None


def test_the_last_gap_of_a_relay_alone_does_not_answer() -> None:
    right = []
    for seed in range(60):
        sample = make(RELAY, seed, 100)
        last = sample.answers[-1].start
        near = int((sample.token_ids[last - 6 : last] - 10).sum()) % 8
        right.append(int(sample.labels[last]) == 20 + near)
    assert sum(right) / 60 < 0.3


FACTS = FactTask(encoder=encoder(), num_facts=30)


def test_facts_are_the_same_everywhere_and_differ() -> None:
    facts = [FACTS.fact(index) for index in range(30)]
    assert len({fact.sentence for fact in facts}) == 30
    assert facts == [FactTask(encoder=encoder(), name="other").fact(index) for index in range(30)]
    assert facts[0] != FactTask(encoder=encoder(), facts_seed=1).fact(0)
    assert re.fullmatch(r"The [a-z]+ of [A-Z][a-z]{7} is", facts[0].sentence)


def test_facts_come_as_often_as_their_weight_says() -> None:
    texts = [tokenizer().decode(make(FACTS, seed).token_ids.tolist()) for seed in range(2100)]
    index_of = {f"{special_tokens.BEGIN}{''.join(FACTS.fact(i))}.{special_tokens.END}": i for i in range(30)}
    counts = Counter(index_of[text] % 3 for text in texts)
    assert abs(counts[0] - 100) < 40
    assert abs(counts[1] - 400) < 80
    assert len(set(texts)) == 30


def test_the_value_of_a_fact_is_judged_and_all_of_it_learned() -> None:
    sample = FACTS.sample(4)
    (judged,) = sample.answers
    labels = sample.labels[judged.start : judged.start + judged.length].tolist()
    assert tokenizer().decode(labels) == FACTS.fact(4).value
    assert sample.labels[:-1].tolist() == sample.token_ids[1:].tolist()
