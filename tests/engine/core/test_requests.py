"""What a request may ask of the engine beside its sampling: when it must end, who goes first, what is refused."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from headrace.core.errors import CapacityError, OverloadedError, UserError
from headrace.engine.core import answering
from headrace.engine.core import core as core_module
from headrace.engine.core.core import choice_id
from headrace.engine.scheduler.entry import Phase
from tests.engine.core.serving import SEEDED, Client, alone, answer, core, params, prompt, refusal, said

TIGHT = {"num_slots": 2, "cache_tokens": 384, "max_context": 256, "host_bytes": 1 << 22, "headroom_blocks": 0}


@dataclass
class Clock:
    """The engine's clock, which stands still until a test moves it."""

    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (core_module, answering):
        monkeypatch.setattr(module, "time", clock)
    return clock


def step_until(client: Client, is_so: Callable[[], bool]) -> None:
    for _ in range(300):
        if is_so():
            return
        client.step()
    raise AssertionError("it did not come to that")


def phase(client: Client, name: str) -> Phase | None:
    entry = client.core._scheduler.entry(choice_id(name, 0))
    return None if entry is None else entry.phase


# ------------------------------------------------------------------------------------------------------ deadlines


@pytest.mark.parametrize("where", [Phase.QUEUED, Phase.PREFILL, Phase.DECODE, Phase.SWAPPED])
def test_a_deadline_ends_a_request_wherever_it_is(where: Phase, clock: Clock) -> None:
    client = Client(core(chunk=32, has_prefix_cache=False, **TIGHT))
    old = prompt(115)
    if where is not Phase.PREFILL:
        client.submit("old", old, params(max_tokens=18))
    if where is Phase.QUEUED:
        client.submit("other", prompt(20), params(max_tokens=18))
    ids = prompt(125, seed=1)
    client.submit("late", ids, params(max_tokens=40, deadline_s=5.0), submitted=clock.now)
    client.step()
    step_until(client, lambda: phase(client, "late") is where)
    clock.now += 4.9
    client.step()
    assert "late" not in client.results
    clock.now += 0.2
    client.finish()
    result = client.results["late"][0]
    assert result.finish_reason == "deadline"
    assert bool(result.token_ids) == (where in {Phase.DECODE, Phase.SWAPPED})
    if result.token_ids:
        assert said(result) == alone(tuple(ids), count=len(result.token_ids))
    if where is not Phase.PREFILL:
        assert said(client.results["old"][0]) == alone(tuple(old), count=18)
    assert client.core.free_blocks == 3


def test_a_deadline_counts_from_the_submission(clock: Clock) -> None:
    client = Client(core())
    client.submit("gone", prompt(5), params(deadline_s=3.0), submitted=clock.now - 3.0)
    client.submit("there", prompt(5), params(deadline_s=3.0), submitted=clock.now - 2.9)
    client.finish()
    assert client.results["gone"][0].finish_reason == "deadline"
    assert client.results["gone"][0].token_ids == []
    assert said(client.results["there"][0]) == alone(tuple(prompt(5)))


def test_timings_are_those_of_the_clock(clock: Clock) -> None:
    client = Client(core(chunk=20))
    client.submit("one", prompt(50), params(max_tokens=3), submitted=clock.now - 7.0)
    for _ in range(6):
        client.step()
        clock.now += 1.0
    timings = client.results["one"][0].timings
    assert (timings.queue_s, timings.prefill_s, timings.decode_s, timings.ttft_s) == (7.0, 2.0, 2.0, 9.0)


# -------------------------------------------------------------------------------------------- priorities and limits


def test_a_higher_priority_goes_first_and_changes_no_answer() -> None:
    client = Client(core(num_slots=1))
    for name, priority in (("low", 0), ("lower", -3), ("high", 5)):
        client.submit(name, prompt(20, seed=len(name)), params(max_tokens=3, priority=priority))
    ended = []
    while not client.core.is_idle:
        ended += [event.request_id for event in client.step() if getattr(event, "result", None) is not None]
    assert ended == ["high", "low", "lower"]
    for name in ended:
        assert said(client.results[name][0]) == alone(tuple(prompt(20, seed=len(name))), count=3)


def test_more_than_may_wait_are_refused_and_later_accepted() -> None:
    client = Client(core(num_slots=1, max_waiting=2))
    for name in "abc":
        client.submit(name, prompt(9), params())
        client.step(name == "a")
    with pytest.raises(OverloadedError, match="2 requests wait already; accepted are 2, so try again later"):
        client.submit("d", prompt(9), params())
    client.finish()
    client.submit("d", prompt(9), params())
    client.finish()
    assert sorted(client.results) == ["a", "b", "c", "d"]


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = core(cache_tokens=384, num_slots=2)
    assert refusal(engine, prompt(380), params(max_tokens=6)) == (
        "a prompt of 380 tokens and up to 6 new ones in 1 answers need 4 blocks of 128 tokens; the pool has 3"
    )
    assert "in 2 answers need 4 blocks" in refusal(engine, prompt(300), params(max_tokens=6, n=2))
    assert "3 answers at once need as many slots; there are 2" in refusal(engine, prompt(3), params(n=3))
    assert refusal(core(max_context=64), prompt(65), params()).startswith("a prompt of 65 tokens")
    assert said(answer(engine, prompt(380), params(max_tokens=5))) == alone(tuple(prompt(380)), count=5)
    assert engine._sequences == {}


def test_a_name_in_use_is_refused() -> None:
    client = Client(core())
    client.submit("one", prompt(9), params())
    with pytest.raises(UserError, match="in use"):
        client.submit("one", prompt(10), params())
    client.finish()
    assert said(client.results["one"][0]) == alone(tuple(prompt(9)))


def test_a_budget_below_a_window_and_the_decode_rows_is_refused() -> None:
    with pytest.raises(UserError, match="max_rows is 11; accepted is 12 or more: a window of 8 rows"):
        core(max_rows=11)
    with pytest.raises(CapacityError, match="max_memory is 1,000 bytes"):
        core(max_memory=1000, cache_tokens=None)


# ----------------------------------------------------------------------------------------------- one pool for many


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_a_pool_for_one_and_a_half_serves_two_with_the_cache_on(kind: str) -> None:
    sampling = SEEDED if kind == "seeded" else {}
    client = Client(core(**TIGHT))
    shared = prompt(130, seed=9)
    asked = [
        ("old", prompt(115), 18),
        ("young", prompt(125, seed=1), 18),
        ("again", prompt(115), 20),
        ("long", [*shared, *prompt(100, seed=2)], 20),
        ("fork", [*shared, *prompt(20, seed=3)], 9),
    ]
    for name, ids, count in asked:
        client.submit(name, ids, params(max_tokens=count, **sampling))
    client.finish()
    for name, ids, count in asked:
        assert said(client.results[name][0]) == alone(tuple(ids), count=count, **sampling)
    assert client.results["young"][0].work.preemptions >= 1
    engine = client.core
    assert engine.free_blocks + engine.cached_blocks == 3
    engine.clear_cache()
    assert (engine.free_blocks, engine.counts["host_bytes"]) == (3, 0)


@pytest.mark.parametrize("has_prefix_cache", [False, True])
@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_request_swapped_out_again_and_again_says_the_same(times: int, has_prefix_cache: bool) -> None:
    client = Client(core(**TIGHT | {"num_slots": 3, "has_prefix_cache": has_prefix_cache}))
    asked = {"first": (115, 30), "second": (90, 60), "young": (120, 25)}
    for name in (("young",), ("first", "young"), tuple(asked))[times]:
        count, new = asked[name]
        client.submit(name, prompt(count, seed=count), params(max_tokens=new, **SEEDED))
    client.finish()
    assert client.results["young"][0].work.preemptions == times
    for name, choices in client.results.items():
        count, new = asked[name]
        assert said(choices[0]) == alone(tuple(prompt(count, seed=count)), count=new, **SEEDED)
    assert client.core.free_blocks + client.core.cached_blocks == 3
