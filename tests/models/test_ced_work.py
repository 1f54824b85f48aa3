"""What the two prefill modes really compute: layer-rows, producer rows and index scores, counted and checked.

The model has the released layer plan (40 layers, window 128) at tiny widths. Counters are held against formulas of the
plan, and against what other eyes see: a probe at every layer, and the index keys that are read from the stores.
"""

from collections import Counter

import numpy as np
import pytest
from torch import Tensor

from headrace.cache.global_store import GlobalStore
from headrace.core.chunk_plan import plan_chunks
from headrace.models.deepseek_v41.batch import Mode, Rows, Span, Work
from headrace.models.deepseek_v41.load import load_model
from headrace.models.deepseek_v41.model import DeepseekV41
from tests.factories import tiny_checkpoint, tiny_config
from tests.release import TEXT

NUM_LAYERS, CUT, WINDOW = 40, 20, 128
TOP_K, POOL_BLOCKS, BLOCK = 16, 4, 8
MODES: tuple[Mode, ...] = ("full", "replay")
PLAN = (
    "num_hidden_layers",
    "sliding_window",
    "kv_source_layer_ids",
    "index_source_layer_ids",
    "candidate_source_layer_id",
    "engram_layer_ids",
)
SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "head_dim": 32,
    "o_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "index_n_heads": 1,
    "index_topk": TOP_K,
    "candidate_topk_blocks": POOL_BLOCKS,
    "candidate_block_size": BLOCK,
    "max_position_embeddings": 16384,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV41:
    plan = {name: TEXT[name] for name in PLAN} | {"compress_ratios": TEXT["compress_ratios"][:NUM_LAYERS]}
    config = tiny_config(2, vision=False, draft=False, **plan, **SMALL)
    return load_model(tiny_checkpoint(tmp_path_factory.mktemp("plan"), config)).model


class RowCounter:
    """Probe that counts the rows entering each layer."""

    def __init__(self) -> None:
        self.rows: Counter[int] = Counter()
        self.produced = 0

    def layer_input(self, layer_id: int, rows: Rows, x_TMD: Tensor, pre_TM: Tensor) -> tuple[Tensor, Tensor]:
        self.rows[layer_id] += len(x_TMD)
        return x_TMD, pre_TM

    def producer_input(self, layer_id: int, rows: Rows, x_TMD: Tensor, pre_TM: Tensor) -> tuple[Tensor, Tensor]:
        assert layer_id == CUT
        self.produced += len(x_TMD)
        return x_TMD, pre_TM

    def record(self, *_: object) -> None:
        pass

    def record_selection(self, *_: object) -> None:
        pass


def prefill(model: DeepseekV41, num_tokens: int, mode: Mode, chunk: int) -> tuple[Work, RowCounter]:
    """Read a random prompt in chunks."""
    ids = np.random.default_rng(0).integers(0, 256, num_tokens)
    work, seen, state, low = Work(), RowCounter(), model.new_state(), 0
    sizes = plan_chunks(num_tokens, chunk, WINDOW if mode == "replay" else 1)
    for place, size in enumerate(sizes):
        is_last = place == len(sizes) - 1
        rows = size if mode == "full" else min(WINDOW, num_tokens) if is_last else 0
        span = Span(state, ids[low : low + size], rows, is_replay=mode == "replay" and is_last)
        model.forward([span], work=work, probe=seen)
        low += size
    assert state.length == num_tokens
    return work, seen


def visible(num_tokens: int, ratio: int, first: int = 0) -> np.ndarray:
    return (np.arange(first, num_tokens) + 1) // ratio


def expected_scores(num_tokens: int, mode: Mode) -> dict[int, int]:
    """Count by the rules of selection: rows that see few entries take all of them without a score."""
    first = 0 if mode == "full" else max(0, num_tokens - WINDOW)
    scores = {}
    for layer_id in TEXT["index_source_layer_ids"]:
        ratio = TEXT["compress_ratios"][layer_id]
        seen = visible(num_tokens, ratio, first if layer_id >= CUT else 0)
        scored = seen.copy()
        if layer_id > CUT:  # with a full pool: whole blocks, but for the newest, which may have just begun
            pooled = (POOL_BLOCKS - 1) * BLOCK + (seen - 1) % BLOCK + 1
            scored = np.where(seen > POOL_BLOCKS * BLOCK, pooled, seen)
        total = int(scored[seen > TOP_K].sum())
        if total:
            scores[layer_id] = total
    return scores


def check(model: DeepseekV41, num_tokens: int, mode: Mode, chunk: int) -> Work:
    """Prefill and hold every counter against its formula; return the counters."""
    work, seen = prefill(model, num_tokens, mode, chunk)
    tail = num_tokens if mode == "full" else min(WINDOW, num_tokens)
    assert work.layer_rows == CUT * num_tokens + (NUM_LAYERS - CUT) * tail
    assert work.producer_rows == num_tokens - tail
    assert work.replayed_rows == (0 if mode == "full" else tail)
    assert seen.rows == {layer: num_tokens if layer < CUT else tail for layer in range(NUM_LAYERS)}
    assert num_tokens - tail <= seen.produced <= num_tokens
    assert work.index_scored_by_layer == expected_scores(num_tokens, mode)
    assert work.index_scored == sum(expected_scores(num_tokens, mode).values())
    return work


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_tokens", "chunk"), [(100, 4096), (128, 4096), (300, 4096), (300, 64)])
def test_prefill_computes_exactly_the_rows_and_scores_of_its_mode(
    model: DeepseekV41, mode: Mode, num_tokens: int, chunk: int
) -> None:
    check(model, num_tokens, mode, chunk)


def test_layer_rows_of_a_short_prompt(model: DeepseekV41) -> None:
    full, replay = (check(model, 300, mode, 4096) for mode in MODES)
    assert (full.layer_rows, full.producer_rows) == (12_000, 0)
    assert (replay.layer_rows, replay.producer_rows) == (8_560, 172)


@pytest.mark.full
def test_layer_rows_of_ten_thousand_tokens(model: DeepseekV41) -> None:
    full, replay = (check(model, 10_000, mode, 1024) for mode in MODES)
    assert (full.layer_rows, full.producer_rows) == (400_000, 0)
    assert (replay.layer_rows, replay.producer_rows) == (202_560, 9_872)


def test_decoded_tokens_run_all_layers_once(model: DeepseekV41) -> None:
    span = Span(model.new_state(), np.arange(200), WINDOW, is_replay=True)
    model.forward([span])
    work = Work()
    for token_id in range(3):
        model.forward([Span(span.state, np.array([token_id]), 1)], work=work)
    assert (work.layer_rows, work.producer_rows, work.replayed_rows) == (3 * NUM_LAYERS, 0, 0)


def test_a_batch_counts_the_rows_of_all_its_sequences(model: DeepseekV41) -> None:
    work = Work()
    spans = [
        Span(model.new_state(), np.arange(200), WINDOW, is_replay=True),
        Span(model.new_state(), np.arange(50), 0),
        Span(model.new_state(), np.arange(30), 30),
    ]
    model.forward(spans, work=work)
    assert work.layer_rows == CUT * 280 + (NUM_LAYERS - CUT) * 158
    assert (work.producer_rows, work.replayed_rows) == (122, WINDOW)


def test_reindex_layers_read_only_candidate_keys(model: DeepseekV41, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are counted where they leave the store, whatever the counters say."""
    ranges: Counter[int] = Counter()
    gathered: list[tuple[int, ...]] = []
    read, gather = GlobalStore.index_keys, GlobalStore.gather_index_keys

    def reading(store: GlobalStore, low: int, high: int) -> Tensor:
        ranges[store.ratio] += high - low
        return read(store, low, high)

    def gathering(store: GlobalStore, rows_TK: Tensor) -> Tensor:
        gathered.append(tuple(rows_TK.shape))
        return gather(store, rows_TK)

    span = Span(model.new_state(), np.arange(300) % 256, WINDOW, is_replay=True)
    model.forward([span])
    monkeypatch.setattr(GlobalStore, "index_keys", reading)
    monkeypatch.setattr(GlobalStore, "gather_index_keys", gathering)
    work = Work()
    model.forward([Span(span.state, np.array([5]), 1)], work=work)
    assert ranges == {1: 301, 2: 3 * 150}  # the cut layer and the three encoder sources scan everything once
    pool = POOL_BLOCKS * BLOCK
    assert gathered == [(1, pool)] * 4  # layers 24, 28, 32 and 36
    newest = (301 - 1) % BLOCK + 1
    assert [work.index_scored_by_layer[i] for i in (20, 24, 28, 32, 36)] == [301, *[pool - BLOCK + newest] * 4]


def test_scores_of_reindex_layers_do_not_grow_with_the_context(model: DeepseekV41) -> None:
    longer, shorter = (expected_scores(n, "replay") for n in (10_000, 1_000))
    assert longer[24] == shorter[24]
    assert longer[20] > 9 * shorter[20]
    work, _ = prefill(model, 700, "replay", 4096)
    assert work.index_scored_by_layer[24] == expected_scores(1_212, "replay")[24]  # 512 more: the same place in a block


def test_memory_of_the_caches_is_what_the_plan_says(model: DeepseekV41) -> None:
    span = Span(model.new_state(), np.arange(300) % 256, WINDOW, is_replay=True)
    model.forward([span])
    row_bytes = 32 // 2 + 32 // 16 + 32 // 2 + 32 // 32
    assert span.state.global_bytes == row_bytes * (3 * 150 + 300)
    assert all(ring.nbytes == 2 * WINDOW * (32 + 32 // 32) for ring in span.state.rings)
