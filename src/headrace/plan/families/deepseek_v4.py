"""DeepSeek-V4: tensors and state from a configuration.

Layers of ratio 4 (CSA) keep an entry and an index key for every 4 tokens and select; layers of ratio 128 (HCA) keep an
entry for every 128 tokens and read all of them; every layer has a window. Source: deepseek-v4.md sections 1, 2, 7 to 9
and 12.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from headrace.core.spec import TensorSpec
from headrace.models.deepseek_v41.config_fields import Fields
from headrace.plan.facts import EXPERTS, Facts, Fixed, Growing, Scan, Tensors, group
from headrace.plan.families.deepseek_names import classify

MODEL_TYPE = "deepseek_v4"
CSA, HCA = 4, 128
_MAX_LAYERS = 512
_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim",
    "q_lora_rank", "o_lora_rank", "o_groups", "sliding_window", "moe_intermediate_size", "n_routed_experts",
    "num_experts_per_tok", "index_n_heads", "index_head_dim", "index_topk", "hc_mult", "max_position_embeddings",
)  # fmt: skip
_ROPE_BYTES, _SCALE_COLUMNS, _FLOAT32 = 2, 64, 4


def read(document: dict[str, Any], where: str) -> Facts:
    """Read a configuration.

    Raises:
        UserError: a key is missing or a value is refused.
    """
    fields = Fields(document, where)
    fields.constant("model_type", MODEL_TYPE)
    fields.constant("num_key_value_heads", 1)
    fields.constant("n_shared_experts", 1)
    fields.constant("tie_word_embeddings", False, default=False)
    fields.constant("expert_dtype", "fp4", default="fp4")
    quantization = fields.section("quantization_config")
    quantization.constant("quant_method", "fp8")
    quantization.constant("weight_block_size", [128, 128])
    dims = {key: fields.integer(key) for key in _KEYS}
    dims["layers"] = fields.integer("num_hidden_layers", high=_MAX_LAYERS)
    dims["hash_layers"] = fields.integer("num_hash_layers", low=0, high=dims["layers"], default=0)
    if dims["num_experts_per_tok"] > dims["n_routed_experts"]:
        raise fields.refuse("num_experts_per_tok", f"at most the {dims['n_routed_experts']} experts are accepted")
    dims["drafts"] = fields.integer("num_nextn_predict_layers", low=0, high=8, default=0)
    ratios = fields.integers("compress_ratios")
    if len(ratios) != dims["layers"] + dims["drafts"] or not set(ratios) <= {0, CSA, HCA}:
        rule = f"{dims['layers'] + dims['drafts']} ratios of 0, {CSA} or {HCA} are accepted"
        raise fields.refuse("compress_ratios", rule)
    ratios = ratios[: dims["layers"]]
    shares = {
        EXPERTS: Fraction(dims["num_experts_per_tok"], dims["n_routed_experts"]),
        "embedding": Fraction(1, dims["vocab_size"]),
        "hash routing": Fraction(1, dims["vocab_size"]),
    }
    row = entry_bytes(dims["head_dim"], dims["qk_rope_head_dim"])
    window = dims["sliding_window"]
    return Facts(
        name=where,
        model_type=MODEL_TYPE,
        max_positions=dims["max_position_embeddings"],
        num_layers=dims["layers"],
        streams=dims["hc_mult"],
        hidden_size=dims["hidden_size"],
        experts=(dims["n_routed_experts"], dims["num_experts_per_tok"]),
        weights=group(_tensors(dims, ratios, shares)),
        growing=_growing(dims, ratios, row),
        window_tokens=window,
        window=Fixed(name="window", layers=dims["layers"], num_bytes=window * row),
        state=_state(dims, ratios),
        scans=_scans(dims, ratios, row),
        notes=("the window of the next-token module is not counted",) if dims["drafts"] else (),
    )


def entry_bytes(head_dim: int, rope_dim: int) -> int:
    """Bytes of an entry or window row: E4M3, rotary dimensions in BF16, a scale for every 64, padded to 8 bytes."""
    plain = head_dim - rope_dim
    scales = -(-plain // _SCALE_COLUMNS)
    return plain + rope_dim * _ROPE_BYTES + -(-scales // 8) * 8


def _key_bytes(dims: dict[str, int]) -> int:
    return dims["index_head_dim"] // 2 + dims["index_head_dim"] // 32


def _growing(dims: dict[str, int], ratios: tuple[int, ...], row: int) -> tuple[Growing, ...]:
    parts = [Growing(name="entries", layers=ratios.count(ratio), entry_bytes=row, ratio=ratio) for ratio in (CSA, HCA)]
    parts.append(Growing(name="index keys", layers=ratios.count(CSA), entry_bytes=_key_bytes(dims), ratio=CSA))
    return tuple(part for part in parts if part.layers)


def _state(dims: dict[str, int], ratios: tuple[int, ...]) -> tuple[Fixed, ...]:
    """Uncompressed tails in float32, value and score: 2 x 4 rows of both column streams in CSA, 128 rows in HCA."""
    head, index = dims["head_dim"], dims["index_head_dim"]
    overlapping = 2 * (2 * CSA) * 2 * _FLOAT32
    return (
        Fixed(name="tails of ratio 4", layers=ratios.count(CSA), num_bytes=overlapping * (head + index)),
        Fixed(name="tails of ratio 128", layers=ratios.count(HCA), num_bytes=2 * HCA * head * _FLOAT32),
    )


def _scans(dims: dict[str, int], ratios: tuple[int, ...], row: int) -> tuple[Scan, ...]:
    attention = 4 * dims["num_attention_heads"] * dims["head_dim"]
    score = 2 * dims["index_n_heads"] * dims["index_head_dim"]
    csa, hca, topk = ratios.count(CSA), ratios.count(HCA), dims["index_topk"]
    return (
        Scan(name="window rows", layers=len(ratios), ratio=1, row_bytes=row, flops=attention, precision="bf16",
             limit=dims["sliding_window"]),
        Scan(name="selected entries", layers=csa, ratio=CSA, row_bytes=row, flops=attention, precision="bf16",
             limit=topk),
        Scan(name="all entries of ratio 128", layers=hca, ratio=HCA, row_bytes=row, flops=attention, precision="bf16"),
        Scan(name="index keys", layers=csa, ratio=CSA, row_bytes=_key_bytes(dims), flops=score, precision="fp4",
             free=topk),
    )  # fmt: skip


def _tensors(dims: dict[str, int], ratios: tuple[int, ...], shares: dict[str, Fraction]) -> Iterator[Tensors]:
    """List the checkpoint: `count` equal tensors at a time, under the first one's name."""
    width = dims["hidden_size"]
    for spec in (
        _bf16("embed.weight", dims["vocab_size"], width),
        _bf16("head.weight", dims["vocab_size"], width),
        _bf16("norm.weight", width),
        *_stream_head("", dims),
    ):
        yield classify(spec, shares)
    layers = len(ratios)
    for prefix, count, hashed in (("layers.0.", layers, dims["hash_layers"]), ("mtp.0.", dims["drafts"], 0)):
        for spec, times in _block(prefix, dims):
            yield classify(spec, shares, times * count)
        bias = TensorSpec(f"{prefix}ffn.gate.bias", (dims["n_routed_experts"],), "F32")
        yield classify(bias, shares, count - hashed)
        ids = TensorSpec(f"{prefix}ffn.gate.tid2eid", (dims["vocab_size"], dims["num_experts_per_tok"]), "I64")
        yield classify(ids, shares, hashed)
    for ratio in (CSA, HCA):
        for spec in _compressor(dims, ratio):
            yield classify(spec, shares, ratios.count(ratio))
    for spec in _draft_extras(dims):
        yield classify(spec, shares, dims["drafts"])


def _bf16(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, "BF16")


def _f32(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, "F32")


def _fp8(name: str, rows: int, columns: int) -> tuple[TensorSpec, TensorSpec]:
    scale = TensorSpec(f"{name}.scale", (-(-rows // 128), -(-columns // 128)), "F8_E8M0")
    return TensorSpec(f"{name}.weight", (rows, columns), "F8_E4M3"), scale


def _fp4(name: str, rows: int, columns: int) -> tuple[TensorSpec, TensorSpec]:
    scale = TensorSpec(f"{name}.scale", (rows, columns // 32), "F8_E8M0")
    return TensorSpec(f"{name}.weight", (rows, columns // 2), "I8"), scale


def _stream_head(prefix: str, dims: dict[str, int]) -> Iterator[TensorSpec]:
    streams = dims["hc_mult"]
    yield _f32(f"{prefix}hc_head_fn", streams, streams * dims["hidden_size"])
    yield _f32(f"{prefix}hc_head_base", streams)
    yield _f32(f"{prefix}hc_head_scale", 1)


def _block(prefix: str, dims: dict[str, int]) -> Iterator[tuple[TensorSpec, int]]:
    """One layer's tensors and how often each stands in it; router bias, routing table and compressors are apart."""
    width, inner, streams, head = dims["hidden_size"], dims["moe_intermediate_size"], dims["hc_mult"], dims["head_dim"]
    heads_width, rank = dims["num_attention_heads"] * head, dims["o_groups"] * dims["o_lora_rank"]
    mixes = (2 + streams) * streams
    attn, ffn = f"{prefix}attn.", f"{prefix}ffn."
    yield _bf16(f"{prefix}attn_norm.weight", width), 2
    yield _f32(f"{prefix}hc_attn_fn", mixes, streams * width), 2
    yield _f32(f"{prefix}hc_attn_base", mixes), 2
    yield _f32(f"{prefix}hc_attn_scale", 3), 2
    yield _f32(f"{attn}attn_sink", dims["num_attention_heads"]), 1
    yield _bf16(f"{attn}q_norm.weight", dims["q_lora_rank"]), 1
    yield _bf16(f"{attn}kv_norm.weight", head), 1
    yield _bf16(f"{ffn}gate.weight", dims["n_routed_experts"], width), 1
    for name, rows, columns in (
        ("wq_a", dims["q_lora_rank"], width),
        ("wq_b", heads_width, dims["q_lora_rank"]),
        ("wkv", head, width),
        ("wo_a", rank, heads_width // dims["o_groups"]),
        ("wo_b", width, rank),
    ):
        yield from ((spec, 1) for spec in _fp8(f"{attn}{name}", rows, columns))
    experts = dims["n_routed_experts"]
    yield from ((spec, 2 * experts) for spec in _fp4(f"{ffn}experts.0.w1", inner, width))
    yield from ((spec, experts) for spec in _fp4(f"{ffn}experts.0.w2", width, inner))
    yield from ((spec, 2) for spec in _fp8(f"{ffn}shared_experts.w1", inner, width))
    yield from ((spec, 1) for spec in _fp8(f"{ffn}shared_experts.w2", width, inner))


def _compressor(dims: dict[str, int], ratio: int) -> Iterator[TensorSpec]:
    """The tensors that a layer of this ratio has besides; CSA pools two overlapping column streams."""
    width, overlap = dims["hidden_size"], 2 if ratio == CSA else 1
    parts = [("layers.0.attn.", dims["head_dim"])]
    if ratio == CSA:
        parts.append(("layers.0.attn.indexer.", dims["index_head_dim"]))
        queries = dims["index_n_heads"] * dims["index_head_dim"]
        yield from _fp8("layers.0.attn.indexer.wq_b", queries, dims["q_lora_rank"])
        yield _bf16("layers.0.attn.indexer.weights_proj.weight", dims["index_n_heads"], width)
    for prefix, head in parts:
        yield _f32(f"{prefix}compressor.ape", ratio, overlap * head)
        yield _bf16(f"{prefix}compressor.wkv.weight", overlap * head, width)
        yield _bf16(f"{prefix}compressor.wgate.weight", overlap * head, width)
        yield _bf16(f"{prefix}compressor.norm.weight", head)


def _draft_extras(dims: dict[str, int]) -> Iterator[TensorSpec]:
    width = dims["hidden_size"]
    yield from _fp8("mtp.0.e_proj", width, width)
    yield from _fp8("mtp.0.h_proj", width, width)
    for name in ("enorm", "hnorm", "norm"):
        yield _bf16(f"mtp.0.{name}.weight", width)
    yield from _stream_head("mtp.0.", dims)
