"""The quantities that the ledger compares: functions of `Facts`, none of them a constant.

Each holds for any configuration of its family; `measure.py` applies the same functions to the model it runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from headrace.plan.facts import EXPERTS, Facts
from headrace.plan.work import decode_flops

GQA_KV_HEADS, GQA_HEAD_DIM = 8, 128
"""The reports' baseline: grouped-query attention with 8 heads of 128 in BF16, in as many layers as the model has."""


def decode_growth(facts: Facts, low: int, high: int) -> float:
    """Work of a decoded token at `high` tokens of context over that at `low`."""
    return decode_flops(facts, high).total / decode_flops(facts, low).total


def with_fp4_experts(facts: Facts) -> Facts:
    """Return the same model with its experts' products counted at the FP4 rate: the other reading of the reports."""
    weights = tuple(replace(part, precision="fp4") if part.kind == EXPERTS else part for part in facts.weights)
    return replace(facts, weights=weights)


def prefill_rows(facts: Facts, tokens: int, *, is_replay: bool) -> int:
    """Layer-rows of a prompt: all layers on all tokens, or in replay the decoder on the last window only."""
    if not is_replay or facts.encoder_layers is None:
        return facts.num_layers * tokens
    tail = min(facts.window_tokens, tokens)
    return facts.encoder_layers * tokens + (facts.num_layers - facts.encoder_layers) * tail


def prefill_saving(facts: Facts, tokens: int) -> float:
    """Layer-rows of a full prefill over those of a replayed one."""
    return prefill_rows(facts, tokens, is_replay=False) / prefill_rows(facts, tokens, is_replay=True)


def entry_bytes_per_token(facts: Facts) -> Fraction:
    """Global KV bytes per token without index keys."""
    return sum((part.bytes_per_token for part in facts.growing if part.name != "index keys"), Fraction(0))


def window_bytes_per_token(facts: Facts) -> Fraction:
    """Window bytes that a token writes in all layers that have a window."""
    return Fraction(facts.window_bytes, facts.window_tokens) if facts.window_tokens else Fraction(0)


def recompute_tokens(facts: Facts, *, is_bounded: bool = False) -> int:
    """Tokens to run again where no window is stored: a window per layer for exact ones, one in bounded replay."""
    return facts.window_tokens * (1 if is_bounded else facts.num_layers)


def index_scores(facts: Facts, context: int, *, has_pool: bool = True) -> int:
    """Index scores of one decoded token; without the candidate pool every selecting layer scores all entries."""
    scans = [scan for scan in facts.scans if scan.name.startswith("index keys")]
    if not has_pool:
        scans = [replace(scan, limit=None, pool_block=0) for scan in scans]
    return sum(scan.layers * scan.rows(context) for scan in scans)


def index_saving(facts: Facts, context: int) -> float:
    """Share of a decoded token's index scores that the candidate pool saves, in percent."""
    return 100 * (1 - index_scores(facts, context) / index_scores(facts, context, has_pool=False))


def ngram_bytes_per_token(facts: Facts) -> int:
    """Bytes of n-gram rows that a token reads."""
    return sum(table.rows_per_token * table.row_bytes for table in facts.tables)


Pass = tuple[str, int, int]
"""What a pass is for, vectors read, vectors written; a vector is one stream's `hidden_size` values of one token."""


def stream_passes(streams: int, *, is_single_pass: bool) -> Sequence[Pass]:
    """List the passes over the residual streams around one half layer.

    With coefficients of the streams as they are now (V4), each step is a pass of its own. Where the read coefficients
    come from the half before (single pass, V4.1), writing the last half's output, computing the next coefficients,
    collapsing and normalising happen while the streams pass once.
    """
    if is_single_pass:
        return (("expand, coefficients, collapse and norm", streams + 1, streams + 1),)
    return (
        ("coefficients", streams, 0),
        ("collapse", streams, 1),
        ("norm", 1, 1),
        ("expand", streams + 1, streams),
    )


def stream_traffic(streams: int, *, is_single_pass: bool) -> int:
    """Vectors moved per half layer and token."""
    return sum(read + written for _, read, written in stream_passes(streams, is_single_pass=is_single_pass))
