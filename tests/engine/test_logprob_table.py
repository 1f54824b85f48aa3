"""A table of log-probabilities is the list it stands for, in a fraction of the memory."""

import pickle
import random
import tracemalloc

import numpy as np
import pytest

from headrace.core.errors import InternalError
from headrace.engine.logprob_table import LogprobTable, PromptLogprobs
from headrace.engine.result import TokenLogprob


def entries(count: int, alternatives: int, seed: int = 0) -> list[TokenLogprob]:
    pick = random.Random(seed)

    def value() -> float:
        return float(np.float32(-pick.random() * 30))

    return [
        TokenLogprob(
            token_id=pick.randrange(129_280),
            logprob=value(),
            rank=pick.randrange(1, 129_280),
            top=tuple((pick.randrange(129_280), value()) for _ in range(alternatives)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("alternatives", [0, 1, 20])
def test_what_goes_in_comes_out_bit_for_bit(alternatives: int) -> None:
    given, table = entries(50, alternatives), LogprobTable()
    table.extend(given[:7])
    table.extend(given[7:])
    assert list(table) == given
    assert table == given
    assert given == table
    assert table != given[:-1]
    assert table[-1] == given[-1]
    assert table[3:9] == given[3:9]
    assert pickle.loads(pickle.dumps(table)) == given
    prompt = PromptLogprobs(table)
    assert list(prompt) == [None, *given]
    assert prompt[-1] == given[-1]
    assert pickle.loads(pickle.dumps(prompt)) == [None, *given]


@pytest.mark.parametrize("place", [2, -3])
def test_places_outside_are_refused(place: int) -> None:
    table = LogprobTable()
    table.extend(entries(2, 1))
    with pytest.raises(IndexError):
        table[place]
    with pytest.raises(IndexError):
        PromptLogprobs(table)[place + (1 if place > 0 else -1)]


def test_entries_of_another_width_are_refused() -> None:
    table = LogprobTable()
    table.extend(entries(1, 2))
    with pytest.raises(InternalError, match="1 alternatives came after 2"):
        table.extend(entries(1, 1))


def test_an_entry_with_twenty_alternatives_takes_less_than_250_bytes() -> None:
    given, table = entries(2000, 20), LogprobTable()
    tracemalloc.start()
    table.extend(given)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 2000 * 250
