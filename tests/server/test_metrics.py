"""What `/metrics` tells against what the engine's own books say."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.engine.drafting.temperatures import calibration_error
from tests.server.inside import Inside, inside
from tests.server.wire import post, read_until

Sample = dict[str, float]

# names that dashboards for this kind of server read
KNOWN = [
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket", "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket", "vllm:num_preemptions_total", "vllm:iteration_tokens_total_bucket",
    "vllm:request_success_total", "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total", "vllm:corrupted_requests_total",
]  # fmt: skip
NEW = [
    "headrace:replay_rows_total", "headrace:index_positions_scored_total", "headrace:index_positions_skipped_total",
    "headrace:ngram_rows_read_total", "headrace:ngram_wait_seconds_total", "headrace:ngram_read_bytes_total",
    "headrace:layer_rows_total", "headrace:producer_rows_total",
    "headrace:approximate_requests_total", "headrace:window_snapshots", "headrace:window_snapshot_bytes",
    "headrace:evicted_tokens_total", "headrace:engine_restarts_total", "headrace:engine_memory_bytes",
]  # fmt: skip


def scrape(server: Inside) -> Sample:
    """Return every sample by its name and labels, the model's name left out."""
    answer = httpx2.get(f"{server.base_url}/metrics", timeout=30)
    assert answer.status_code == 200
    found: Sample = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(v for k, v in sorted(sample.labels.items()) if k != "model_name")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


@pytest.fixture(scope="module")
def fresh() -> Iterator[Inside]:
    """Serve with few blocks, so that some are evicted."""
    with inside(engine={"num_slots": 2, "cache_tokens": 4096}) as found:
        yield found


def complete(server: Inside, **body: object) -> dict:
    body = {"prompt": "import os", "max_tokens": 3, **body}
    return httpx2.post(f"{server.base_url}/v1/completions", json=body, timeout=60).json()


def test_every_name_is_there(opened: Inside) -> None:
    complete(opened)
    names = {name.split("{")[0] for name in scrape(opened)}
    assert [name for name in [*KNOWN, *NEW] if name not in names] == []


def gauges_equal_the_books(server: Inside) -> None:
    """Compare every gauge with the engine's status, taken before and after the scrape until nothing moved between."""
    for _ in range(20):
        before, found, after = server.llm.status(), scrape(server), server.llm.status()
        if {**before, "resident_bytes": 0, "peak_bytes": 0} == {**after, "resident_bytes": 0, "peak_bytes": 0}:
            break
    else:
        raise AssertionError("the engine never stood still")
    status = after
    assert found["headrace:blocks{free}"] == status["free_blocks"]
    assert found["headrace:blocks{cached}"] == status["cached_blocks"]
    assert found["headrace:blocks{evictable}"] == status["evictable_blocks"]
    assert found["headrace:blocks{total}"] == status["num_blocks"]
    held = status["num_blocks"] - status["free_blocks"] - status["evictable_blocks"]
    assert found["vllm:kv_cache_usage_perc"] == held / status["num_blocks"]
    assert found["vllm:num_requests_running"] == status["prefill"] + status["decode"] + status["forking"]
    assert found["vllm:num_requests_waiting"] == status["queued"]
    assert found["vllm:num_requests_swapped"] == status["swapped"]
    assert found["headrace:slots_free"] == status["free_slots"]
    assert found["headrace:window_snapshots"] == status["snapshots"]
    assert found["headrace:window_snapshot_bytes"] == status["snapshot_bytes"]
    assert found["headrace:host_bytes"] == status["host_bytes"]
    assert found["headrace:engine_memory_bytes{planned}"] == status["planned_bytes"]
    low, high = sorted([before["resident_bytes"], after["resident_bytes"]])
    assert low <= found["headrace:engine_memory_bytes{resident}"] <= high
    assert found["headrace:engine_up"] == 1


def test_gauges_are_the_books_when_nothing_runs(fresh: Inside) -> None:
    complete(fresh, prompt=list(range(100, 700)))
    fresh.until_idle()
    gauges_equal_the_books(fresh)
    assert scrape(fresh)["headrace:blocks{cached}"] > 0


def test_gauges_are_the_books_while_requests_run_and_wait(fresh: Inside) -> None:
    body = {"prompt": list(range(200, 500)), "max_tokens": 600, "stream": True, "ignore_eos": True}
    links = [post(fresh.port, "/v1/completions", body) for _ in range(3)]  # two slots, so one waits
    try:
        for link in links[:2]:
            read_until(link, b'"text"')
        found = scrape(fresh)
        assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (2, 1)
        assert found["headrace:slots_free"] == 0
        assert found["vllm:kv_cache_usage_perc"] > 0
        held = fresh.llm.status()
        assert held["free_slots"] == 0
        gauges_equal_the_books(fresh)
    finally:
        for link in links:
            link.close()
        fresh.until_idle()


def test_counters_grow_by_what_the_answers_say(fresh: Inside) -> None:
    fresh.until_idle()
    before = scrape(fresh)
    prompts = [list(range(1000, 1400)), list(range(1000, 1420)), list(range(1000, 1440))]
    usages = [complete(fresh, prompt=prompt, max_tokens=5, ignore_eos=True)["usage"] for prompt in prompts]
    after = scrape(fresh)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached > 700
    assert grown["vllm:prompt_tokens_total"] == grown["vllm:prefix_cache_queries_total"] == prompt_tokens == 1260
    assert grown["vllm:prefix_cache_hits_total"] == grown["vllm:prompt_tokens_cached_total{device}"] == cached
    assert grown["vllm:generation_tokens_total"] == 15
    assert grown["vllm:request_success_total{length}"] == 3
    assert grown["vllm:time_to_first_token_seconds_count"] == 3
    assert grown["vllm:inter_token_latency_seconds_count"] == 12
    assert grown["vllm:e2e_request_latency_seconds_sum"] > grown["vllm:time_to_first_token_seconds_sum"] > 0
    traces = [trace for trace in fresh.llm.traces() if trace.requests][-int(grown["headrace:engine_steps_total"]) :]
    steps = [step for trace in traces for step in trace.requests]
    assert grown["headrace:rows_total{encoder}"] == sum(step.stop - step.start for step in steps)
    assert grown["headrace:rows_total{encoder}"] == grown["vllm:iteration_tokens_total_sum"]
    assert grown["headrace:replay_rows_total{end of a prompt,decoder}"] == sum(step.replayed_rows for step in steps)
    reencoded = sum(step.counts.reencoded_rows for step in steps)
    assert grown["headrace:replay_rows_total{windows of cached tokens,encoder}"] == reencoded > 0
    assert grown["headrace:index_positions_scored_total"] == sum(step.counts.index_scored for step in steps)
    assert grown["headrace:index_positions_skipped_total"] == sum(step.counts.index_skipped for step in steps)
    engram = fresh.llm.config.engram
    columns = engram.num_hashes * (engram.max_ngram - 1)
    rows = grown["headrace:rows_total{encoder}"] * len(engram.layer_ids) * columns
    counts = ("requested", "unused", "hit", "read")
    asked, unused, hit, read = (
        sum(grown[f"headrace:ngram_rows_{count}_total{{{layer_id}}}"] for layer_id in engram.layer_ids)
        for count in counts
    )
    assert asked - unused == rows > 0
    assert asked - hit == read > 0
    assert grown["headrace:read_bytes_total{ngram}"] == sum(step.counts.ngram_bytes for step in steps)


def test_forgotten_blocks_are_counted(fresh: Inside) -> None:
    before = scrape(fresh)["headrace:evicted_tokens_total"]
    for start in range(4):
        complete(fresh, prompt=[3000 + start] * 1300, max_tokens=1)
    status = fresh.llm.status()
    found = scrape(fresh)["headrace:evicted_tokens_total"]
    assert found == status["evicted_blocks"] * 128 > before


def test_a_refused_request_is_counted_by_its_status(fresh: Inside) -> None:
    name = "headrace:requests_failed_total{400}"
    before = scrape(fresh).get(name, 0)
    assert complete(fresh, n=5)["error"]["param"] == "n"  # more than slots: the engine refuses it
    assert complete(fresh, n=0)["error"]["param"] == "n"  # nothing answers so many, and the engine never hears of it
    assert scrape(fresh)[name] == before + 2


def test_scrapes_hold_nobody_up(fresh: Inside) -> None:
    """While a long prompt is read, a scrape waits for the engine and `/health` does not wait for the scrape."""
    body = {"prompt": [9 + index % 2000 for index in range(2500)], "max_tokens": 300, "stream": True}
    with post(fresh.port, "/v1/completions", {**body, "ignore_eos": True}):
        threads = [threading.Thread(target=scrape, args=(fresh,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        slowest = 0.0
        for _ in range(20):
            began = time.monotonic()
            assert httpx2.get(f"{fresh.base_url}/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
        for thread in threads:
            thread.join()
    fresh.until_idle()
    assert slowest < 1.0


def test_counters_go_on_when_the_engine_is_started_again() -> None:
    import os
    import signal

    with inside(engine={"num_slots": 2}) as server:
        complete(server, max_tokens=4, ignore_eos=True)
        before = scrape(server)
        for _ in range(2):  # nobody scrapes between the two
            os.kill(server.llm.status()["pid"], signal.SIGKILL)
            time.sleep(0.1)
            complete(server, max_tokens=3, ignore_eos=True)
        after = scrape(server)
    assert before["vllm:generation_tokens_total"] == 4
    assert after["vllm:generation_tokens_total"] == 7  # the process in between took its count along
    assert after["headrace:engine_restarts_total"] == 2


def test_what_drafting_brings_is_what_the_engine_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # costs are measured anew
    with inside(engine={"num_slots": 2, "drafting": "auto"}) as server:
        complete(server, prompt="def read(path):\n    with open(path) as file:\n", max_tokens=80, ignore_eos=True)
        server.until_idle()
        status, found = server.llm.status(), scrape(server)
        steps = [step for trace in server.llm.traces() for step in trace.requests if step.kind == "decode"]
    for way in ("with", "without"):
        assert found[f"headrace:draft_tokens_per_second{{1,{way}}}"] == status[f"draft_batch_1_{way}"] > 0
    for name in ("paused", "probes", "pauses"):
        assert found[f"headrace:draft_{name}{{1}}"] == status[f"draft_batch_1_{name}"]
    drafted = [step for step in steps if step.drafts_proposed]
    kept = np.array([place < step.drafts_accepted for step in drafted for place in range(step.drafts_proposed)])
    chances = np.array([chance for step in drafted for chance in step.draft_chances])
    assert len(kept) > 0
    assert found["headrace:draft_calibration_guesses"] == status["draft_calibration_guesses"] == len(kept)
    error = calibration_error(chances, kept)
    assert found["headrace:draft_calibration_error"] == status["draft_calibration_error"] == pytest.approx(error)
    assert found["headrace:draft_mean_accepted"] == kept.sum() / len(drafted)
    lengths = Counter(str(step.drafts_proposed) for step in steps)
    assert {length: found[f"headrace:draft_rounds_total{{{length}}}"] for length in lengths} == lengths
