"""Qwen3.8-Next (`qwen4_exp`): tensors and state from a configuration, in the BF16 layout of the release.

Three of four layers are Gated DeltaNet with a recurrent state, the fourth is sparse attention with full-length keys and
values and pooled index keys. Source: qwen38-next.md sections 2, 3, 5, 6, 8 and 10.
"""

from collections.abc import Iterator
from fractions import Fraction
from math import isqrt
from typing import Any

from headrace.core.spec import TensorSpec
from headrace.models.deepseek_v41.config_fields import MAX_COUNT, Fields
from headrace.plan.facts import DRAFT, EXPERTS, TABLES, Facts, Fixed, Growing, Scan, Table, Tensors, group

MODEL_TYPE = "qwen4_exp"
_BF16, _FLOAT32 = 2, 4
_LINEAR, _SPARSE = "linear_attention", "full_attention"
_HIGHEST = {"num_hidden_layers": 512, "heads_per_ngram": 256, "ngram_size": 16}
_DILATION = 3  # of the n-gram convolution over tokens; fixed by the model (section 8.2)
_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim",
    "linear_conv_kernel_dim", "max_position_embeddings", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "hc_count", "hc_lowrank", "indexer_n_heads", "indexer_head_dim",
    "indexer_budget", "indexer_compress_ratio", "ple_embed_dim", "ple_conv_kernel_size", "ngram_size",
    "heads_per_ngram", "ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "split_ngram_parts",
)  # fmt: skip


def read(document: dict[str, Any], where: str) -> Facts:
    """Read a configuration.

    Raises:
        UserError: a key is missing or a value is refused.
    """
    root = Fields(document, where)
    root.constant("model_type", MODEL_TYPE)
    text = root.section("text_config")
    text.constant("tie_word_embeddings", False, default=False)
    text.constant("attention_bias", False, default=False)
    text.constant("indexer_kv_heads", 1)
    text.constant("dtype", "bfloat16", default="bfloat16")
    if root.has("quantization_config"):
        raise root.refuse("quantization_config", "the planner knows the BF16 layout of this family only")
    dims = {key: text.integer(key, high=_HIGHEST.get(key, MAX_COUNT)) for key in _KEYS}
    if dims["num_experts_per_tok"] > dims["num_experts"]:
        raise text.refuse("num_experts_per_tok", f"at most the {dims['num_experts']} experts there are is accepted")
    dims["drafts"] = text.integer("mtp_num_hidden_layers", low=0, high=8, default=0)
    kinds = document["text_config"].get("layer_types")
    layers = dims["num_hidden_layers"]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in {_LINEAR, _SPARSE} for kind in kinds):
        raise text.refuse("layer_types", f"a list of {layers} names, {_LINEAR} or {_SPARSE}, is accepted")
    dims["linear"], dims["sparse"] = kinds.count(_LINEAR), kinds.count(_SPARSE)
    places = text.integers("ple_layer_ids", low=1, high=layers, default=())
    heads = (dims["ngram_size"] - 1) * dims["heads_per_ngram"]
    if not heads:
        raise text.refuse("ngram_size", "2 or more is accepted")
    if dims["ple_embed_dim"] % heads:
        raise text.refuse("ple_embed_dim", f"a multiple of the {heads} hash heads is accepted")
    tables = _tables(dims, places)
    note = "the vision tower is not in the configuration and not counted"
    return Facts(
        name=where,
        model_type=MODEL_TYPE,
        max_positions=dims["max_position_embeddings"],
        num_layers=layers,
        streams=dims["hc_count"],
        hidden_size=dims["hidden_size"],
        experts=(dims["num_experts"], dims["num_experts_per_tok"]),
        weights=group(_tensors(dims, tables)),
        growing=_growing(dims),
        window_tokens=0,
        window=None,
        state=_state(dims, len(places)),
        scans=_scans(dims),
        tables=tables,
        snapshot_bytes=sum(part.total for part in _state(dims, len(places))),
        notes=() if root.has("vision_config") else (note,),
    )


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, isqrt(number) + 1))


def _tables(dims: dict[str, int], places: tuple[int, ...]) -> tuple[Table, ...]:
    """Tables of consecutive primes from the base upward, one prime per hash head, padded (section 8.1)."""
    heads = (dims["ngram_size"] - 1) * dims["heads_per_ngram"]
    width = dims["ple_embed_dim"] // heads
    multiple = dims["make_ngram_vocab_size_divisible_by"]
    tables, candidate = [], dims["ngram_vocab_size_base"]
    for place in places:
        primes: list[int] = []
        while len(primes) < heads:
            if _is_prime(candidate):
                primes.append(candidate)
            candidate += 1
        rows = -(-sum(primes) // multiple) * multiple
        tables.append(Table(layer_id=place - 1, num_rows=rows, row_bytes=width * _BF16, rows_per_token=heads))
    return tuple(tables)


def _growing(dims: dict[str, int]) -> tuple[Growing, ...]:
    row = 2 * dims["num_key_value_heads"] * dims["head_dim"] * _BF16
    ratio, key = dims["indexer_compress_ratio"], dims["indexer_head_dim"] * _BF16
    return (
        Growing(name="keys and values", layers=dims["sparse"], entry_bytes=row, ratio=1),
        Growing(name="index keys", layers=dims["sparse"], entry_bytes=key, ratio=ratio),
    )


def _state(dims: dict[str, int], num_tables: int) -> tuple[Fixed, ...]:
    values, keys = dims["linear_num_value_heads"], dims["linear_num_key_heads"]
    key_dim, value_dim = dims["linear_key_head_dim"], dims["linear_value_head_dim"]
    channels = 2 * keys * key_dim + values * value_dim
    flat = dims["hc_count"] * dims["hidden_size"]
    linear = dims["linear"]
    raw = dims["indexer_compress_ratio"] * dims["indexer_head_dim"] * _BF16
    history = (dims["ple_conv_kernel_size"] - 1) * _DILATION * flat * _BF16
    return (
        Fixed(name="recurrent state", layers=linear, num_bytes=values * key_dim * value_dim * _FLOAT32, is_read=True),
        Fixed(
            name="convolution state",
            layers=linear,
            num_bytes=(dims["linear_conv_kernel_dim"] - 1) * channels * _BF16,
            is_read=True,
        ),
        Fixed(name="n-gram convolution state", layers=num_tables, num_bytes=history, is_read=True),
        Fixed(name="index keys not yet pooled", layers=dims["sparse"], num_bytes=raw),
    )


def _scans(dims: dict[str, int]) -> tuple[Scan, ...]:
    ratio, budget = dims["indexer_compress_ratio"], dims["indexer_budget"]
    row = 2 * dims["num_key_value_heads"] * dims["head_dim"] * _BF16
    return (
        Scan(name="selected keys and values", layers=dims["sparse"], ratio=1, row_bytes=row,
             flops=4 * dims["num_attention_heads"] * dims["head_dim"], precision="bf16", limit=budget + ratio - 1),
        Scan(name="index keys", layers=dims["sparse"], ratio=ratio, row_bytes=dims["indexer_head_dim"] * _BF16,
             flops=2 * dims["indexer_n_heads"] * dims["indexer_head_dim"], precision="bf16", free=budget // ratio),
    )  # fmt: skip


def _tensors(dims: dict[str, int], tables: tuple[Table, ...]) -> Iterator[Tensors]:
    """List the checkpoint: `count` equal tensors at a time (section 3)."""
    vocab, width = dims["vocab_size"], dims["hidden_size"]
    yield _one("embedding", vocab, width, share=Fraction(1, vocab), is_looked_up=True)
    yield _one("head", vocab, width)
    yield from _residual(dims, "residual streams", 2 * dims["num_hidden_layers"], with_write=True)
    yield from _residual(dims, "residual streams", 1, with_write=False)
    yield from _linear_attention(dims)
    yield from _sparse_attention(dims, "attention", dims["sparse"])
    yield from _moe(dims, None, dims["num_hidden_layers"])
    yield from _ngram(dims, tables)
    drafts = dims["drafts"]
    if drafts:
        flat = dims["hc_count"] * width
        yield _one(DRAFT, width, width, count=2 * drafts)
        yield _one(DRAFT, width, count=drafts)
        yield _one(DRAFT, flat, count=drafts)
        yield from _residual(dims, DRAFT, 2 * drafts, with_write=True)
        yield from _residual(dims, DRAFT, drafts, with_write=False)
        yield from _sparse_attention(dims, DRAFT, drafts)
        yield from _moe(dims, DRAFT, drafts)


def _one(
    kind: str, *shape: int, count: int = 1, share: Fraction | None = None, is_looked_up: bool = False,
    dtype: str = "BF16",
) -> Tensors:  # fmt: skip
    is_idle = kind == DRAFT
    part = Fraction(0) if is_idle else Fraction(1) if share is None else share
    precision = None if is_idle or is_looked_up else "bf16"
    return Tensors(spec=TensorSpec(kind, shape, dtype), kind=kind, share=part, precision=precision, count=count)  # type: ignore[arg-type]


def _residual(dims: dict[str, int], kind: str, count: int, *, with_write: bool) -> Iterator[Tensors]:
    flat, rank = dims["hc_count"] * dims["hidden_size"], dims["hc_lowrank"]
    yield _one(kind, flat, count=count)
    yield _one(kind, rank, flat, count=count)
    yield _one(kind, flat, rank, count=count)
    if with_write:
        yield _one(kind, dims["hc_count"], flat, count=count)


def _linear_attention(dims: dict[str, int]) -> Iterator[Tensors]:
    kind, count, width = "linear attention", dims["linear"], dims["hidden_size"]
    heads, value_dim = dims["linear_num_value_heads"], dims["linear_value_head_dim"]
    values = heads * value_dim
    channels = 2 * dims["linear_num_key_heads"] * dims["linear_key_head_dim"] + values
    for shape in (
        (channels, width), (values, width), (heads, width), (heads, width),
        (channels, 1, dims["linear_conv_kernel_dim"]), (heads,), (heads,), (value_dim,), (width, values),
    ):  # fmt: skip
        yield _one(kind, *shape, count=count)


def _sparse_attention(dims: dict[str, int], kind: str, count: int) -> Iterator[Tensors]:
    width, head = dims["hidden_size"], dims["head_dim"]
    queries, keys = dims["num_attention_heads"] * head, dims["num_key_value_heads"] * head
    index = dims["indexer_head_dim"]
    for shape in (
        (2 * queries, width), (keys, width), (keys, width), (width, queries), (head,), (head,),
        ((dims["indexer_n_heads"] + 1) * index, width), (index,), (index,),
    ):  # fmt: skip
        yield _one(kind, *shape, count=count)


def _moe(dims: dict[str, int], draft: str | None, count: int) -> Iterator[Tensors]:
    width, inner, shared = dims["hidden_size"], dims["moe_intermediate_size"], dims["shared_expert_intermediate_size"]
    experts, kind = dims["num_experts"], draft or "shared experts"
    share = Fraction(dims["num_experts_per_tok"], experts)
    yield _one(draft or "routers", experts, width, count=count)
    yield _one(draft or EXPERTS, experts, 2 * inner, width, count=count, share=share)
    yield _one(draft or EXPERTS, experts, width, inner, count=count, share=share)
    yield _one(kind, shared, width, count=2 * count)
    yield _one(kind, width, shared, count=count)
    yield _one(kind, 1, width, count=count)


def _ngram(dims: dict[str, int], tables: tuple[Table, ...]) -> Iterator[Tensors]:
    width, flat = dims["hidden_size"], dims["hc_count"] * dims["hidden_size"]
    parts = dims["split_ngram_parts"]
    for table in tables:
        columns = table.row_bytes // _BF16
        yield _one(TABLES, table.num_rows // parts, columns, count=parts, share=Fraction(0), is_looked_up=True)
        for size in (dims["ngram_size"], table.rows_per_token, table.rows_per_token):
            yield _one("n-gram projections", size, dtype="I64", is_looked_up=True)
        for shape in ((flat, dims["ple_embed_dim"]), (width, dims["ple_embed_dim"]), (flat,), (flat,), (flat,),
                      (flat, 1, dims["ple_conv_kernel_size"])):  # fmt: skip
            yield _one("n-gram projections", *shape)
