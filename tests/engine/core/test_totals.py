"""The sums that watchers read against the trace of every step and against the results."""

import pytest

from headrace.engine.core.trace import RowCounts
from tests.engine.core.serving import Client, core, params, prompt


def served() -> Client:
    """Serve prompts that share a beginning, with several answers, in both modes, and one request that ends early."""
    client = Client(core(trace_steps=4096, num_slots=3, cache_tokens=1024))
    shared = prompt(130)
    for index, (mode, n) in enumerate([("replay", 1), ("replay", 2), ("full", 1), ("replay", 1)]):
        client.submit(f"r{index}", [*shared, *prompt(20 + index, index + 1)], params(max_tokens=5, mode=mode, n=n))
        client.step(3)
    client.finish()
    return client


def test_totals_are_the_sums_of_the_trace() -> None:
    client = served()
    totals, traces = client.core.totals, client.core.traces.newest()
    steps = [step for trace in traces for step in trace.requests]
    counts = RowCounts()
    for step in steps:
        counts.add(step.counts)
    assert totals.counts == counts
    assert totals.encoder_rows == totals.row_sum == sum(trace.rows for trace in traces)
    assert totals.decoder_rows == sum(step.decoder_rows for step in steps)
    assert totals.replayed_rows == sum(step.replayed_rows for step in steps) > 0
    assert totals.steps == sum(bool(trace.requests) for trace in traces) == totals.rows.total()
    assert totals.preemptions == sum(len(trace.preempted) for trace in traces)
    assert totals.cached_tokens["device"] == sum(step.cached_tokens for step in steps) > 0
    assert totals.step_seconds == pytest.approx(sum(trace.seconds for trace in traces), rel=0.5)


def test_totals_are_the_sums_of_the_results() -> None:
    client = served()
    results = [result for choices in client.results.values() for result in choices.values()]
    firsts = [client.results[f"r{index}"][0] for index in range(4)]
    totals = client.core.totals
    assert totals.generated_tokens == sum(len(result.token_ids) for result in results) == 5 * 5
    assert totals.prompt_tokens == sum(result.usage.prompt_tokens for result in firsts)
    queried = [result.usage.prompt_tokens for result in firsts if result.cache_reason != "full mode"]
    assert (len(queried), totals.queried_tokens) == (3, sum(queried))
    assert totals.cached_tokens["device"] == sum(result.usage.cached_tokens for result in firsts)
    assert sum(totals.cut_short.values()) == sum(result.cache_reason is not None for result in firsts)
    assert totals.cut_short["full mode"] == 1


def test_pool_counts_are_those_of_the_pools() -> None:
    client = served()
    engine, found = client.core, client.core.pools
    blocks = engine._holdings.blocks
    held = [block for block in range(blocks.num_blocks) if blocks.references(block)]
    assert found["free_blocks"] == blocks.num_blocks - len(held)
    assert found["cached_blocks"] == found["evictable_blocks"] == len(held) > 0
    assert found["free_slots"] == found["num_slots"] == 3
    assert found["evicted_blocks"] == 0
    freed = engine.cache.index.evict(2)
    assert engine.pools["evicted_blocks"] == len(freed) >= 2
    assert engine.pools["free_blocks"] == found["free_blocks"] + len(freed)


@pytest.mark.parametrize("alternatives", [0, 3])
def test_events_carry_the_log_probabilities_that_the_result_reports(alternatives: int) -> None:
    client = Client(core())
    client.submit("a", prompt(40), params(max_tokens=4, top_logprobs=alternatives))
    events = []
    while not client.results:
        events += client.step()
    tokens = [event for event in events if getattr(event, "token_id", None) is not None]
    result = client.results["a"][0]
    assert [event.logprob for event in tokens] == result.logprobs
    tops = [entry.top for entry in result.token_logprobs] if alternatives else [()] * 4
    assert [event.top_logprobs for event in tokens] == tops


def test_events_carry_no_log_probability_that_was_not_asked_for() -> None:
    client = Client(core())
    client.submit("a", prompt(40), params(max_tokens=2, logprobs=False))
    events = client.step(4)
    assert {event.logprob for event in events if getattr(event, "token_id", None) is not None} == {None}
