"""The look-ahead queue keeps the order of the data, gives every batch routes of the right age, and resumes exactly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import UserError
from headrace.train.anticipatory import LookAhead, RouteRecord


class Numbers:
    """Batches 0, 1, 2, ...; the place is the next number."""

    def __init__(self) -> None:
        self.place = 0

    def next_batch(self) -> int:
        self.place += 1
        return self.place - 1

    def state(self) -> int:
        return self.place

    def restore(self, state: int) -> None:
        self.place = state


def record_of(step: int) -> RouteRecord:
    return RouteRecord({(0, 0): torch.tensor([[step % 8, 9]], dtype=torch.int16)})


def step_of(routes: RouteRecord | None) -> int | None:
    return None if routes is None else int(routes.experts[0, 0][0, 0])


@given(st.integers(1, 6), st.integers(0, 30), st.lists(st.booleans(), max_size=30))
def test_batches_come_in_order_whatever_is_done_with_routes(delta: int, forget: int, anticipate: list[bool]) -> None:
    queue = LookAhead(Numbers(), delta)
    seen = []
    for step, is_anticipating in enumerate(anticipate):
        if is_anticipating:
            for place, _ in queue.unrouted():
                queue.store(place, record_of(step))
        if step == forget:
            queue.forget_routes()
        seen.append(queue.advance().batch)
    assert seen == list(range(len(anticipate)))


@pytest.mark.parametrize("delta", [1, 3])
def test_routes_are_delta_steps_old_once_the_queue_is_filled(delta: int) -> None:
    queue = LookAhead(Numbers(), delta)
    ages = []
    for step in range(8):
        waiting = queue.unrouted()
        assert len(waiting) == (delta + 1 if step == 0 else 1)
        assert waiting[-1] == (delta, step + delta)
        for place, _ in waiting:
            queue.store(place, record_of(step))
        routed = step_of(queue.advance().routes)
        assert routed is not None
        ages.append(step - routed)
    assert ages[delta:] == [delta] * (8 - delta)
    assert ages[:delta] == list(range(delta))  # at the entry, all queued batches were routed at once


def test_without_anticipation_there_are_no_routes() -> None:
    queue = LookAhead(Numbers(), 2)
    assert [step_of(queue.advance().routes) for _ in range(4)] == [None] * 4


@given(st.integers(1, 4), st.integers(0, 6), st.integers(0, 3))
def test_a_restored_queue_gives_the_same_batches_and_routes(delta: int, before: int, routed: int) -> None:
    queue = LookAhead(Numbers(), delta)
    for _ in range(before):
        queue.advance()
    for place, _ in queue.unrouted()[:routed]:
        queue.store(place, record_of(place))
    state = queue.state()
    expected = [(q.batch, step_of(q.routes)) for q in (queue.advance() for _ in range(8))]
    other = Numbers()
    other.place = 55
    again = LookAhead(other, delta)
    again.restore(state, num_experts=10)
    assert [(q.batch, step_of(q.routes)) for q in (again.advance() for _ in range(8))] == expected


def test_another_delta_is_refused() -> None:
    state = LookAhead(Numbers(), 2).state()
    with pytest.raises(UserError, match="looks 2 steps ahead and this run 3"):
        LookAhead(Numbers(), 3).restore(state, num_experts=10)
    with pytest.raises(UserError, match="Anticipation of 0 steps"):
        LookAhead(Numbers(), 0)


def test_a_queue_with_routes_of_other_experts_is_refused_and_stays_as_it_was() -> None:
    queue = LookAhead(Numbers(), 1)
    queue.store(0, record_of(3))
    state = queue.state()
    queue.advance()
    with pytest.raises(UserError, match="from 0 to 3"):
        queue.restore(state, num_experts=4)
    assert queue.advance().batch == 1
