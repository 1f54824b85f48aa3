"""What the step trace says against what the model did, counted and measured by other means."""

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.cache.block_pool import BLOCK_TOKENS
from headrace.engine.core.core import EngineCore
from headrace.engine.core.trace import RequestStep, RowCounts
from headrace.models.deepseek_v41.batch import Work
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.models.deepseek_v41.plan import LayerPlan, build_plan
from tests.engine.core.serving import GREEDY, SEEDED, Client, answer, core, params, prompt, said, tiny
from tests.traces import SHAPES


def traffic(engine: EngineCore, seed: int, count: int = 5) -> Client:
    """Run random requests that share beginnings, join while others run, and are swapped where there is little room."""
    pick, client = random.Random(seed), Client(engine)
    for index in range(count):
        ids = [*prompt(pick.choice([0, 70, 129]), 0), *prompt(pick.randint(1, 60), index)]
        mode = pick.choice(["replay", "replay", "full"])
        kind = pick.choice([GREEDY, SEEDED])
        client.submit(f"r{index}", ids, params(max_tokens=pick.randint(1, 9), mode=mode, n=pick.choice([1, 2]), **kind))
        client.step(pick.randint(1, 5))
    client.finish()
    assert not client.errors
    return client


def steps(engine: EngineCore) -> Iterator[RequestStep]:
    for trace in engine.traces.newest():
        yield from trace.requests


def total(engine: EngineCore) -> RowCounts:
    counts = RowCounts()
    for step in steps(engine):
        counts.add(step.counts)
    return counts


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Return what the model counts of every forward pass from now on."""
    work, forward = Work(), DeepseekV41.forward

    def counted(self: DeepseekV41, *args: Any, **options: Any) -> Any:
        return forward(self, *args, **{**options, "work": work})

    monkeypatch.setattr(DeepseekV41, "forward", counted)
    return work


@pytest.mark.parametrize("shape", SHAPES)
def test_counts_of_all_requests_are_those_of_the_model(shape: str, counting: Work) -> None:
    engine = core(tiny(shape), chunk=40, cache_tokens=768, max_context=384, trace_steps=5000)
    client = traffic(engine, seed=len(shape))
    counts = total(engine)
    assert counts.layer_rows == counting.layer_rows
    assert counts.producer_rows == counting.producer_rows
    assert counts.index_scored_by_layer == counting.index_scored_by_layer
    assert counts.index_scored == counting.index_scored > 0
    assert sum(step.replayed_rows for step in steps(engine)) == counting.replayed_rows
    results = [result for choices in client.results.values() for result in choices.values()]
    assert sum(result.work.layer_rows for result in results) == counts.layer_rows
    assert sum(result.work.index_scored for result in results) == counts.index_scored
    assert sum(result.work.reencoded_rows for result in results) == counts.reencoded_rows


def entry_bytes(engine: EngineCore) -> tuple[int, int, int]:
    """Return the bytes of a global entry, its index key and a window row, measured from the pools."""
    blocks, slots = engine._holdings.blocks, engine._holdings.slots
    planes = blocks.planes(next(iter(blocks.shape.source_ratios)))
    widths = [plane.shape[1] * plane.element_size() for plane in planes]
    codes, scales = slots._buffers[:2]
    return sum(widths[:2]), sum(widths[2:]), codes.shape[-1] + scales.shape[-1]


@pytest.mark.parametrize("shape", ["three streams", "pairs in the decoder"])
def test_bytes_are_rows_times_the_bytes_of_a_row_in_the_buffers(shape: str) -> None:
    engine = core(tiny(shape), chunk=40, cache_tokens=768, max_context=384, trace_steps=5000)
    traffic(engine, seed=3)
    entry, key, row = entry_bytes(engine)
    plan = [layer for layer in build_plan(engine.model.config) if not layer.is_draft]
    floors: dict[str, int] = {}
    begins: dict[str, int] = {}
    for step in steps(engine):
        if (step.cache_reason or "").startswith("windows rebuilt"):
            begins[step.request_id.partition("/")[0]] = step.start
        begin = begins.get(step.request_id.partition("/")[0], 0)
        floor = floors.setdefault(step.request_id.partition("/")[0], 0)
        if step.replayed_rows:
            floor = floors[step.request_id.partition("/")[0]] = step.stop - step.replayed_rows
        seen = _seen(engine, plan, step, begin, floor)
        assert step.counts.window_bytes == seen["window"] * row
        assert step.counts.window_bytes_written == seen["rows"] * row
        assert step.counts.global_bytes == seen["entries"] * entry
        assert step.counts.index_scored + step.counts.index_skipped == seen["visible"]
        assert step.counts.index_bytes == step.counts.index_scored * key
        assert step.counts.ngram_bytes == (step.stop - step.start) * engine.model.ngram_bytes_per_token


def _seen(engine: EngineCore, plan: list[LayerPlan], step: RequestStep, begin: int, floor: int) -> dict[str, int]:
    """Count, position by position, what a step's rows look at; encoder windows begin at `begin`, others at `floor`."""
    config, seen = engine.model.config, {"window": 0, "rows": 0, "entries": 0, "visible": 0}
    for layer in plan:
        is_decoder = layer.half == "decoder"
        first = step.stop - step.decoder_rows if is_decoder else step.start
        for position in range(first, step.stop):
            seen["rows"] += 1
            seen["window"] += sum(
                position - config.window < one for one in range(floor if is_decoder else begin, position + 1)
            )
            if layer.ratio:
                visible = sum((one + 1) % layer.ratio == 0 for one in range(position + 1))
                seen["entries"] += min(visible, config.index_topk)
                seen["visible"] += visible * (layer.role != "reuse")
    return seen


def test_entries_are_written_once_whatever_is_reused() -> None:
    """What one request writes and another finds adds up to what a state holds at the end."""
    engine, ids = core(chunk=40, trace_steps=5000), prompt(300)
    blocks = engine._holdings.blocks
    assert _stored(engine, BLOCK_TOKENS) == blocks.block_bytes
    first = answer(engine, ids[:200], params(max_tokens=5), "first")
    assert total(engine).global_bytes_written == _stored(engine, 204)
    longer = [*ids[:200], *first.token_ids[:3], (first.token_ids[3] + 1) % 256, *ids[204:]]
    second = answer(engine, longer, params(max_tokens=1), "second")
    assert second.usage.cached_tokens == 203
    assert second.work.reencoded_rows == 1
    assert total(engine).global_bytes_written == sum(map(partial(_stored, engine), (204, 300))) - _stored(engine, 203)
    (hit,) = [step for step in steps(engine) if step.cached_tokens]
    assert (hit.request_id, hit.cached_tokens, hit.cached_blocks) == ("second/0", 203, {"device": 1})
    assert hit.start == 202
    assert hit.cache_reason == "diverges at token 203"


def _stored(engine: EngineCore, num_tokens: int) -> int:
    """Return the bytes of the entries that some tokens complete, measured from the pool."""
    blocks = engine._holdings.blocks
    return sum(
        sum(plane.shape[1] for plane in blocks.planes(source)) * (num_tokens // ratio)
        for source, ratio in blocks.shape.source_ratios.items()
    )


def test_a_trace_says_who_waits_is_swapped_returns_and_ends() -> None:
    options = {"cache_tokens": 384, "max_context": 256, "host_bytes": 1 << 22, "headroom_blocks": 0}
    engine = core(num_slots=2, has_prefix_cache=False, trace_steps=5000, **options)
    client = Client(engine)
    for name, count in (("old", 115), ("young", 125), ("late", 9)):
        client.submit(name, prompt(count), params(max_tokens=18))
    client.finish()
    traces = engine.traces.newest()
    assert [trace.step for trace in traces] == list(range(1, client.steps + 1))
    assert {name for trace in traces for name in trace.preempted} == {"young/0"}
    assert {name for trace in traces for name in trace.returned} == {"young/0"}
    assert sorted(one for trace in traces for one in trace.ended) == [
        ("late/0", "stop"),
        ("old/0", "stop"),
        ("young/0", "stop"),
    ]
    assert ("late/0", "slots") in traces[0].waiting
    for trace in traces:
        assert trace.rows == sum(step.stop - step.start for step in trace.requests)
        assert trace.seconds > 0
    assert traces[-1].free_blocks == 3


def test_traces_are_json_lines_in_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    engine = core(chunk=40, trace_steps=3, trace_file=str(file))
    client = traffic(engine, seed=5)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, client.steps + 1))
    kept = [json.loads(json.dumps(trace.to_json())) for trace in engine.traces.newest()]
    assert lines[-3:] == kept
    assert len(kept) == 3
    scored = sum(step["counts"]["index_scored"] for line in lines for step in line["requests"])
    assert scored == sum(one.work.index_scored for choices in client.results.values() for one in choices.values())
    engine.close()


def test_traces_change_no_answer(tmp_path: Path) -> None:
    told = []
    for options in ({"trace_steps": 0}, {"trace_steps": 50, "trace_file": str(tmp_path / "steps.jsonl")}):
        engine = core(chunk=40, **options)
        results = traffic(engine, seed=6).results
        told.append({(name, choice): said(one) for name, choices in results.items() for choice, one in choices.items()})
        engine.close()
    assert told[0] == told[1]
    quiet = core(trace_steps=0)
    answer(quiet, prompt(5), params())
    assert quiet.traces.newest() == []
