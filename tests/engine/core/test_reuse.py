"""Which requests share what, which never do, and what they are told about it."""

import time
from typing import Any

import pytest

from headrace.engine.core.core import EngineCore
from headrace.engine.result import Result
from tests.engine.core.serving import SEEDED, Client, alone, answer, core, params, prompt, said

FIRST = prompt(300)


def ask(engine: EngineCore, name: str, ids: list[int], **values: Any) -> Result:
    return answer(engine, ids, params(**values), name)


def other(ids: list[int], place: int) -> list[int]:
    """Return ids with another token at a place."""
    return [*ids[:place], (ids[place] + 1) % 256, *ids[place + 1 :]]


# --------------------------------------------------------------------------------------------------------- reasons


def test_every_miss_has_its_reason() -> None:
    engine = core()
    first = ask(engine, "first", FIRST)
    assert (first.cache_reason, first.usage.cached_tokens) == ("nothing cached", 0)
    reasons = {
        "other from the start": (other(FIRST, 0), "diverges at token 0", 0),
        "other later": (other(FIRST, 190), "diverges at token 190", 190),
        "odd": (other(FIRST, 189), "diverges at token 189", 189),
        "longer": ([*FIRST, *first.token_ids, 7, 8, 9], "cached up to token 305", 305),
        "short": (FIRST[:5], "within one window of its start", 0),
    }
    for name, (ids, reason, cached) in reasons.items():
        result = ask(engine, name, ids)
        assert (result.cache_reason, result.usage.cached_tokens) == (reason, cached), name
        assert said(result) == alone(tuple(ids))
    same = ask(engine, "same", FIRST)
    assert (same.cache_reason, same.usage.cached_tokens) == (None, 300)
    full = ask(engine, "full", FIRST, mode="full")
    assert (full.cache_reason, full.usage.cached_tokens) == ("full mode", 0)
    off = core(has_prefix_cache=False)
    for name in "ab":
        result = ask(off, name, FIRST)
        assert (result.cache_reason, result.usage.cached_tokens) == (None, 0)


def test_a_window_state_that_lies_far_back_is_told() -> None:
    engine = core(snapshot_every=100)
    shape = engine.model.state_shape
    ask(engine, "first", FIRST)
    ids = other(FIRST, 20)
    result = ask(engine, "first part", ids)
    assert said(result) == alone(tuple(ids))
    assert (result.cache_reason, result.usage.cached_tokens) == ("no window state", 0)
    ids = other(FIRST, 90)
    result = ask(engine, "second", ids)
    assert said(result) == alone(tuple(ids))
    row = 90 - shape.decoder_start * (shape.window - 1)
    assert result.cache_reason == f"windows rebuilt from token {row - row % 2}"
    assert result.usage.cached_tokens == 90
    ids = other(FIRST, 280)
    result = ask(engine, "third", ids)
    assert said(result) == alone(tuple(ids))
    assert result.usage.cached_tokens == 280
    assert result.cache_reason == "window state only at token 256"
    assert result.work.reencoded_rows >= 280 - 256


def test_a_window_state_that_nobody_used_for_its_time_is_let_go_and_rebuilt_exactly() -> None:
    ids = [*FIRST, *prompt(20, seed=4)]
    reasons = {}
    for ttl_s in (0.05, 600.0):
        engine = core(snapshot_ttl_s=ttl_s)
        ask(engine, "first", FIRST)
        time.sleep(0.1)
        result = ask(engine, "second", ids)
        assert said(result) == alone(tuple(ids))
        assert result.usage.cached_tokens == 300
        reasons[ttl_s] = (result.cache_reason or "").partition(" token")[0]
    assert reasons == {0.05: "windows rebuilt from", 600.0: "diverges at"}


# ------------------------------------------------------------------------------------------------------------ salts


def test_salts_share_nothing() -> None:
    engine = core()
    for salt in ("a", "b", None):
        result = ask(engine, f"first {salt}", FIRST, cache_salt=salt)
        assert (result.usage.cached_tokens, result.cache_reason) == (0, "nothing cached")
    blocks = engine.cached_blocks
    assert blocks == 9
    for salt in ("a", "b", None):
        result = ask(engine, f"second {salt}", FIRST, cache_salt=salt)
        assert result.usage.cached_tokens == 300
        assert said(result) == alone(tuple(FIRST))
    result = ask(engine, "third", [*FIRST, 3], cache_salt="c")
    assert result.usage.cached_tokens == 0


# ----------------------------------------------------------------------------------------------- approximate lineage

SECOND = [*FIRST[:200], *prompt(60, seed=8)]


def approximate(neighbours: int = 0, **options: Any) -> tuple[EngineCore, Result]:
    """Ask for a prompt whose beginning is cached without any window state, beside others; return the answer."""
    client = Client(core(snapshot_bytes=0, num_slots=8, **options))
    client.submit("first", FIRST, params())
    client.finish()
    client.core.cache.index.shelf.budget = 1 << 20  # from now on states are kept
    for index in range(neighbours):
        client.submit(f"other {index}", prompt(30 + 40 * index, seed=index + 20), params(max_tokens=9))
        client.step()
    client.submit("second", SECOND, params(resume="replay", max_tokens=8, **SEEDED))
    client.finish()
    return client.core, client.results["second"][0]


def test_replay_starts_where_no_window_is_held_and_says_so() -> None:
    engine, result = approximate()
    assert result.is_approximate
    assert result.usage.cached_tokens >= 199
    assert result.work.layer_rows < 7 * 130
    exact = ask(engine, "exact", SECOND, max_tokens=8, **SEEDED)
    assert not exact.is_approximate
    assert said(exact) == alone(tuple(SECOND), count=8, **SEEDED)
    assert said(exact) != said(result), "nothing was approximated, so this test shows nothing"


@pytest.mark.parametrize("neighbours", [0, 3])
@pytest.mark.parametrize("chunk", [7, 64, 200])
def test_an_approximate_answer_is_the_same_whatever_the_chunk_and_the_neighbours(chunk: int, neighbours: int) -> None:
    assert said(approximate(neighbours, chunk=chunk)[1]) == said(approximate()[1])


def test_what_is_approximate_is_never_read_by_exact_requests() -> None:
    engine, result = approximate()
    longer = [*SECOND, *result.token_ids[:7], *prompt(20, seed=5)]
    again = ask(engine, "again", longer, resume="replay")
    assert again.is_approximate
    assert again.usage.cached_tokens >= len(SECOND)
    exact = ask(engine, "exact", longer)
    assert (exact.is_approximate, exact.cache_reason) == (False, "approximate lineage")
    assert said(exact) == alone(tuple(longer))
    at_last = ask(engine, "at last", longer, resume="replay")  # as far, and exact
    assert (at_last.is_approximate, said(at_last)) == (False, said(exact))


def test_replay_with_a_window_held_is_exact() -> None:
    engine = core(resume="replay")
    ask(engine, "first", FIRST)
    result = ask(engine, "second", [*FIRST, *prompt(9, seed=2)])
    assert (result.is_approximate, result.usage.cached_tokens) == (False, 300)
    assert said(result) == alone((*FIRST, *prompt(9, seed=2)))


# --------------------------------------------------------------------------------------------------- the same at once


def test_prompts_that_begin_alike_are_read_once_even_if_they_come_together() -> None:
    client = Client(core(chunk=64, num_slots=4))
    asked = {f"r{index}": [*FIRST[:257], *prompt(20 + index, seed=index + 1)] for index in range(4)}
    for name, ids in asked.items():
        client.submit(name, ids, params())
    client.finish()
    for name, ids in asked.items():
        assert said(client.results[name][0]) == alone(tuple(ids))
    cached = [client.results[name][0].usage.cached_tokens for name in asked]
    assert cached[0] == 0
    assert min(cached[1:]) >= 250


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    engine = core(cache_tokens=1024, num_slots=1)
    prompts = {name: prompt(250, seed=index + 1) for index, name in enumerate("abcd")}
    for name in "abc":
        ask(engine, name, prompts[name])
    assert ask(engine, "a again", prompts["a"]).usage.cached_tokens == 250
    ask(engine, "d", prompts["d"])
    found = {name: ask(engine, f"{name} at last", prompts[name]).usage.cached_tokens for name in "adb"}
    assert (found["a"], found["d"]) == (250, 250)
    assert found["b"] < 250


def test_a_cleared_cache_takes_nothing_of_answers_that_were_told_before() -> None:
    engine = core()
    client = Client(engine)
    client.submit("a", prompt(200), params())
    while not client.results:
        client.step()
    engine.clear_cache()
    client.finish()
    engine.step()
    assert answer(engine, prompt(200), params(), name="b").usage.cached_tokens == 0
