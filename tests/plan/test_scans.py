"""Rows read per decoded token: the planner's rule against the engine's books, position by position."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cache.state_shape import StateShape
from headrace.engine.core.account import Accountant, Run
from headrace.models.deepseek_v41.config import Config, to_json
from headrace.models.deepseek_v41.plan import build_plan
from headrace.plan.facts import Facts, Scan
from headrace.plan.families import read, released
from headrace.plan.work import decode_flops, decode_reads
from tests.factories import tiny_config
from tests.traces import SHAPES


def accountant(config: Config, facts: Facts) -> Accountant:
    shape = StateShape(
        head_dim=config.head_dim,
        index_head_dim=config.index_head_dim,
        window=config.window,
        num_layers=config.num_layers,
        num_draft_layers=config.num_draft_layers,
        decoder_start=config.cut,
        source_ratios={plan.id: plan.ratio for plan in build_plan(config) if plan.role == "full"},
        lookback=2,
    )
    return Accountant(config, shape, sum(table.rows_per_token * table.row_bytes for table in facts.tables))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decoded_token_reads_what_the_engine_counts(shape: str) -> None:
    config = tiny_config(**SHAPES[shape])
    facts = read(to_json(config), shape)
    books = accountant(config, facts)
    for context in range(1, 200):
        counts = books.count(Run(start=context - 1, stop=context, decoder_rows=1))
        reads = decode_reads(facts, context)
        assert reads["window rows"] == counts.window_bytes
        assert reads["selected entries"] == counts.global_bytes
        index = sum(scan.layers * scan.rows(context) for scan in facts.scans if scan.name.startswith("index keys"))
        assert index == counts.index_scored
        assert sum(size for name, size in reads.items() if name.startswith("index keys")) == counts.index_bytes
        assert reads.get("n-gram tables", 0) == counts.ngram_bytes


@given(
    context=st.integers(1, 5000), ratio=st.integers(1, 130), limit=st.none() | st.integers(1, 600),
    free=st.integers(0, 600),
)  # fmt: skip
def test_a_scan_reads_no_more_than_there_is_and_no_more_than_its_limit(
    context: int, ratio: int, limit: int | None, free: int
) -> None:
    scan = Scan(name="rows", layers=1, ratio=ratio, row_bytes=1, flops=1, precision="bf16", limit=limit, free=free)
    rows = scan.rows(context)
    assert 0 <= rows <= context // ratio
    assert limit is None or rows <= limit
    assert rows == 0 if context // ratio <= free else rows > 0


def test_a_pool_counts_its_newest_block_only_as_far_as_it_is_filled() -> None:
    (pool,) = (scan for scan in released("deepseek-v4.1-flash").scans if scan.pool_block)
    assert [pool.rows(16_384 + extra) for extra in (0, 1, 7, 8, 9)] == [16_384, 16_377, 16_383, 16_384, 16_377]
    assert pool.rows(1 << 20) == 16_384


def test_reads_per_token_at_a_million_are_those_of_the_cost_model() -> None:
    """serving.md section 3.4."""
    reads = decode_reads(released("deepseek-v4.1-flash"), 1 << 20)
    assert reads["index keys"] == (102 + 68) * (1 << 20)
    assert reads["index keys of the candidate pool"] == 4 * 16_384 * 68
    assert reads["selected entries"] == 38 * 512 * 288
    assert reads["window rows"] == 40 * 128 * 528


def test_more_sequences_share_weights_but_not_their_own_rows() -> None:
    facts = released("deepseek-v4.1-flash")
    one, many = (decode_reads(facts, 4096, sessions) for sessions in (1, 50))
    assert many["attention"] == one["attention"]
    assert one["routed experts"] < many["routed experts"] < 50 * one["routed experts"]
    assert many["routed experts"] < facts.num_bytes("routed experts")
    assert many["selected entries"] == 50 * one["selected entries"]
    assert decode_reads(facts, 4096, 10**6)["embedding"] == facts.num_bytes("embedding")


def test_flops_of_v41_are_the_terms_of_the_specification() -> None:
    """serving.md section 9: weights 18.27 G, attention 3.22 G, owners 5,120 N and the pool beside them."""
    facts = released("deepseek-v4.1-flash")
    flops = decode_flops(facts, 1 << 20)
    assert round(flops.weights / 1e9, 2) == 18.27
    assert round(flops.attention / 1e9, 2) == 3.22
    assert round(flops.index - 5_120 * (1 << 20)) == 4 * 16_384 * 32 * 128 * 2 // 4
