"""One rule per test: who starts, who is swapped out, who comes back."""

from headrace.engine.scheduler.books import Books
from headrace.engine.scheduler.entry import Entry, Phase
from headrace.engine.scheduler.plan import Pool
from headrace.engine.scheduler.request import Match, Request
from headrace.engine.scheduler.scheduler import Scheduler, nothing_cached
from headrace.engine.scheduler.step import plan_step
from tests.engine.scheduler.drive import ask, chunks, decoding, scheduler, small, started, step, waits


def until_decoding(driven: Scheduler, *names: str) -> None:
    """Step until these requests are all in decode."""
    for _ in range(20):
        if all((entry := driven.entry(name)) and entry.phase.value == "decode" for name in names):
            return
        step(driven)
    raise AssertionError("they never decode")


def test_a_higher_priority_goes_first_then_the_earlier_arrival() -> None:
    driven = scheduler(ask("a", 1, 3, 1), ask("b", 2, 3, 1, priority=1), ask("c", 3, 3, 1, priority=1))
    plan = step(driven)
    assert (started(plan), waits(plan)) == (["b", "c"], {"a": "partial"})


def test_a_large_request_is_not_overtaken_by_small_ones() -> None:
    driven = scheduler(ask("a", 1, 20, 9), ask("b", 2, 61, 1), ask("c", 3, 2, 1))
    plan = step(driven)
    assert (started(plan), waits(plan)) == (["a"], {"b": "blocks", "c": "turn"})


def test_without_a_free_slot_a_request_waits() -> None:
    driven = scheduler(ask("a", 1, 3, 9), ask("b", 2, 3, 1), num_slots=1)
    assert waits(step(driven)) == {"b": "slots"}


def test_a_start_leaves_blocks_to_those_who_run() -> None:
    driven = scheduler(ask("a", 1, 12, 4), ask("b", 2, 28, 1), num_blocks=10, headroom_blocks=1)
    assert waits(step(driven)) == {"b": "headroom"}
    driven = scheduler(ask("a", 1, 12, 4), ask("b", 2, 28, 1), num_blocks=11, headroom_blocks=1)
    assert started(step(driven)) == ["a", "b"]


def test_a_start_that_could_strand_one_ahead_waits() -> None:
    """With no host memory the first one must be sure of all blocks up to its end."""
    requests = (ask("a", 1, 12, 13), ask("b", 2, 28, 1))
    plan = step(scheduler(*requests, num_blocks=12, host_bytes=0))
    assert (started(plan), waits(plan)) == (["a"], {"b": "promise"})
    assert started(step(scheduler(*requests, num_blocks=13, host_bytes=0))) == ["a", "b"]
    assert started(step(scheduler(*requests, num_blocks=12, host_bytes=17))) == ["a", "b"]


def test_cached_blocks_go_before_anybody_is_swapped_out() -> None:
    driven = scheduler(ask("a", 1, 8, 9), ask("b", 2, 8, 9), num_blocks=6, long_rows=8)
    until_decoding(driven, "a", "b")
    plan = step(driven, cached=2)
    assert (decoding(plan), plan.evictions, plan.preemptions) == (["a", "b"], 2, ())


def test_the_last_in_rank_is_swapped_out_when_blocks_run_short() -> None:
    driven = scheduler(ask("a", 1, 8, 9), ask("b", 2, 7, 9, priority=1), ask("c", 3, 7, 9), num_blocks=6, max_partial=3)
    until_decoding(driven, "a", "b", "c")
    plan = step(driven)
    assert [(one.request_id, one.blocks, one.for_request) for one in plan.preemptions] == [("c", 2, "a")]
    assert (decoding(plan), waits(plan)) == (["b", "a"], {"c": "blocks"})
    assert driven.counts.host_bytes == 27


def test_the_only_running_request_is_never_swapped_out() -> None:
    driven = scheduler(ask("a", 1, 8, 13), num_blocks=5)
    until_decoding(driven, "a")
    for _ in range(12):
        assert decoding(step(driven)) == ["a"]


def test_without_host_memory_the_later_one_waits_holding_its_blocks() -> None:
    driven = scheduler(ask("a", 1, 8, 9), ask("b", 2, 8, 5), num_blocks=6, host_bytes=0)
    until_decoding(driven, "a", "b")
    seen = [(decoding(plan), waits(plan), plan.preemptions) for plan in (step(driven) for _ in range(8))]
    assert seen == [(["a"], {"b": "promise"}, ())] * 4 + [(["a"], {"b": "blocks"}, ())] * 4
    assert decoding(step(driven)) == ["b"]


def test_a_swapped_request_comes_back_before_a_new_one_of_its_priority_starts() -> None:
    driven = scheduler(ask("a", 1, 8, 5), ask("b", 2, 8, 5), num_blocks=4)
    until_decoding(driven, "a", "b")
    assert [one.request_id for one in step(driven).preemptions] == ["b"]
    driven.submit(ask("c", 3, 4, 1))
    while driven.entry("a"):
        plan = step(driven)
        assert not started(plan) or driven.entry("b").phase.value != "swapped"
    assert [(one.request_id, one.blocks) for one in plan.swap_ins] == [("b", 2)]
    assert waits(plan)["b"] == "returned"
    assert decoding(step(driven)) == ["b"]
    assert driven.counts.host_bytes == 0


def test_a_new_request_of_higher_priority_starts_before_a_swapped_one_returns() -> None:
    driven = scheduler(ask("a", 1, 8, 5), ask("b", 2, 8, 5), num_blocks=4)
    until_decoding(driven, "a", "b")
    step(driven)
    driven.submit(ask("c", 3, 4, 1, priority=1))
    plan = step(driven)
    assert (started(plan), waits(plan)) == (["c"], {"b": "blocks"})


def test_nothing_starts_in_a_step_with_a_swap() -> None:
    driven = scheduler(ask("a", 1, 8, 5), ask("b", 2, 8, 5), num_blocks=4)
    until_decoding(driven, "a", "b")
    driven.submit(ask("c", 3, 4, 1, priority=1))
    plan = step(driven)
    assert [one.request_id for one in plan.preemptions] == ["b"]
    assert waits(plan) == {"b": "blocks", "c": "blocks"}
    assert started(step(driven)) == ["c"]


def test_only_a_request_of_higher_rank_starts_while_a_running_one_lacks_a_block() -> None:
    """The new ones need no block that is not there: their prompt is a block that "a" holds."""
    driven = scheduler(ask("a", 1, 8, 9), ask("b", 2, 8, 5), num_blocks=6, host_bytes=0)
    until_decoding(driven, "a", "b")
    held = Match(cached_tokens=4, first_row=0, holders=((frozenset("a"), 1),))
    driven.submit(ask("c", 3, 4, 1))
    plan = step(driven, match=lambda *_: held)
    assert waits(plan) == {"b": "promise", "c": "blocks"}
    driven.submit(ask("d", 4, 4, 1, priority=1))
    plan = step(driven, match=lambda *_: held)
    assert (started(plan), waits(plan)) == (["d"], {"b": "promise", "c": "blocks"})


def test_a_swapped_request_returns_past_one_that_only_its_end_makes_room_for() -> None:
    driven = scheduler(ask("a", 1, 8, 5), ask("b", 2, 8, 5), num_blocks=4, host_bytes=17)
    until_decoding(driven, "a", "b")
    assert [(one.request_id, one.blocks) for one in step(driven).preemptions] == [("b", 1)]
    driven.submit(ask("c", 3, 16, 1, priority=1))
    while driven.entry("a"):
        plan = step(driven)
    assert [(one.request_id, one.blocks) for one in plan.swap_ins] == [("b", 1)]
    assert waits(plan) == {"c": "blocks", "b": "returned"}
    while driven.entry("b"):
        plan = step(driven)
    assert started(plan) == ["c"]


def swapped(name: str, arrival: int) -> Entry:
    """Return a request of eight tokens that was swapped out while it decoded."""
    return Entry(
        request=ask(name, arrival, 8, 9), phase=Phase.SWAPPED, was=Phase.DECODE, computed=8, generated=1, blocks=2,
        host_blocks=2,
    )  # fmt: skip


def test_a_swapped_request_returns_before_an_older_one_of_its_priority_starts() -> None:
    """The older one was passed while it waited for a prefix."""
    older = Entry(request=ask("a", 1, 4, 1))
    books = Books(small(num_slots=1), queue={"a": older}, started={"b": swapped("b", 2)}, host_used=27)
    plan, _ = plan_step(books, 0.0, Pool(free=20, evictable=0), nothing_cached)
    assert [one.request_id for one in plan.swap_ins] == ["b"]
    assert waits(plan) == {"a": "slots", "b": "returned"}


def test_a_swapped_answer_returns_while_as_many_prompts_as_allowed_are_in_prefill() -> None:
    driven = scheduler(ask("a", 1, 40, 1), max_partial=1)
    step(driven)
    books = driven._books
    books.started["b"] = swapped("b", 2)
    books.host_used = 27
    plan, _ = plan_step(books, 0.0, Pool(free=10, evictable=0), nothing_cached)
    assert [one.request_id for one in plan.swap_ins] == ["b"]


def test_a_swapped_request_can_be_cancelled() -> None:
    driven = scheduler(ask("a", 1, 8, 5), ask("b", 2, 8, 5), num_blocks=4)
    until_decoding(driven, "a", "b")
    step(driven)
    driven.cancel("b")
    assert [(one.request_id, one.phase.value, one.slot) for one in step(driven).ended] == [("b", "swapped", None)]
    assert driven.counts.host_bytes == 0


def prefix_of_a(request: Request, starting: tuple[str, ...]) -> Match:
    """Answer that "a" is about to compute eight tokens that everybody else needs."""
    return Match() if request.request_id == "a" else Match(waits_for="a", wait_tokens=8)


def test_a_request_waits_for_a_prefix_in_flight_and_lets_others_pass() -> None:
    driven = scheduler(ask("a", 1, 20, 1), ask("b", 2, 20, 1), ask("c", 3, 3, 1, mode="full"), chunk=4, max_rows=8)
    plan = step(driven, match=prefix_of_a)
    assert (started(plan), waits(plan)) == (["a", "c"], {"b": "prefix"})
    while driven.entry("a").computed < 8:
        assert waits(step(driven, match=prefix_of_a))["b"] == "prefix"
    hit = Match(cached_tokens=8, first_row=8, holders=((frozenset("a"), 2),))
    plan = step(driven, match=lambda *_: hit)
    assert [(one.request_id, one.cached_tokens) for one in plan.admissions] == [("b", 8)]
    assert driven.holdings[frozenset("ab")] == 2


def test_a_request_does_not_wait_for_a_prefix_of_a_lower_priority() -> None:
    driven = scheduler(ask("a", 1, 20, 1), chunk=4)
    step(driven, match=prefix_of_a)
    driven.submit(ask("b", 2, 20, 1, priority=1))
    assert started(step(driven, match=prefix_of_a)) == ["b"]


def test_a_request_goes_by_itself_when_the_one_it_waited_for_is_gone() -> None:
    driven = scheduler(ask("a", 1, 20, 1), ask("b", 2, 20, 1))
    step(driven, match=prefix_of_a)
    driven.cancel("a")
    plan = step(driven, match=prefix_of_a)
    assert (started(plan), chunks(plan)) == (["b"], {"b": (0, 8)})


def test_a_fork_waits_while_one_ahead_counts_on_swapping_the_prompt() -> None:
    """Shared blocks cannot be swapped out, so the fork would take from the first what it was promised."""
    driven = scheduler(ask("a", 1, 4, 25), ask("b", 2, 12, 2, children=("c",)), num_blocks=8, host_bytes=37, chunk=16)
    plan = step(driven)
    assert (started(plan), chunks(plan)) == (["a", "b"], {"a": (0, 4)})
    assert waits(plan) == {"b": "promise", "c": "parent"}
