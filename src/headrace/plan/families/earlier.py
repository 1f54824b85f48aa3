"""Earlier generations, for comparison only: DeepSeek-V3.2 (latent attention with an index) and V1 (grouped queries).

Source: deepseek-v4.md section 12.3 and serving.md section 9 for the bytes of a cached token.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from headrace.core.spec import TensorSpec
from headrace.models.deepseek_v41.config_fields import Fields
from headrace.plan.facts import EXPERTS, Facts, Growing, Scan, Tensors, group

_V32_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "first_k_dense_replace", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim", "index_topk", "n_routed_experts",
    "n_shared_experts", "num_experts_per_tok", "max_position_embeddings",
)  # fmt: skip
_BF16, _FLOAT32 = 2, 4


def read_v32(document: dict[str, Any], where: str) -> Facts:
    """Read a DeepSeek-V3.2 configuration: backbone weights, the latent cache, the index keys.

    Raises:
        UserError: a key is missing or a value is refused.
    """
    fields = Fields(document, where)
    fields.constant("model_type", "deepseek_v32")
    dims = {key: fields.integer(key) for key in _V32_KEYS}
    layers, latent, rope = dims["num_hidden_layers"], dims["kv_lora_rank"], dims["qk_rope_head_dim"]
    entry = latent + latent // 128 * _FLOAT32 + rope * _BF16
    key = dims["index_head_dim"] + _FLOAT32
    attention = 2 * dims["num_attention_heads"] * (latent + rope + latent)
    return Facts(
        name=where,
        model_type="deepseek_v32",
        max_positions=dims["max_position_embeddings"],
        num_layers=layers,
        streams=1,
        hidden_size=dims["hidden_size"],
        experts=(dims["n_routed_experts"], dims["num_experts_per_tok"]),
        weights=group(_v32_tensors(dims)),
        growing=(
            Growing(name="entries", layers=layers, entry_bytes=entry, ratio=1),
            Growing(name="index keys", layers=layers, entry_bytes=key, ratio=1),
        ),
        window_tokens=0,
        window=None,
        state=(),
        scans=(
            Scan(name="selected entries", layers=layers, ratio=1, row_bytes=entry, flops=attention, precision="bf16",
                 limit=dims["index_topk"]),
            Scan(name="index keys", layers=layers, ratio=1, row_bytes=key,
                 flops=2 * dims["index_n_heads"] * dims["index_head_dim"], precision="fp8", free=dims["index_topk"]),
        ),
        notes=("the next-token module is not counted",),
    )  # fmt: skip


def _v32_tensors(dims: dict[str, int]) -> Iterator[Tensors]:
    """List the backbone's matrices; norms are left out. FP8 but for embedding, head, router and index head weights."""
    width, layers, dense = dims["hidden_size"], dims["num_hidden_layers"], dims["first_k_dense_replace"]
    heads, rank, latent = dims["num_attention_heads"], dims["q_lora_rank"], dims["kv_lora_rank"]
    nope, rope, value = dims["qk_nope_head_dim"], dims["qk_rope_head_dim"], dims["v_head_dim"]
    inner, experts = dims["moe_intermediate_size"], dims["n_routed_experts"]
    share = Fraction(dims["num_experts_per_tok"], experts)
    index = dims["index_n_heads"] * dims["index_head_dim"]
    vocab, one = dims["vocab_size"], Fraction(1)
    for kind, shape, count, part, dtype in (
        ("embedding", (vocab, width), 1, Fraction(1, vocab), "BF16"),
        ("head", (vocab, width), 1, one, "BF16"),
        ("attention", (rank, width), layers, one, "F8_E4M3"),
        ("attention", (heads * (nope + rope), rank), layers, one, "F8_E4M3"),
        ("attention", (latent + rope, width), layers, one, "F8_E4M3"),
        ("attention", (heads * (nope + value), latent), layers, one, "F8_E4M3"),
        ("attention", (width, heads * value), layers, one, "F8_E4M3"),
        ("compressors and indexers", (index, rank), layers, one, "F8_E4M3"),
        ("compressors and indexers", (dims["index_head_dim"], width), layers, one, "F8_E4M3"),
        ("compressors and indexers", (dims["index_n_heads"], width), layers, one, "BF16"),
        ("dense feed-forward", (dims["intermediate_size"], width), 3 * dense, one, "F8_E4M3"),
        ("routers", (experts, width), layers - dense, one, "BF16"),
        (EXPERTS, (inner, width), 3 * experts * (layers - dense), share, "F8_E4M3"),
        ("shared experts", (dims["n_shared_experts"] * inner, width), 3 * (layers - dense), one, "F8_E4M3"),
    ):
        yield Tensors(
            spec=TensorSpec(kind, shape, dtype), kind=kind, share=part, count=count,
            precision=None if kind == "embedding" else "bf16" if dtype == "BF16" else "fp8",
        )  # fmt: skip


def read_grouped_queries(document: dict[str, Any], where: str) -> Facts:
    """Read a configuration of grouped-query attention: the BF16 keys and values that it caches, no weights.

    Raises:
        UserError: a key is missing or a value is refused.
    """
    fields = Fields(document, where)
    fields.constant("model_type", "llama")
    fields.constant("torch_dtype", "bfloat16")
    layers, heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    width = fields.integer("hidden_size")
    row = gqa_row_bytes(fields.integer("num_key_value_heads"), width // heads)
    return Facts(
        name=where,
        model_type="llama",
        max_positions=fields.integer("max_position_embeddings"),
        num_layers=layers,
        streams=1,
        hidden_size=width,
        experts=(0, 0),
        weights=(),
        growing=(Growing(name="keys and values", layers=layers, entry_bytes=row, ratio=1),),
        window_tokens=0,
        window=None,
        state=(),
        scans=(),
        notes=("weights are not counted",),
    )


def gqa_row_bytes(kv_heads: int, head_dim: int) -> int:
    """Bytes of one token's keys and values in BF16, one layer."""
    return 2 * kv_heads * head_dim * _BF16
