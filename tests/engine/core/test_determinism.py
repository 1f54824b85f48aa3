"""An answer is a function of its request: whoever runs beside it, however it is cut, cached, swapped or resumed."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from headrace.kernels.native.choice import VARIABLE
from tests.engine.core.serving import GREEDY, SEEDED, Client, alone, answer, core, params, prompt, said
from tests.traces import KERNELS

KINDS = pytest.mark.parametrize("kind", [GREEDY, SEEDED], ids=["greedy", "seeded"])


@pytest.fixture(autouse=True, params=KERNELS)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run everything under every numerics."""
    monkeypatch.setenv(VARIABLE, request.param)


def some(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return values as parameters, of which only the kept ones run by default."""
    return [one if one in kept else pytest.param(one, marks=pytest.mark.full) for one in values]


HITS = (0, 1, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385)


@KINDS
@pytest.mark.parametrize("mode", ["replay", "full"])
@pytest.mark.parametrize("chunk", some([1, 7, 64, 128, 200, 512], 7, 64, 200))
def test_the_chunk_changes_nothing(chunk: int, mode: str, kind: dict[str, float]) -> None:
    ids = prompt(61 if chunk < 8 else 301)
    engine = core(chunk=chunk, mode=mode, max_rows=600)
    assert said(answer(engine, ids, params(**kind))) == alone(tuple(ids), mode, **kind)


@KINDS
@pytest.mark.parametrize("others", some([1, 3, 16], 3))
def test_requests_that_join_and_leave_change_nothing(others: int, kind: dict[str, float]) -> None:
    client = Client(core(num_slots=8, chunk=48))
    ids = prompt(150)
    client.submit("one", ids, params(max_tokens=12, **kind))
    for index in range(others):
        count = [3, 40, 129, 17][index % 4]
        client.submit(f"other {index}", prompt(count, seed=index + 1), params(max_tokens=2 + index % 5))
        client.step(1 + index % 3)
    client.finish()
    assert said(client.results["one"][0]) == alone(tuple(ids), count=12, **kind)
    for index in range(others):
        expected = alone(tuple(prompt([3, 40, 129, 17][index % 4], seed=index + 1)), count=2 + index % 5)
        assert said(client.results[f"other {index}"][0]) == expected


@pytest.mark.parametrize("kind", some([GREEDY, SEEDED], SEEDED), ids=["greedy", "seeded"])
@pytest.mark.parametrize("suffix", some([0, 1, 7, 30], 0, 7))
@pytest.mark.parametrize("matched", HITS)
def test_a_prefix_hit_changes_nothing(matched: int, suffix: int, kind: dict[str, float]) -> None:
    if matched + suffix == 0:
        pytest.skip("no prompt")
    first = prompt(400)
    ids = [*first[:matched], *prompt(suffix, seed=matched + 99)]
    if suffix and matched < 400:
        ids[matched] = (first[matched] + 1) % 256  # nothing more in common
    engine = core()
    answer(engine, first, params(), "first")
    result = answer(engine, ids, params(**kind), "second")
    assert said(result) == alone(tuple(ids), **kind)
    assert result.usage.cached_tokens <= matched
    if matched >= 128:
        assert result.usage.cached_tokens == matched


@KINDS
@pytest.mark.parametrize("count", some([1, 5, 127, 128, 129, 300], 1, 128, 300))
def test_the_same_prompt_again_hits_as_a_whole_and_says_the_same(count: int, kind: dict[str, float]) -> None:
    engine, ids = core(), prompt(count)
    results = [answer(engine, ids, params(**kind), name) for name in ("a", "b", "c")]
    assert [said(result) for result in results] == [alone(tuple(ids), **kind)] * 3
    if count > 127:
        assert results[2].usage.cached_tokens == count


@KINDS
def test_a_conversation_goes_on_from_the_end_of_the_answer(kind: dict[str, float]) -> None:
    engine, ids, before = core(), prompt(130), 0
    for turn in range(4):
        result = answer(engine, ids, params(max_tokens=5, **kind), f"turn {turn}")
        assert said(result) == alone(tuple(ids), count=5, **kind)
        assert result.usage.cached_tokens >= before  # the last token of an answer has no row
        before = len(ids) + len(result.token_ids) - 1
        ids = [*ids, *result.token_ids, *prompt(3 + turn, seed=turn)]


@KINDS
def test_a_tight_pool_preempts_and_changes_nothing(kind: dict[str, float]) -> None:
    # a pool for one sequence and a half while two run: three blocks of 128, and the younger takes the third first
    options = {"cache_tokens": 384, "max_context": 256, "host_bytes": 1 << 22, "headroom_blocks": 0}
    client = Client(core(num_slots=2, has_prefix_cache=False, **options))
    asked = {"old": prompt(115), "young": prompt(125, seed=1)}
    for name, ids in asked.items():
        client.submit(name, ids, params(max_tokens=18, **kind))
    client.finish()
    for name, ids in asked.items():
        assert said(client.results[name][0]) == alone(tuple(ids), count=18, **kind)
    assert client.results["young"][0].work.preemptions >= 1
    assert client.core.free_blocks == 3


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(threads: int) -> None:
    ids = prompt(90)
    assert said(answer(core(threads=threads), ids, params(max_tokens=3))) == alone(tuple(ids), count=3)


def test_further_answers_are_those_of_their_own_seeds_and_the_first_is_the_request_itself() -> None:
    client, ids = Client(core()), prompt(140)
    client.submit("three", ids, params(n=3, max_tokens=8, **SEEDED))
    client.submit("other", prompt(33, seed=5), params(max_tokens=9))
    client.finish()
    results = client.results["three"]
    assert said(results[0]) == alone(tuple(ids), count=8, **SEEDED)
    for choice in (1, 2):
        seeded = {**SEEDED, "seed": results[choice].seed}
        assert said(results[choice]) == alone(tuple(ids), count=8, **seeded)
    assert len({result.seed for result in results.values()}) == 3


def test_prompt_log_probabilities_do_not_depend_on_chunks() -> None:
    ids = prompt(90)
    found = []
    for chunk in (7, 64, 200):
        result = answer(core(chunk=chunk), ids, params(prompt_logprobs=2))
        assert result.prompt_logprobs is not None
        found.append(result.prompt_logprobs)
        assert said(result) == alone(tuple(ids), "full")
    assert len(found[0]) == 90
    assert found[0][0] is None
    assert found[0] == found[1] == found[2]
    assert all(one is not None and len(one.top) == 2 and np.isfinite(one.logprob) for one in found[0][1:])
