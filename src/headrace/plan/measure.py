"""Run a model and set its counters beside the arithmetic on its configuration.

The engine runs in a process of its own, so nothing here loads torch. Its counters are arithmetic on the positions that
were really computed; tests hold them against what the model and its stores count
(`tests/models/test_ced_work.py`, `tests/engine/core/test_trace.py`). Blocks are measured where they lie: bytes of the
pool over the tokens that it holds.
"""

from pathlib import Path
from random import Random
from typing import Literal

from headrace.core.errors import UserError
from headrace.engine.core.trace import RowCounts
from headrace.engine.llm import LLM
from headrace.engine.sampling.params import SamplingParams
from headrace.plan.facts import Facts
from headrace.plan.families import read_model
from headrace.plan.ledger import arithmetic
from headrace.plan.ledger.figure import Live
from headrace.plan.work import RATES, decode_flops

DEFAULT_TOKENS = 10_000
_SUFFIX = 32  # new tokens behind a cached prompt
_LOWEST_ID = 3  # below lie the ids that begin, end and pad
_SEED = 0


def measure(path: Path, tokens: int) -> dict[str, Live]:
    """Read prompts of `tokens` tokens in both modes, decode behind them, and come back to one without its windows.

    Returns:
        Measured figures by the ledger's keys.

    Raises:
        UserError: the model is refused, or a prompt so long or so short cannot be measured.
    """
    facts = read_model(str(path))
    low = 2 * facts.window_tokens
    high = facts.max_positions - _SUFFIX - 2
    if facts.encoder_layers is None or not low < tokens <= high:
        raise UserError(f"--tokens is {tokens}; {low + 1} to {high} are accepted for {path}.", param="tokens")
    with LLM(path, resume="replay", snapshot_bytes=0, drafting="off", trace_steps=100_000) as llm:
        run = _Run(llm, tokens + _SUFFIX)
        full = run.prompt(tokens, "full", "full")
        short = run.prompt(low, "replay", "short")
        replay = run.prompt(tokens, "replay", "long")
        again = run.prompt(tokens + _SUFFIX, "replay", "long")
        block_bytes = llm.memory_plan["block_bytes"]
    return {
        **_prefill(facts, tokens, full["prefill"], replay["prefill"], block_bytes),
        **_decode(facts, (low, short["decode"]), (tokens, replay["decode"])),
        **_resume(facts, again["prefill"]),
    }


class _Run:
    """Runs requests and adds up what their steps counted. Token ids are drawn once, so longer prompts begin alike."""

    def __init__(self, llm: LLM, tokens: int) -> None:
        self._llm = llm
        random = Random(_SEED)
        self._ids = [random.randrange(_LOWEST_ID, llm.config.vocab_size) for _ in range(tokens)]

    def prompt(self, tokens: int, mode: Literal["full", "replay"], salt: str) -> dict[str, RowCounts]:
        """Read a prompt and decode one token behind it; cached are prompts of the same salt only."""
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, mode=mode, cache_salt=salt)
        last = max((trace.step for trace in self._llm.traces()), default=-1)
        self._llm.generate(self._ids[:tokens], params)
        counts = {"prefill": RowCounts(), "decode": RowCounts()}
        for trace in self._llm.traces():
            for step in trace.requests if trace.step > last else ():
                counts[step.kind].add(step.counts)
        return counts


def _prefill(facts: Facts, tokens: int, full: RowCounts, replay: RowCounts, block_bytes: int) -> dict[str, Live]:
    window, kv = full.window_bytes_written, full.global_bytes_written
    per_token = float(arithmetic.window_bytes_per_token(facts)) * facts.num_layers / facts.window_layers
    return {
        "prefill-saving": Live(
            what=f"prefill of {tokens:,} tokens, full over replay",
            arithmetic=arithmetic.prefill_saving(facts, tokens),
            measured=full.layer_rows / replay.layer_rows,
            how=f"layer_rows {full.layer_rows:,} / {replay.layer_rows:,}",
        ),
        "deepseek-v4.1-flash-kv-per-token": Live(
            what="bytes of global KV per token",
            arithmetic=facts.kv_bytes(tokens) / tokens,
            measured=replay.global_bytes_written / tokens,
            how=f"global_bytes_written {replay.global_bytes_written:,} / {tokens:,}; a block of the pool has "
            f"{block_bytes:,} bytes",
        ),
        "window-over-entries": Live(
            what="windows of every token over global KV",
            arithmetic=per_token * tokens / facts.kv_bytes(tokens),
            measured=window / kv,
            how=f"window_bytes_written {window:,} / global_bytes_written {kv:,}: index keys included, drafts not",
        ),
        "ngram-rows": Live(
            what="n-gram rows read per token, kB",
            arithmetic=arithmetic.ngram_bytes_per_token(facts) / 1e3,
            measured=replay.ngram_bytes / tokens / 1e3,
            how=f"ngram_bytes {replay.ngram_bytes:,} / {tokens:,}",
        ),
    }


def _decode(facts: Facts, short: tuple[int, RowCounts], long: tuple[int, RowCounts]) -> dict[str, Live]:
    """Compare decode steps; the token that was decoded makes a sequence one longer than its prompt."""
    (low, few), (high, many) = short, long
    context = high + 1
    ratio = _measured_flops(facts, many) / _measured_flops(facts, few)
    saved = 100 * many.index_skipped / (many.index_scored + many.index_skipped)
    return {
        "decode-growth": Live(
            what=f"decode FLOPs, {context:,} over {low + 1:,} tokens",
            arithmetic=arithmetic.decode_growth(facts, low + 1, context),
            measured=ratio,
            how=f"index_scored {few.index_scored:,} and {many.index_scored:,}, rows by bytes, weights by arithmetic",
        ),
        "index-saving": Live(
            what=f"index scores saved by the candidate pool at {context:,} tokens, %",
            arithmetic=arithmetic.index_saving(facts, context),
            measured=saved,
            how=f"index_skipped {many.index_skipped:,} of {many.index_scored + many.index_skipped:,}",
        ),
    }


def _measured_flops(facts: Facts, counts: RowCounts) -> float:
    """Turn what a decode step read and scored into operations, by the planner's cost of a row."""
    total = decode_flops(facts, 1).weights
    costs = {scan.name: (scan.row_bytes, scan.flops * RATES[scan.precision]) for scan in facts.scans}
    for name, count in (("window rows", counts.window_bytes), ("selected entries", counts.global_bytes)):
        row_bytes, cost = costs[name]
        total += count / row_bytes * cost
    return total + counts.index_scored * costs["index keys"][1]


def _resume(facts: Facts, prefill: RowCounts) -> dict[str, Live]:
    return {
        "deepseek-v4.1-flash-recompute": Live(
            what="tokens run again where windows are gone",
            arithmetic=arithmetic.recompute_tokens(facts, is_bounded=True),
            measured=prefill.reencoded_rows,
            how=f"reencoded_rows of a prompt whose windows are gone, resume=replay; exact would take "
            f"{arithmetic.recompute_tokens(facts):,}",
        )
    }
