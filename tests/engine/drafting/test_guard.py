"""The guard stops drafting where it loses, goes on where it wins, and keeps looking at a falling price."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from headrace.engine.drafting.guard import Guard, GuardSettings


class Run:
    """Steps of a made-up machine: a plain step takes 10 ms, one that drafts `draft_ms`."""

    def __init__(self, draft_ms: float, kept: Callable[[float], float], *, batch: int = 1, noise: float = 0.0) -> None:
        self.now = 0.0
        self.guard = Guard(clock=lambda: self.now)
        self.drafted: list[bool] = []
        self.tokens = 0
        self._draft_ms, self._kept, self._batch, self._noise = draft_ms, kept, batch, noise
        self._numbers = random.Random(1)

    def steps(self, count: int) -> "Run":
        for _ in range(count):
            is_drafted = self.guard.drafts(self._batch)
            guesses = round(self._batch * self._kept(self.now)) if is_drafted else 0
            seconds = (self._draft_ms if is_drafted else 10.0) / 1000
            seconds *= 1 + self._noise * self._numbers.uniform(-1, 1)
            self.now += seconds
            self.tokens += self._batch + guesses
            self.guard.add(self._batch, is_drafted=is_drafted, tokens=self._batch + guesses, seconds=seconds)
            self.drafted.append(is_drafted)
        return self

    @property
    def speed(self) -> float:
        """Tokens a second against those of a machine that never drafts."""
        return self.tokens / self.now / (self._batch * 100)


@pytest.mark.parametrize("batch", [1, 8])
def test_drafting_that_nothing_is_kept_of_pauses_within_ten_rounds(batch: int) -> None:
    run = Run(15, lambda now: 0, batch=batch).steps(10)
    assert not run.guard.drafts(batch)
    assert run.guard.report()[batch].is_paused


def test_drafting_that_loses_costs_little_in_the_long_run() -> None:
    run = Run(25, lambda now: 0, noise=0.2).steps(4000)
    assert run.speed > 0.98
    assert sum(run.drafted[:10]) == 4
    assert sum(run.drafted) > 4  # it was probed again


def test_drafting_that_wins_goes_on() -> None:
    run = Run(15, lambda now: 2, noise=0.2).steps(2000)
    assert sum(run.drafted) > 0.97 * 2000
    assert run.speed > 1.9
    report = run.guard.report()[1]
    assert (report.is_paused, report.pauses) == (False, 0)
    assert report.with_drafts == pytest.approx(200, rel=0.1)
    assert report.without == pytest.approx(100, rel=0.1)


def test_probes_come_less_often_while_they_change_nothing() -> None:
    run = Run(25, lambda now: 0).steps(30_000)
    starts = [i for i in range(1, len(run.drafted)) if run.drafted[i] and not run.drafted[i - 1]]
    gaps = [second - first for first, second in pairwise(starts)]
    assert gaps[1] > 1.5 * gaps[0]
    assert max(gaps) <= 60 * 100 + 50


def test_drafting_starts_again_once_it_wins() -> None:
    run = Run(15, lambda now: 2 if now > 30 else 0).steps(3000)
    assert run.guard.report()[1].is_paused
    run.steps(9000)
    assert not run.guard.report()[1].is_paused
    assert all(run.drafted[-100:])


def test_drafting_that_begins_to_lose_pauses_before_the_next_probe() -> None:
    run = Run(15, lambda now: 2 if now < 5 else 0).steps(350)
    assert all(run.drafted[-20:])
    began = len(run.drafted)
    run.steps(60)
    assert run.now > 5
    assert run.guard.report()[1].is_paused
    assert sum(run.drafted[began:]) <= 50


def test_at_equal_speed_there_is_no_drafting_to_and_fro() -> None:
    run = Run(20, lambda now: 1, noise=0.05).steps(5000)
    report = run.guard.report()[1]
    assert report.pauses <= 4
    assert run.speed > 0.97


def test_sizes_of_batch_have_accounts_of_their_own() -> None:
    clock = [0.0]
    guard = Guard(GuardSettings(probe_steps=2), clock=lambda: clock[0])
    for _ in range(40):
        for batch, gain in ((1, 3), (5, 0)):
            is_drafted = guard.drafts(batch)
            clock[0] += 0.01
            guard.add(
                batch, is_drafted=is_drafted, tokens=batch + gain * is_drafted, seconds=0.02 if is_drafted else 0.01
            )
    assert {size: report.is_paused for size, report in guard.report().items()} == {1: False, 4: True}
    assert not guard.drafts(7)
    assert guard.drafts(2)  # nothing is known of it yet


def test_one_step_that_the_machine_slept_through_does_not_pause_drafting() -> None:
    run = Run(15, lambda now: 2).steps(50)
    run.guard.add(1, is_drafted=True, tokens=3, seconds=30.0)
    assert not run.guard.report()[1].is_paused
