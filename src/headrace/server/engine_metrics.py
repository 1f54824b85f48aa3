"""The engine's status and totals under the names that dashboards read, and under new ones for what is new here.

Gauges are the engine's own books at the time of asking; counters go on over a restart of its process.
"""

import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.engine.core.totals import ROW_BOUNDS, Totals
from headrace.memory.row_counts import RowReads

Labelled = dict[tuple[str, ...], float]

_NGRAM_COUNTS: tuple[tuple[str, str, Callable[[RowReads], float]], ...] = (
    ("ngram_rows_requested", "Rows of n-gram tables that tokens asked for.", lambda reads: reads.requested),
    ("ngram_rows_unique", "Those, each counted once a batch.", lambda reads: reads.unique),
    ("ngram_rows_hit", "Those kept in the row cache or asked for twice in a batch.", lambda reads: reads.hits),
    ("ngram_rows_read", "Those that came from the table.", lambda reads: reads.read),
    ("ngram_rows_unused", "Those of tokens that were announced and never ran.", lambda reads: reads.unused),
    ("ngram_read_bytes", "Bytes of the rows that came from the table.", lambda reads: reads.read_bytes),
    ("ngram_wait_seconds", "Seconds that layers stood still for rows.", lambda reads: reads.wait_s),
)


_DRAFT_TEXTS = {
    "mean_accepted": "Drafted tokens that stayed a round.",
    "calibration_error": "Calibration error of the newest drafted tokens.",
    "calibration_guesses": "Drafted tokens that it is of.",
    "rates": "Tokens per second lately, by requests in a step and whether it drafted.",
    "paused": "Whether steps of so many requests go without drafts.",
    "probes": "Times that a single step with drafts was tried.",
    "pauses": "Times that drafting was paused.",
}


@dataclass(frozen=True)
class _Family:
    """One metric: its name, what it says, the names of its labels beside the model's, and values by those."""

    name: str
    text: str
    labels: tuple[str, ...]
    values: Mapping[Any, float]


class EngineMetrics(Collector):
    """Turns what the engine told last into metrics."""

    def __init__(self, model_name: str) -> None:
        self._name = model_name
        self._status: dict[str, int] | None = None
        self._pid: int | None = None
        self._before, self._newest = Totals(), Totals()
        self._restarts = self._evicted = self._evicted_before = 0

    def hear(self, told: tuple[dict[str, int], Totals] | None, restarts: int) -> None:
        """Take the engine's status and totals, None where it does not answer, and how often it was started again."""
        self._restarts = restarts
        self._status = None if told is None else told[0]
        if told is None:
            return
        status, totals = told
        if self._pid is not None and status["pid"] != self._pid:
            self._before.add(self._newest)
            self._evicted_before = self._evicted
        self._pid, self._newest = status["pid"], totals
        self._evicted = self._evicted_before + status["evicted_blocks"] * status["block_tokens"]

    def collect(self) -> Iterable[Metric]:
        """Return every metric."""
        totals = Totals()
        totals.add(self._before)
        totals.add(self._newest)
        status = self._status
        guard = _guard(status, self._newest)
        for family in [*_requests(status), *_memory(status), *_tiers(status), *guard, *self._up()]:
            gauge = GaugeMetricFamily(family.name, family.text, labels=["model_name", *family.labels])
            for labels, value in family.values.items():
                gauge.add_metric([self._name, *labels], value)
            yield gauge
        for family in [*_prompts(totals), *_work(totals), *_ngrams(totals), *_drafts(totals), *self._engine(totals)]:
            counter = CounterMetricFamily(family.name, family.text, labels=["model_name", *family.labels])
            for labels, value in family.values.items():
                counter.add_metric([self._name, *labels], value)
            yield counter
        yield self._rows(totals)

    def _up(self) -> Iterator[_Family]:
        yield _one("headrace:engine_up", "Whether the engine answered.", int(self._status is not None))
        yield _one("headrace:server_resident_bytes", "Memory of the server's process.", _resident_bytes())

    def _engine(self, totals: Totals) -> Iterator[_Family]:
        yield _one("headrace:engine_restarts", "Engine processes that were started after the first.", self._restarts)
        yield _one("headrace:engine_steps", "Steps with rows.", totals.steps)
        yield _one("headrace:engine_step_seconds", "Seconds in such steps.", totals.step_seconds)
        yield _one("headrace:evicted_tokens", "Cached tokens forgotten for others.", self._evicted)
        yield _one("vllm:num_preemptions", "Requests moved to host memory for others.", totals.preemptions)
        yield _one("headrace:returns", "Requests brought back from host memory.", totals.returns)
        yield _one("vllm:corrupted_requests", "Requests that met a damaged row or no finite logit.", totals.failed)

    def _rows(self, totals: Totals) -> HistogramMetricFamily:
        found = HistogramMetricFamily("vllm:iteration_tokens_total", "Rows of a step.", labels=["model_name"])
        count, buckets = 0, []
        for bound in ROW_BOUNDS:
            count += totals.rows[bound]
            buckets.append((str(float(bound)), float(count)))
        buckets.append(("+Inf", float(totals.rows.total())))
        found.add_metric([self._name], buckets, totals.row_sum)
        return found


def _one(name: str, text: str, value: float) -> _Family:
    return _Family(name, text, (), {(): value})


def _requests(status: dict[str, int] | None) -> Iterator[_Family]:
    if status is None:
        return
    running = status["prefill"] + status["decode"] + status["forking"]
    yield _one("vllm:num_requests_running", "Answers that are generated now.", running)
    yield _one("vllm:num_requests_waiting", "Requests that wait for their first step.", status["queued"])
    yield _one("vllm:num_requests_swapped", "Answers whose state is in host memory.", status["swapped"])
    phases = {(name,): float(status[name]) for name in ("queued", "forking", "prefill", "decode", "swapped")}
    yield _Family("headrace:requests", "Answers by phase.", ("phase",), phases)
    yield _one("headrace:slots_free", "Answers that could start beside those.", status["free_slots"])


def _memory(status: dict[str, int] | None) -> Iterator[_Family]:
    if status is None:
        return
    total, free = status["num_blocks"], status["free_blocks"]
    loose = status["evictable_blocks"]
    used = (total - free - loose) / total if total else 0.0
    yield _one("vllm:kv_cache_usage_perc", "Share of blocks that requests hold; cached ones count as free.", used)
    blocks = {("total",): total, ("free",): free, ("cached",): status["cached_blocks"], ("evictable",): loose}
    yield _Family("headrace:blocks", "Blocks by state; cached ones may be in use too.", ("state",), blocks)
    yield _one("headrace:block_bytes", "Bytes of one block.", status["block_bytes"])
    yield _one("headrace:window_snapshots", "Window states kept for reuse.", status["snapshots"])
    yield _one("headrace:window_snapshot_bytes", "Their bytes.", status["snapshot_bytes"])
    yield _one("headrace:host_bytes", "Bytes of answers in host memory.", status["host_bytes"])
    memory = {(name,): float(status[f"{name}_bytes"]) for name in ("planned", "resident", "peak")}
    yield _Family("headrace:engine_memory_bytes", "Memory of the engine's process.", ("kind",), memory)


def _tiers(status: dict[str, int] | None) -> Iterator[_Family]:
    """Yield what rests in host memory and on disk, where an engine was told to keep anything there."""
    named = {} if status is None else status
    for tier in ("host", "disk"):
        start = f"{tier}_tier_"
        found = {key.removeprefix(start): float(value) for key, value in named.items() if key.startswith(start)}
        if not found:
            continue
        incidents: Labelled = {
            (key.removeprefix("incident_"),): value for key, value in found.items() if "incident_" in key
        }
        rest: Labelled = {(key,): value for key, value in found.items() if "incident_" not in key}
        yield _Family(f"headrace:cache_{tier}", f"The cache's {tier} tier: records, bytes, seconds.", ("what",), rest)
        yield _Family(f"headrace:cache_{tier}_incidents", "Harm found and survived.", ("kind",), incidents)


def _prompts(totals: Totals) -> Iterator[_Family]:
    hits = totals.cached_tokens
    by_source: Labelled = {("device",): 0.0, **{(source,): float(count) for source, count in hits.items()}}
    yield _one("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", totals.queried_tokens)
    yield _one("vllm:prefix_cache_hits", "Prompt tokens found there.", hits.total())
    yield _one("vllm:prompt_tokens", "Prompt tokens read or found.", totals.prompt_tokens)
    yield _Family("vllm:prompt_tokens_cached", "Prompt tokens found, by where they lay.", ("source",), by_source)
    yield _one("vllm:generation_tokens", "Generated tokens.", totals.generated_tokens)
    reasons: Labelled = {(reason,): float(count) for reason, count in totals.cut_short.items()}
    yield _Family(
        "headrace:prefix_cut_short", "Requests that found less than their whole prompt, by why.", ("reason",), reasons
    )
    yield _one("headrace:approximate_requests", "Requests with windows rebuilt by replay.", totals.approximate)


def _work(totals: Totals) -> Iterator[_Family]:
    counts = totals.counts
    halves: Labelled = {("encoder",): totals.encoder_rows, ("decoder",): totals.decoder_rows}
    replayed: Labelled = {
        ("encoder", "windows of cached tokens"): counts.reencoded_rows,
        ("decoder", "end of a prompt"): totals.replayed_rows,
    }
    read: Labelled = {(name,): getattr(counts, f"{name}_bytes") for name in ("global", "index", "window", "ngram")}
    written: Labelled = {(name,): getattr(counts, f"{name}_bytes_written") for name in ("global", "window")}
    yield _Family("headrace:rows", "Tokens that ran through either half of the layers.", ("half",), halves)
    yield _Family("headrace:replay_rows", "Tokens that ran there again, by why.", ("half", "cause"), replayed)
    yield _one("headrace:layer_rows", "Layers times tokens.", counts.layer_rows)
    yield _one("headrace:producer_rows", "Tokens on which only the decoder's producer ran.", counts.producer_rows)
    yield _one("headrace:index_positions_scored", "Entries that an index scored.", counts.index_scored)
    yield _one("headrace:index_positions_skipped", "Visible entries that no index scored.", counts.index_skipped)
    yield _Family("headrace:read_bytes", "Bytes read, by kind of memory.", ("kind",), read)
    yield _Family("headrace:written_bytes", "Bytes written, by kind of memory.", ("kind",), written)


def _ngrams(totals: Totals) -> Iterator[_Family]:
    for name, text, count in _NGRAM_COUNTS:
        values = {(str(layer_id),): float(count(reads)) for layer_id, reads in totals.ngram.layers.items()}
        yield _Family(f"headrace:{name}", text, ("layer",), values)


def _drafts(totals: Totals) -> Iterator[_Family]:
    taken: Labelled = {(str(place),): float(count) for place, count in sorted(totals.accepted_by_position.items())}
    lengths: Labelled = {(str(length),): float(count) for length, count in sorted(totals.verify_lengths.items())}
    yield _one("vllm:spec_decode_num_drafts", "Rounds with drafts.", totals.drafts)
    yield _one("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", totals.drafted_tokens)
    yield _one("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were taken.", totals.accepted_tokens)
    yield _Family(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "Those by position in the draft.", ("position",), taken
    )
    yield _Family(
        "headrace:draft_rounds", "Decode rows by drafted tokens verified behind them.", ("verified",), lengths
    )


def _guard(status: dict[str, int] | None, totals: Totals) -> Iterator[_Family]:
    """Yield what drafting gains or costs now; without values where that was not measured or nothing drafts."""
    named = {} if status is None else status
    one = {
        "mean_accepted": None if status is None else totals.mean_accepted,
        "calibration_error": named.get("draft_calibration_error"),
        "calibration_guesses": named.get("draft_calibration_guesses"),
    }
    for name, value in one.items():
        yield _Family(f"headrace:draft_{name}", _DRAFT_TEXTS[name], (), {} if value is None else {(): value})
    batches: dict[str, Labelled] = {}
    for key, number in named.items():
        if key.startswith("draft_batch_"):
            batch, what = key.removeprefix("draft_batch_").split("_")
            batches.setdefault(what, {})[(batch,)] = float(number)
    rates = {(batch, way): rate for way in ("with", "without") for (batch,), rate in batches.get(way, {}).items()}
    yield _Family("headrace:draft_tokens_per_second", _DRAFT_TEXTS["rates"], ("batch", "drafts"), rates)
    for name in ("paused", "probes", "pauses"):
        yield _Family(f"headrace:draft_{name}", _DRAFT_TEXTS[name], ("batch",), batches.get(name, {}))


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()
