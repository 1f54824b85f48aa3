"""What a scheduler refuses: budgets that cannot work, requests that can never run, and too many of them."""

import pytest

from headrace.core.errors import CapacityError, UserError
from headrace.engine.scheduler.scheduler import OverloadedError
from tests.engine.scheduler.drive import ask, scheduler, small


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("window", 0, "from 1"), ("num_blocks", 0, "from 1"), ("num_slots", -1, "from 1"), ("chunk", 0, "from 1"),
        ("max_waiting", 0, "from 1"), ("max_context", 0, "from 1"), ("block_bytes", 0, "from 1"),
        ("slot_bytes", 0, "from 1"), ("block_tokens", 0, "from 1"), ("max_partial", 0, "from 1"),
        ("patience", 0, "from 1"), ("long_rows", 0, "from 1"), ("host_bytes", -1, "from 0"),
        ("headroom_blocks", -1, "from 0"), ("prefill_rows", 2, "3 or more"), ("max_rows", 6, "7 or more"),
    ],
)  # fmt: skip
def test_a_number_that_cannot_work_is_named_with_what_is_accepted(name: str, value: int, accepted: str) -> None:
    with pytest.raises(UserError, match=f"{name} is {value}; accepted is .*{accepted}") as raised:
        small(**{name: value})
    assert raised.value.param == name


def test_a_window_and_a_decode_row_per_slot_are_budget_enough() -> None:
    assert small(max_rows=7).max_rows == 7


def test_half_of_the_rows_beside_the_decodes_go_to_one_of_two_prompts_by_default() -> None:
    assert small(max_rows=16).contended_rows == 6
    assert small(max_rows=16, long_rows=5).contended_rows == 5
    assert small(window=1, num_slots=4, max_rows=5).contended_rows == 1


def test_a_request_longer_than_the_context_is_refused_with_the_numbers() -> None:
    made = scheduler(max_context=30)
    with pytest.raises(CapacityError, match=r"a prompt of 20 tokens and up to 11 new ones make 31.*holds 30"):
        made.submit(ask("a", 1, 20, 11))
    made.submit(ask("a", 1, 20, 10))


def test_a_request_longer_than_the_pool_is_refused_with_the_numbers() -> None:
    made = scheduler(num_blocks=5)
    with pytest.raises(CapacityError, match="need 6 blocks of 4 tokens; the pool has 5"):
        made.submit(ask("a", 1, 20, 2))
    made.submit(ask("a", 1, 20, 1))


def test_the_copies_of_further_answers_count_against_the_pool() -> None:
    made = scheduler(num_blocks=5)
    with pytest.raises(CapacityError, match="in 3 answers need 6 blocks"):
        made.submit(ask("a", 1, 13, 1, children=("b", "c")))
    made.submit(ask("a", 1, 13, 1, children=("b",)))
    assert scheduler(ask("a", 1, 16, 1, children=("b", "c")), num_blocks=4).counts.forking == 2


def test_more_answers_than_slots_are_refused() -> None:
    with pytest.raises(CapacityError, match="3 answers at once need as many slots; there are 2"):
        scheduler(ask("a", 1, 5, 1, children=("b", "c")), num_slots=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a"}, "id 'a' is in use"),
        ({"name": "a.1"}, "id 'a.1' is in use"),
        ({"name": "b", "children": ("b",)}, "id 'b' is in use"),
        ({"prompt": 0}, "prompt has 0 tokens"),
        ({"new": -1}, "max_tokens is -1"),
        ({"mode": "fast"}, "mode is 'fast'; accepted are"),
        ({"arrival": 4}, "arrival is 4; accepted is more than 4"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(changes: dict, message: str) -> None:
    made = scheduler(ask("a", 4, 5, 1, children=("a.1",)))
    with pytest.raises(UserError, match=message):
        made.submit(ask(**({"name": "b", "arrival": 5, "prompt": 5, "new": 1} | changes)))
    assert made.counts.queued == 1


def test_one_more_waiting_request_than_allowed_is_refused_as_overload() -> None:
    made = scheduler(ask("a", 1, 5, 1), ask("b", 2, 5, 1), max_waiting=2)
    with pytest.raises(OverloadedError, match="2 requests wait already; accepted are 2"):
        made.submit(ask("c", 3, 5, 1))
