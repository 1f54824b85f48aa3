"""Every operation gives a row the same bits alone, in any piece and with any number of threads.

Small widths hide the difference in library products, so each operation also runs at the released widths: a few row
counts by default, all of them and three threads under the marker `full`.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from headrace.kernels.activation import sigmoid, silu, softplus
from headrace.kernels.block_quant import fake_q8
from headrace.kernels.compress_pool import pool_pairs
from headrace.kernels.grouped_experts import Expert, PackedExperts, PackedMatrix, routed_experts, shared_expert
from headrace.kernels.index_topk import IndexQuery, index_scores, rescan, scan
from headrace.kernels.ngram_gate import inject
from headrace.kernels.product import grouped_linear, linear, linear_fp32, pad_columns
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.rope import plain_frequencies, rotate, rotation, yarn_frequencies
from headrace.kernels.route_topk import Routes, route
from headrace.kernels.sinkhorn import sinkhorn
from headrace.kernels.sparse_attention import SelectedEntries, WindowKeys, attend
from headrace.kernels.stream_mix import Mixes, collapse, expand, mixes
from tests.kernels.rows import FEW, FULL_THREADS, TOTAL, Compute, differences, numbers

RELEASED_BF16 = [
    (1280, 4096), (1280, 32768), (2048, 4096), (2304, 5120), (4096, 1024), (8192, 5120), (5120, 1792), (5120, 4608)
]  # fmt: skip
RELEASED_FP32 = [(20480, 24), (5120, 384), (5120, 512), (5120, 4096)]  # the last: a slice of the vocabulary head
SMALL = [(64, 96), (96, 40), (32, 33), (100, 7), (33, 5), (256, 24), (1024, 15)]


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# ----------------------------------------------------------------------------------------------------------- products


def product(width: int, columns: int) -> Compute:
    x, weight = numbers(TOTAL, width), numbers(columns, width)
    return lambda rows: linear(x[rows], weight)


def product_fp32(width: int, columns: int) -> Compute:
    x, weight = numbers(TOTAL, width), pad_columns(numbers(columns, width))
    return lambda rows: linear_fp32(x[rows], weight, columns)


def grouped(groups: int, width: int, columns: int) -> Compute:
    x, weight = numbers(TOTAL, groups, width), numbers(groups, columns, width)
    return lambda rows: grouped_linear(x[rows], weight)


@pytest.mark.parametrize(("width", "columns"), SMALL)
@pytest.mark.parametrize("make", [product, product_fp32])
def test_products(make: "type[Compute]", width: int, columns: int) -> None:
    assert differences(make(width, columns), FULL_THREADS) == []


@pytest.mark.parametrize(("width", "columns"), RELEASED_BF16)
def test_products_at_released_widths(width: int, columns: int) -> None:
    assert differences(product(width, columns), FEW) == []


@pytest.mark.parametrize(("width", "columns"), RELEASED_FP32)
def test_float32_products_at_released_widths(width: int, columns: int) -> None:
    assert differences(product_fp32(width, columns), FEW) == []


def test_grouped_products() -> None:
    assert differences(grouped(2, 128, 48)) == []
    assert differences(grouped(3, 40, 9)) == []
    assert differences(grouped(8, 4096, 1024), FEW) == []


@pytest.mark.parametrize("width", [512, 640])
def test_products_with_many_rows(width: int) -> None:
    # blocks of a library change with hundreds of rows
    x, weight = numbers(700, width), numbers(72, width)
    wide = pad_columns(weight)
    compute = [lambda rows: linear(x[rows], weight), lambda rows: linear_fp32(x[rows], wide, 72)]
    for one in compute:
        assert differences(one, {1: (1, 8, 65, 128, 257, 512, 600), 2: (1, 512)}, total=700) == []


@pytest.mark.full
@pytest.mark.parametrize(("width", "columns"), RELEASED_BF16)
def test_products_at_released_widths_for_every_count(width: int, columns: int) -> None:
    assert differences(product(width, columns), FULL_THREADS) == []


@pytest.mark.full
@pytest.mark.parametrize(("width", "columns"), RELEASED_FP32)
def test_float32_products_at_released_widths_for_every_count(width: int, columns: int) -> None:
    assert differences(product_fp32(width, columns), FULL_THREADS) == []


# ------------------------------------------------------------------------------------------------------- row by row


def norm(width: int) -> Compute:
    x, weight = numbers(TOTAL, width), numbers(width).float()
    return lambda rows: rms_norm(x[rows], weight, 1e-20)


def rotary(rope_dim: int, heads: int, width: int, first: int) -> Compute:
    x, positions = numbers(TOTAL, heads, width), torch.arange(first, first + TOTAL)
    yarn = yarn_frequencies(rope_dim, 160000.0, factor=16.0, beta_fast=32.0, beta_slow=1.0, original_positions=65536)
    tables = [plain_frequencies(rope_dim, 10000.0), yarn]

    def compute(rows: slice) -> list[Tensor]:
        found = []
        for frequencies in tables:
            cos, sin = rotation(positions[rows], frequencies)
            found += [cos, sin, rotate(x[rows], cos, sin), rotate(x[rows], cos, sin, inverse=True)]
        return found

    return compute


def functions(width: int) -> Compute:
    x = numbers(TOTAL, width, dtype=torch.float32) * 8
    return lambda rows: [sigmoid(x[rows]), silu(x[rows]), softplus(x[rows])]


def pool(width: int) -> Compute:
    values, gates = numbers(TOTAL, 2, width).float(), numbers(TOTAL, 2, width).float() * 3
    return lambda rows: pool_pairs(values[rows], gates[rows])


@pytest.mark.parametrize("width", [1, 3, 5, 17, 32, 100, 512, 2304])
def test_functions_and_pooled_pairs(width: int) -> None:
    assert differences(functions(width)) == []
    assert differences(pool(width)) == []


@pytest.mark.parametrize("width", [32, 33, 96, 100, 512, 1280, 5120])
def test_norms(width: int) -> None:
    assert differences(norm(width)) == []


@pytest.mark.parametrize("first", [0, 5000, 1000003])
@pytest.mark.parametrize(("rope_dim", "heads", "width"), [(8, 3, 8), (16, 5, 24), (64, 1, 128), (2, 2, 5)])
def test_rotations(rope_dim: int, heads: int, width: int, first: int) -> None:
    assert differences(rotary(rope_dim, heads, width, first)) == []


def test_rotations_at_released_sizes() -> None:
    assert differences(rotary(64, 64, 512, 1000003), FEW) == []


# -------------------------------------------------------------------------------------------------- residual streams


def streams(count: int, width: int) -> Compute:
    x, out, base = numbers(TOTAL, count, width), numbers(TOTAL, width), numbers((2 + count) * count).float()
    fn = pad_columns(numbers((2 + count) * count, count * width).float() / (count * width) ** 0.5)
    scale, logits = torch.tensor([0.7, 1.1, 1.9]), numbers(TOTAL, count, count).float() * 2

    def compute(rows: slice) -> list[Tensor]:
        mix = mixes(x[rows], fn, base, scale, norm_eps=1e-20, iterations=20, eps=1e-6)
        return [
            mix.pre_TM,
            mix.post_TM,
            mix.comb_TMM,
            sinkhorn(logits[rows], 20, 1e-6),
            collapse(x[rows], mix.pre_TM),
            expand(out[rows], x[rows], mix),
            expand(out[rows], x[rows], Mixes(mix.pre_TM, mix.post_TM, logits[rows])),
        ]

    return compute


def memory(count: int, width: int) -> Compute:
    x, kv, dead = numbers(TOTAL, count, width), numbers(TOTAL, (count + 1) * width), torch.rand(TOTAL) < 0.2
    q_weight, k_weight = numbers(count, width).float(), numbers(count, width).float()
    return lambda rows: inject(x[rows], kv[rows], q_weight, k_weight, dead[rows], 1e-20)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_streams(count: int) -> None:
    assert differences(streams(count, 32)) == []
    assert differences(memory(count, 32)) == []
    assert differences(streams(count, 96), FEW) == []
    assert differences(memory(count, 100), FEW) == []


def test_streams_at_released_sizes() -> None:
    assert differences(streams(4, 5120), FEW) == []
    assert differences(memory(4, 5120), FEW) == []


@pytest.mark.full
def test_streams_at_released_sizes_for_every_count() -> None:
    assert differences(streams(4, 5120), FULL_THREADS) == []
    assert differences(memory(4, 5120), FULL_THREADS) == []


# ------------------------------------------------------------------------------------------------------------ experts


def packed(rows: int, width: int) -> PackedMatrix:
    scales = torch.randint(118, 124, (rows, width // 32), dtype=torch.uint8)
    return PackedMatrix(torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8), scales)


def routing(width: int, experts: int, count: int) -> Compute:
    x, gate, bias = numbers(TOTAL, width), pad_columns(numbers(experts, width)), numbers(experts).float() * 0.1

    def compute(rows: slice) -> list[Tensor]:
        routes = route(x[rows], gate, bias, count=count, scale=1.5)
        by_row = route(x[rows], gate, bias.expand(TOTAL, -1)[rows], count=count, scale=1.5)
        return [routes.experts_TK, routes.weights_TK, by_row.experts_TK, by_row.weights_TK]

    return compute


def mixture(width: int, hidden: int, experts: int, count: int) -> Compute:
    every = [Expert(packed(hidden, width), packed(hidden, width), packed(width, hidden)) for _ in range(experts)]
    held = PackedExperts(every)
    x = fake_q8(numbers(TOTAL, width))
    gate_up, down = numbers(2 * hidden, width), numbers(width, hidden)
    routes = route(x, pad_columns(numbers(experts, width)), torch.zeros(experts), count=count, scale=1.5)

    def compute(rows: slice) -> list[Tensor]:
        some = Routes(routes.experts_TK[rows], routes.weights_TK[rows], routes.scores_TE[rows])
        return [routed_experts(x[rows], some, held, 10.0), shared_expert(x[rows], gate_up, down, 10.0)]

    return compute


@pytest.mark.parametrize(("experts", "count"), [(8, 2), (5, 5), (17, 6), (383, 6), (385, 1)])
def test_routing(experts: int, count: int) -> None:
    assert differences(routing(96, experts, count)) == []


@pytest.mark.parametrize(("width", "hidden", "experts", "count"), [(96, 64, 8, 2), (32, 32, 4, 4), (256, 96, 6, 1)])
def test_experts(width: int, hidden: int, experts: int, count: int) -> None:
    assert differences(mixture(width, hidden, experts, count)) == []


def test_experts_at_released_sizes() -> None:
    assert differences(routing(5120, 384, 6), FEW) == []
    assert differences(mixture(5120, 2304, 3, 2), {1: (1, 9)}) == []


@pytest.mark.full
def test_experts_at_released_sizes_for_every_count() -> None:
    assert differences(routing(5120, 384, 6), FULL_THREADS) == []
    assert differences(mixture(5120, 2304, 8, 6)) == []


# ---------------------------------------------------------------------------------------------- attention and indexer


def attention(heads: int, width: int, window: int, slots: int, first: int, total: int = TOTAL) -> Compute:
    q, low = numbers(total, heads, width), max(0, first - window + 1)
    held, store = numbers(first + total - low, width), numbers(300, width)
    picked = torch.randint(-1, 300, (total, slots)).sort(1, descending=True).values
    sink = numbers(heads).float()

    def compute(rows: slice) -> Tensor:
        start, end = first + rows.start, first + rows.stop
        begin = max(low, start - window + 1)
        keys = WindowKeys(held[begin - low : end - low], begin, 0)
        selected = SelectedEntries(picked[rows], lambda rows_RK: store[rows_RK.clamp_min(0)]) if slots else None
        return attend(q[rows], start, keys, selected, sink, window=window, scale=width**-0.5)

    return compute


@pytest.mark.parametrize("first", [0, 37, 1000003])
@pytest.mark.parametrize(
    ("heads", "width", "window", "slots"),
    [(4, 64, 16, 0), (4, 64, 16, 8), (3, 32, 8, 0), (3, 32, 8, 5), (5, 24, 70, 1), (1, 40, 1, 3)],
)
def test_attention(heads: int, width: int, window: int, slots: int, first: int) -> None:
    assert differences(attention(heads, width, window, slots, first)) == []


def test_attention_over_many_tiles() -> None:
    pieces = {1: (1, 8, 64, 65, 200, 450), 2: (1, 200)}
    assert differences(attention(3, 32, 16, 5, 37, 450), pieces, 450) == []


def test_attention_at_released_sizes() -> None:
    assert differences(attention(64, 512, 128, 0, 100), FEW) == []
    assert differences(attention(64, 512, 128, 512, 1000003), {1: (1, 9)}) == []


@pytest.mark.full
@pytest.mark.parametrize("first", [0, 100, 1000003])
def test_attention_at_released_sizes_for_every_count(first: int) -> None:
    assert differences(attention(64, 512, 128, 512, first), FULL_THREADS) == []


def indexer(heads: int, width: int, keys: int, *, is_fp32: bool) -> Compute:
    weights = numbers(TOTAL, heads, dtype=torch.float32 if is_fp32 else torch.bfloat16)
    query = IndexQuery(numbers(TOTAL, heads, width), weights, torch.arange(keys - TOTAL, keys) + 1, is_fp32)
    stored = numbers(keys, width)
    blocks = torch.stack([torch.randperm(-(-keys // 4))[:5].sort().values for _ in range(TOTAL)])

    def compute(rows: slice) -> list[Tensor]:
        some = query.rows(rows.start, rows.stop)
        found = scan(some, lambda low, high: stored[low:high], top_k=7, candidate_blocks=4, block_size=4)
        assert found.blocks_TB is not None
        again = rescan(some, blocks[rows], lambda index: stored[index.clamp_min(0)], top_k=7, block_size=4)
        return [index_scores(some, stored), found.picked_TK, found.blocks_TB, again]

    return compute


@pytest.mark.parametrize("is_fp32", [False, True])
@pytest.mark.parametrize(("heads", "width", "keys"), [(3, 32, 200), (4, 32, 70), (5, 96, 129)])
def test_indexer(heads: int, width: int, keys: int, is_fp32: bool) -> None:
    assert differences(indexer(heads, width, keys, is_fp32=is_fp32)) == []


@pytest.mark.parametrize("is_fp32", [False, True])
def test_indexer_at_released_sizes(is_fp32: bool) -> None:
    assert differences(indexer(32, 128, 600, is_fp32=is_fp32), FEW) == []


@pytest.mark.full
@pytest.mark.parametrize("is_fp32", [False, True])
def test_indexer_at_released_sizes_for_every_count(is_fp32: bool) -> None:
    assert differences(indexer(32, 128, 4500, is_fp32=is_fp32), FULL_THREADS) == []


@pytest.mark.parametrize("is_fp32", [False, True])
def test_the_score_of_a_key_does_not_depend_on_the_keys_beside_it(is_fp32: bool) -> None:
    weights = numbers(9, 3, dtype=torch.float32 if is_fp32 else torch.bfloat16)
    query = IndexQuery(numbers(9, 3, 32), weights, torch.full((9,), 300), is_fp32)
    keys = numbers(300, 32)
    whole = index_scores(query, keys)
    for low, high in ((0, 1), (0, 64), (5, 70), (64, 128), (291, 300), (17, 300)):
        assert torch.equal(index_scores(query, keys[low:high]), whole[:, low:high])
