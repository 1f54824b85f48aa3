import os

import pytest

from headrace.engine.threads import Threads, choose_threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> "pytest.MonkeyPatch":
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.2, 0.0, 0.0))
    return monkeypatch


@pytest.mark.usefixtures("machine")
def test_a_wanted_number_is_taken_for_both_kinds_of_work() -> None:
    assert choose_threads(64, 3) == Threads(3, 3)
    assert choose_threads(5120, 1) == Threads(1, 1)


@pytest.mark.usefixtures("machine")
def test_small_models_decode_with_one_thread() -> None:
    assert choose_threads(512, None) == Threads(8, 1)
    assert choose_threads(5120, None) == Threads(8, 8)


def test_a_busy_machine_gets_fewer_and_never_less_than_one(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(os, "getloadavg", lambda: (5.1, 0.0, 0.0))
    assert choose_threads(5120, None) == Threads(3, 3)
    machine.setattr(os, "getloadavg", lambda: (40.0, 0.0, 0.0))
    assert choose_threads(5120, None) == Threads(1, 1)
