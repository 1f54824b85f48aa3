"""The guard never lets drafting lose a request more than a small share, and drafts where that wins."""

import random
from collections.abc import Callable

import pytest

from headrace.engine.drafting.guard import Guard, GuardReport, GuardSettings

SHARE, CROWD_SHARE = GuardSettings().share, GuardSettings().crowd_share


class Run:
    """Steps of a made-up machine: one takes `plain_ms` or, where it drafts, `draft_ms`; `kept` goes by tokens."""

    def __init__(
        self,
        draft_ms: float,
        kept: Callable[[int], float],
        *,
        batch: int = 1,
        noise: float = 0.0,
        guard: Guard | None = None,
        room: int = 10_000,
        plain_ms: float = 10.0,
    ) -> None:
        self.guard = guard or Guard(lambda _: draft_ms / plain_ms)
        self.now = 0.0
        self.drafted: list[bool] = []
        self.tokens = 0
        self._names = [str(place) for place in range(batch)]  # others had the same
        self._draft_ms, self._kept, self._batch, self._noise, self._room = draft_ms, kept, batch, noise, room
        self._numbers, self._plain_ms = random.Random(1), plain_ms

    def steps(self, count: int) -> "Run":
        for _ in range(count):
            room = max(0, self._room - self.tokens // self._batch)
            is_drafted = self.guard.drafts(dict.fromkeys(self._names, room))
            kept = self._kept(self.tokens // self._batch)
            got = {name: 1 + (round(kept) if is_drafted else 0) for name in self._names}
            seconds = (self._draft_ms if is_drafted else self._plain_ms) / 1000
            seconds *= 1 + self._noise * self._numbers.uniform(-1, 1)
            self.now += seconds
            self.tokens += sum(got.values())
            self.guard.add(got, is_drafted=is_drafted, seconds=seconds)
            self.drafted.append(is_drafted)
        return self

    def until(self, tokens: int) -> "Run":
        while self.tokens < tokens * self._batch:
            self.steps(1)
        for name in self._names:
            self.guard.forget(name)
        return self

    @property
    def speed(self) -> float:
        """Tokens a second against those of a machine that never drafts."""
        return self.tokens / self.now / (self._batch * 1000 / self._plain_ms)


CHANCES = {0.0: 0.0, 0.1: 0.09, 0.4: 0.29, 0.7: 0.43, 1.2: 0.57, 3.0: 0.83}
"""Chance of each of five guesses behind the one before, by how many stay in the mean (about)."""


def lucky(numbers: random.Random, mean: float) -> int:
    """Return how many of five guesses stay."""
    return next((k for k in range(5) if numbers.random() >= CHANCES[mean]), 5)


@pytest.mark.parametrize("tokens", [8, 16, 32, 64, 128, 256, 1000])
@pytest.mark.parametrize("draft_ms", [12, 17, 25, 60])
@pytest.mark.parametrize("batch", [1, 8])
def test_no_answer_loses_more_than_the_share_of_its_time(tokens: int, draft_ms: float, batch: int) -> None:
    run = Run(draft_ms, lambda _: 0, batch=batch).until(tokens)
    assert 1 / run.speed - 1 <= (SHARE if batch == 1 else CROWD_SHARE) + 1e-9
    if tokens == 1000:
        assert any(run.drafted)  # it was tried all the same


@pytest.mark.parametrize("tokens", [8, 32, 64, 128, 256])
def test_after_answers_that_drafting_helped_a_hostile_one_loses_one_round_at_most(tokens: int) -> None:
    guard = Guard(lambda _: 1.7)
    for _ in range(5):
        assert Run(17, lambda _: 2, guard=guard, room=160).until(160).speed > 1.3
    run = Run(17, lambda _: 0, guard=guard, room=tokens).until(tokens)
    assert 1 / run.speed - 1 <= max(SHARE, 0.7 / tokens) + 1e-9
    assert run.speed > 0.979
    assert any(run.drafted[:4]) == (tokens * SHARE > 0.7)


@pytest.mark.parametrize("tokens", [8, 32, 64])
def test_what_steps_of_another_request_took_says_nothing_of_this_one(tokens: int) -> None:
    guard = Guard(lambda _: 1.7)
    for _ in range(5):  # sampled in a way that takes long
        assert Run(34, lambda _: 3, guard=guard, room=160, plain_ms=20).until(160).speed > 1.3
    run = Run(17, lambda _: 0, guard=guard, room=tokens).until(tokens)
    assert 1 / run.speed - 1 <= max(SHARE, 0.7 * (tokens * SHARE > 0.7) / tokens) + 1e-9


def test_a_slow_first_step_makes_drafting_no_cheaper() -> None:
    guard = Guard(lambda _: 1.7)
    for _ in range(5):
        Run(17, lambda _: 3, guard=guard, room=160).until(160)
    spent = 0.0
    for step in range(60):
        is_drafted = guard.drafts({"a": 60 - step})
        seconds = 0.017 if is_drafted else 0.010 if step else 0.030
        guard.add({"a": 1}, is_drafted=is_drafted, seconds=seconds)
        spent += seconds
    assert spent - 0.620 <= 0.007 + 1e-9  # one round that nothing was kept of


def test_a_text_that_turns_hostile_keeps_most_of_what_was_gained() -> None:
    run = Run(17, lambda now: 3 if now < 150 else 0).until(300)
    assert run.speed > 1.2


def test_the_share_holds_for_every_answer_whatever_stays() -> None:
    numbers = random.Random(7)
    guard = Guard(lambda _: 1.7)
    for _ in range(300):
        mean, tokens = numbers.choice(list(CHANCES)), numbers.choice([16, 64, 160, 400])
        run = Run(17, lambda _, mean=mean: lucky(numbers, mean), guard=guard, room=tokens).until(tokens)
        assert run.speed > 1 - SHARE - 0.002, (mean, tokens)


def test_where_the_price_is_wrong_at_first_it_is_learned() -> None:
    run = Run(40, lambda _: 0, guard=Guard(lambda _: 1.1)).until(1000)
    assert run.speed > 0.97
    run = Run(14, lambda _: 1, guard=Guard(lambda _: 1.9)).until(1000)
    assert run.speed > 1.2


def test_drafting_that_loses_costs_little_in_the_long_run() -> None:
    run = Run(25, lambda _: 0, noise=0.2).steps(8000)
    assert run.speed > 0.99
    assert sum(run.drafted[4000:]) > 1  # it was tried again
    assert sum(run.drafted[4000:]) < 20


def test_drafting_that_wins_goes_on() -> None:
    run = Run(15, lambda _: 2, noise=0.2).steps(3000)
    assert sum(run.drafted) > 0.96 * 3000
    assert run.drafted[-1000:].count(False) == pytest.approx(1000 / 33, abs=1)  # what a plain step takes is asked anew
    assert run.speed > 1.9
    report = run.guard.report()[1]
    assert (report.is_paused, report.pauses) == (False, 0)
    assert report.with_drafts == pytest.approx(200, rel=0.2)
    assert report.without == pytest.approx(100, rel=0.2)


def test_drafting_starts_again_once_it_wins() -> None:
    run = Run(15, lambda tokens: 2 if tokens > 3000 else 0).until(3000)
    assert run.guard.report()[1].is_paused
    run.until(4000)
    assert not run.guard.report()[1].is_paused
    assert sum(run.drafted[-20:]) > 18  # one step may show anew what a plain one takes


def test_at_equal_speed_there_is_no_drafting_to_and_fro() -> None:
    run = Run(20, lambda _: 1, noise=0.05).steps(5000)
    report = run.guard.report()[1]
    assert report.pauses <= 4
    assert run.speed > 0.97


def test_one_step_that_the_machine_slept_through_does_not_pause_drafting() -> None:
    run = Run(15, lambda _: 2).steps(100)
    run.guard.add({run._names[0]: 3}, is_drafted=True, seconds=30.0)
    assert sum(run.steps(30).drafted[-30:]) >= 29


def test_a_machine_that_slows_down_goes_on_drafting() -> None:
    run = Run(15, lambda _: 2).steps(200)
    run._draft_ms = 45
    steps = run.steps(1).drafted  # plain steps still look three times as fast
    run.guard.add({run._names[0]: 1}, is_drafted=False, seconds=0.030)
    assert steps[-1]


def test_sizes_of_batch_have_accounts_of_their_own() -> None:
    guard = Guard(lambda _: 1.5)
    Run(15, lambda _: 3, guard=guard).steps(200)
    Run(15, lambda _: 0, guard=guard, batch=5).steps(200)
    assert {size: report.is_paused for size, report in guard.report().items()} == {1: False, 4: True}
    assert guard.gain(1) == guard.report()[1].with_drafts / guard.report()[1].without
    assert guard.gain(7) == guard.gain(4) != guard.gain(1)
    assert guard.gain(2) is None


def test_the_wait_says_when_a_round_can_come_at_the_earliest() -> None:
    run = Run(15, lambda _: 0)
    waits = []
    for _ in range(300):
        run.steps(1)
        waits.append(run.guard.wait)
    first = run.drafted.index(True)
    assert waits[1:first] == pytest.approx([0.5 / SHARE - step for step in range(1, first)])
    second = run.drafted.index(True, first + 1)
    assert waits[first + 1] == pytest.approx(second - first - 1, abs=1)


def test_plain_steps_may_be_told_together() -> None:
    one, other = Guard(lambda _: 1.7), Guard(lambda _: 1.7)
    times = [0.010 + 0.001 * (step % 3) for step in range(20)]
    for seconds in times:
        assert not one.drafts({"a": 300, "b": 300})
        one.add({"a": 1, "b": 1}, is_drafted=False, seconds=seconds)
    other.drafts({"a": 300, "b": 300})
    other.add_plain({"a", "b"}, times)
    other.add_plain((), times)
    assert one.drafts({"a": 280, "b": 280}) == other.drafts({"a": 280, "b": 280})
    assert one.wait == other.wait == pytest.approx(0.7 / CROWD_SHARE - 20)
    assert one.report() == other.report()


def test_steps_that_also_read_prompts_count_at_the_known_price() -> None:
    guard = Guard(lambda _: 1.7)
    guard.add({"a": 1}, is_drafted=False, seconds=0.01)
    for _ in range(200):
        is_drafted = guard.drafts({"a": 500})
        guard.add({"a": 1}, is_drafted=is_drafted, seconds=None)
    assert guard.report()[1] == GuardReport(None, pytest.approx(100.0), True, probes=2, pauses=0)


def test_steps_that_always_read_prompts_too_go_on_drafting() -> None:
    run = Run(12.0, lambda _: 3.0).steps(400)
    before = len(run.drafted)
    for _ in range(300):
        is_drafted = run.guard.drafts({"0": 10_000})
        run.guard.add({"0": 4 if is_drafted else 1}, is_drafted=is_drafted, seconds=None)
        run.drafted.append(is_drafted)
    assert sum(run.drafted[before:]) > 250
