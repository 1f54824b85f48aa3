"""One rule per test: rows of a step, ends, and the plan as a pure function."""

import pytest

from headrace.core.errors import InternalError
from headrace.engine.scheduler.books import Books
from headrace.engine.scheduler.entry import EndReason
from headrace.engine.scheduler.plan import Pool, StepPlan
from headrace.engine.scheduler.request import Match
from headrace.engine.scheduler.scheduler import Scheduler, nothing_cached
from headrace.engine.scheduler.step import plan_step
from tests.engine.scheduler.drive import ask, chunks, decoding, scheduler, small, started, step, waits


def ends(plan: StepPlan) -> dict[str, str]:
    """Return why each request ended."""
    return {one.request_id: one.reason.value for one in plan.ended}


def test_a_request_is_read_in_chunks_and_then_decodes_until_its_limit() -> None:
    driven = scheduler(ask("a", 1, 12, 3))
    plan = step(driven)
    assert [(one.request_id, one.slot, one.first_row) for one in plan.admissions] == [("a", 0, 0)]
    assert [(one.request_id, one.blocks) for one in plan.allocations] == [("a", 3)]
    assert chunks(plan) == {"a": (0, 8)}
    plan = step(driven)
    assert chunks(plan) == {"a": (8, 12)}
    assert plan.prefills[0].is_last
    plan = step(driven)
    assert [(row.request_id, row.position) for row in plan.decodes] == [("a", 12)]
    assert [(one.request_id, one.blocks) for one in plan.allocations] == [("a", 1)]
    assert [row.position for row in step(driven).decodes] == [13]
    plan = step(driven)
    assert ends(plan) == {"a": "length"}
    assert (plan.ended[0].computed, plan.ended[0].generated, plan.ended[0].slot) == (14, 3, 0)
    assert driven.is_idle
    assert step(driven) == StepPlan()


def test_a_request_for_no_new_tokens_ends_when_its_prompt_is_read() -> None:
    driven = scheduler(ask("a", 1, 5, 0))
    assert chunks(step(driven)) == {"a": (0, 5)}
    plan = step(driven)
    assert (ends(plan), plan.rows) == ({"a": "length"}, 0)


def test_the_last_chunk_of_a_replayed_prompt_holds_a_window() -> None:
    driven = scheduler(ask("a", 1, 9, 1), ask("b", 2, 9, 1, mode="full"), num_slots=2, max_partial=1)
    assert [chunks(step(driven)) for _ in range(2)] == [{"a": (0, 6)}, {"a": (6, 9)}]
    assert [chunks(step(driven)) for _ in range(2)] == [{"b": (0, 8)}, {"b": (8, 9)}]


def test_the_last_chunk_may_exceed_the_chunk_size_and_the_budget_counts_it() -> None:
    driven = scheduler(ask("a", 1, 5, 9), ask("b", 2, 5, 1), window=5, chunk=1, max_rows=9, num_slots=4)
    plan = step(driven)
    assert chunks(plan) == {"a": (0, 5)}
    assert waits(plan) == {"b": "rows"}
    plan = step(driven)
    assert (decoding(plan), chunks(plan), plan.rows) == (["a"], {"b": (0, 5)}, 6)


def test_a_resumed_prompt_starts_at_its_first_row_and_writes_from_the_end_of_the_match() -> None:
    driven = scheduler(ask("a", 1, 11, 1))
    plan = step(driven, cached=4, match=lambda *_: Match(cached_tokens=11, first_row=8, holders=((frozenset(), 2),)))
    assert [(one.first_row, one.cached_tokens, one.shared_blocks) for one in plan.admissions] == [(8, 11, 2)]
    assert [one.blocks for one in plan.allocations] == [1]
    assert [(one.start, one.stop, one.write_from) for one in plan.prefills] == [(8, 11, 11)]
    assert driven.holdings == {frozenset("a"): 3}


def test_a_full_mode_request_never_asks_the_prefix_cache() -> None:
    asked = []
    driven = scheduler(ask("a", 1, 11, 1, mode="full"))
    step(driven, match=lambda request, _: asked.append(request) or Match())
    assert asked == []


def test_decodes_come_first_and_prefill_gets_what_is_left() -> None:
    driven = scheduler(ask("a", 1, 3, 9), ask("b", 2, 60, 1), chunk=99, max_rows=7)
    step(driven)
    plan = step(driven)
    assert (decoding(plan), chunks(plan)) == (["a"], {"b": (4, 10)})
    assert plan.rows == 7


def test_prefill_beside_decodes_can_be_capped() -> None:
    driven = scheduler(ask("a", 1, 3, 9), ask("b", 2, 60, 1), chunk=99, prefill_rows=4)
    assert chunks(step(driven))["b"] == (0, 13)
    assert chunks(step(driven)) == {"b": (13, 17)}


def test_a_long_prompt_leaves_rows_to_a_short_one_and_takes_all_when_alone() -> None:
    driven = scheduler(ask("a", 1, 60, 1), ask("b", 2, 5, 1), chunk=99, long_rows=10)
    assert chunks(step(driven)) == {"a": (0, 10), "b": (0, 5)}
    assert chunks(step(driven)) == {"a": (10, 26)}


def test_a_prompt_that_went_without_rows_for_long_goes_first_once() -> None:
    driven = scheduler(ask("a", 1, 60, 1), ask("b", 2, 15, 1), chunk=99, max_rows=9, long_rows=9, window=5, patience=2)
    seen = [chunks(step(driven)) for _ in range(4)]
    assert seen == [{"a": (0, 9)}, {"a": (9, 18)}, {"b": (0, 9)}, {"a": (18, 27)}]


def test_more_prompts_in_prefill_than_allowed_wait() -> None:
    driven = scheduler(*(ask(name, i, 20, 1) for i, name in enumerate("abc")), max_partial=2)
    plan = step(driven)
    assert (started(plan), waits(plan)) == (["a", "b"], {"c": "partial"})


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_cancelled_request_ends_at_the_next_boundary_in_any_phase(steps: int) -> None:
    driven = scheduler(ask("a", 1, 12, 9))
    for _ in range(steps):
        step(driven)
    assert driven.cancel("a")
    assert not driven.cancel("b")
    assert driven.finish("a", EndReason.STOP)  # too late, the first reason stays
    plan = step(driven)
    assert (ends(plan), plan.rows) == ({"a": "cancelled"}, 0)
    assert (driven.holdings, driven.is_idle) == ({}, True)
    assert not driven.cancel("a")


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_expired_request_ends_at_the_next_boundary_in_any_phase(steps: int) -> None:
    driven = scheduler(ask("a", 1, 12, 9, deadline=5.0))
    for _ in range(steps):
        assert ends(step(driven, 4.9)) == {}
    assert ends(step(driven, 5.0)) == {"a": "deadline"}


def test_blocks_of_what_ends_serve_the_same_step() -> None:
    driven = scheduler(ask("a", 1, 16, 1), ask("b", 2, 16, 1), num_blocks=4, chunk=16)
    assert waits(step(driven)) == {"b": "blocks"}
    plan = step(driven)
    assert (ends(plan), started(plan)) == ({"a": "length"}, ["b"])


def test_further_answers_start_at_the_end_of_the_prompt_and_share_its_full_blocks() -> None:
    driven = scheduler(ask("a", 1, 10, 3, children=("b", "c")), ask("d", 2, 4, 1))
    plan = step(driven)
    assert (chunks(plan), waits(plan)) == ({"a": (0, 6), "d": (0, 4)}, {"b": "parent", "c": "parent"})
    plan = step(driven)
    assert [(one.request_id, one.parent, one.slot, one.shared_blocks, one.own_blocks) for one in plan.forks] == [
        ("b", "a", 1, 2, 1), ("c", "a", 2, 2, 1),
    ]  # fmt: skip
    assert driven.holdings == {frozenset("abc"): 2, frozenset("a"): 1, frozenset("b"): 1, frozenset("c"): 1}
    plan = step(driven)
    assert [(row.request_id, row.position) for row in plan.decodes] == [("a", 10), ("b", 10), ("c", 10)]


def test_blocks_for_further_answers_are_kept_from_the_start() -> None:
    driven = scheduler(ask("a", 1, 10, 3, children=("b",)), ask("d", 2, 4, 1), num_blocks=4, num_slots=3)
    assert [waits(step(driven)) for _ in range(2)] == [{"b": "parent", "d": "blocks"}, {"d": "blocks"}]


def test_further_answers_end_with_a_prompt_that_is_never_read() -> None:
    driven = scheduler(ask("a", 1, 20, 3, children=("b",)))
    step(driven)
    driven.cancel("a")
    assert ends(step(driven)) == {"a": "cancelled", "b": "cancelled"}


def test_a_further_answer_that_is_cancelled_early_gives_back_slot_and_block() -> None:
    driven = scheduler(ask("a", 1, 18, 3, children=("b",)), ask("d", 2, 4, 1), num_slots=2, num_blocks=7)
    assert waits(step(driven)) == {"b": "parent", "d": "slots"}
    driven.cancel("b")
    plan = step(driven)
    assert (ends(plan), started(plan)) == ({"b": "cancelled"}, ["d"])


def test_a_plan_is_a_pure_function_of_its_arguments() -> None:
    books = Books(small(num_blocks=6))
    for request in (ask("a", 1, 9, 9), ask("b", 2, 9, 2), ask("c", 3, 3, 1, priority=1, children=("d",))):
        books.add(request)
    books.ending["b"] = EndReason.CANCELLED
    pool, before = Pool(free=6, evictable=0), repr(books.copy().live())
    first, after = plan_step(books, 0.0, pool, nothing_cached)
    second, again = plan_step(books, 0.0, pool, nothing_cached)
    assert first == second
    assert first.rows > 0
    assert (after.live(), dict(after.holdings.groups())) == (again.live(), dict(again.holdings.groups()))
    assert repr(books.live()) == before
    assert dict(books.holdings.groups()) == {}


def test_a_pool_with_more_blocks_than_the_books_leave_is_an_error() -> None:
    driven = scheduler(ask("a", 1, 9, 9))
    step(driven)
    with pytest.raises(InternalError, match="18 free and 0 cached blocks; the books leave 17"):
        driven.plan(0.0, Pool(free=18, evictable=0))


@pytest.mark.parametrize(
    ("match", "message"),
    [
        (Match(cached_tokens=12), "matched for 12"),
        (Match(cached_tokens=8, first_row=9, holders=((frozenset(), 2),)), "would start at row 9"),
        (Match(cached_tokens=11, first_row=9, holders=((frozenset(), 2),)), "up to both 8"),
        (Match(cached_tokens=8, first_row=8, holders=((frozenset(), 1),)), "in 1 full blocks; accepted are 2"),
    ],
)
def test_a_match_that_cannot_be_is_an_error(match: Match, message: str) -> None:
    driven: Scheduler = scheduler(ask("a", 1, 11, 1))
    with pytest.raises(InternalError, match=message):
        step(driven, match=lambda *_: match)


def test_drafts_get_rows_up_to_the_answers_last_stored_token_and_their_block() -> None:
    driven = scheduler(ask("a", 1, 5, 6))
    step(driven)
    rows = driven.plan(0.0, Pool(free=18, evictable=0), drafts={"a": 9}).decodes
    assert [(row.position, row.drafts) for row in rows] == [(5, 2)]  # tokens 5, 6, 7 fill the second block
    driven.accept("a", 2)
    rows = driven.plan(0.0, Pool(free=18, evictable=0), drafts={"a": 9}).decodes
    assert [(row.position, row.drafts) for row in rows] == [(8, 1)]  # of 6 tokens 4 are there, and the last has no row


def test_drafts_leave_a_window_of_rows_to_prompts() -> None:
    driven = scheduler(ask("a", 1, 4, 20), ask("b", 2, 4, 20), max_rows=9, num_slots=2)
    while len(decoding(step(driven))) < 2:
        pass
    plan = driven.plan(0.0, Pool(free=14, evictable=0), drafts={"a": 3, "b": 3})
    assert sum(row.drafts for row in plan.decodes) <= 9 - 3 - 2


def test_drafts_of_a_request_that_does_not_decode_cannot_be_accepted() -> None:
    with pytest.raises(InternalError, match="does not decode"):
        scheduler(ask("a", 1, 5, 6)).accept("a", 1)
