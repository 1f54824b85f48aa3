"""Every tensor a checkpoint of a configuration must hold: official name, shape and storage format.

The loader, the writer of random checkpoints and `inspect` all go by this list; nothing else knows a tensor's name and
shape together. Source: spec section 2.
"""

from collections.abc import Iterator

from headrace.core.spec import TensorSpec
from headrace.models.deepseek_v41.architecture import Config, Draft, Engram, Vision
from headrace.models.deepseek_v41.plan import LayerPlan, build_plan


def _bf16(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, "BF16")


def _f32(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, "F32")


def _fp8(name: str, rows: int, columns: int, block: int) -> Iterator[TensorSpec]:
    """An FP8 linear: E4M3 codes and one scale per block of rows and columns."""
    yield TensorSpec(f"{name}.weight", (rows, columns), "F8_E4M3")
    yield TensorSpec(f"{name}.scale", (-(-rows // block), -(-columns // block)), "F8_E8M0")


def _fp4(name: str, rows: int, columns: int, block: int) -> Iterator[TensorSpec]:
    """An FP4 linear: two E2M1 codes per byte and one scale per row and block of columns."""
    yield TensorSpec(f"{name}.weight", (rows, columns // 2), "I8")
    yield TensorSpec(f"{name}.scale", (rows, columns // block), "F8_E8M0")


def layer_prefix(config: Config, layer_id: int) -> str:
    """Official prefix of a layer's tensors, draft layers counted after the backbone's."""
    return f"layers.{layer_id}." if layer_id < config.num_layers else f"mtp.{layer_id - config.num_layers}."


def expected_tensors(config: Config) -> Iterator[TensorSpec]:
    """List every tensor of a checkpoint: global ones, layers, draft layers, vision."""
    width = config.hidden_size
    yield _bf16("embed.weight", config.vocab_size, width)
    yield _bf16("head.weight", config.vocab_size, width)
    yield _bf16("norm.weight", width)
    for plan in build_plan(config):
        yield from layer_tensors(config, plan)
    if config.draft:
        yield from _draft_extras(config, config.draft)
    if config.vision:
        yield from _vision_tensors(width, config.vision)


def layer_tensors(config: Config, plan: LayerPlan) -> Iterator[TensorSpec]:
    """List the tensors of one layer, its Engram table included; the extras of the draft module are not."""
    prefix = layer_prefix(config, plan.id)
    width, streams, mixes = config.hidden_size, config.num_streams, config.mix_width
    for half in ("attn", "ffn"):
        yield _bf16(f"{prefix}{half}_norm.weight", width)
        yield _f32(f"{prefix}hc_{half}_fn", mixes, streams * width)
        yield _f32(f"{prefix}hc_{half}_base", mixes)
        yield _f32(f"{prefix}hc_{half}_scale", 3)
    if plan.has_ngram and config.engram:
        yield from _engram_tensors(config, config.engram, plan.id)
    yield from _attention_tensors(config, f"{prefix}attn.")
    if plan.role == "full":
        yield from _compressor_tensors(config, f"{prefix}attn.", plan.ratio)
    if plan.role in {"full", "reindex"}:
        yield from _fp8(
            f"{prefix}attn.indexer.wq_b", config.index_heads * config.index_head_dim, config.q_lora_rank, config.block
        )
        yield _bf16(f"{prefix}attn.indexer.weights_proj.weight", config.index_heads, width)
    experts = config.draft.num_experts if plan.is_draft and config.draft else config.num_experts
    yield from _moe_tensors(config, f"{prefix}ffn.", experts)


def _attention_tensors(config: Config, prefix: str) -> Iterator[TensorSpec]:
    width, block = config.hidden_size, config.block
    heads_width = config.num_heads * config.head_dim
    grouped_rank = config.o_groups * config.o_lora_rank
    yield _f32(f"{prefix}attn_sink", config.num_heads)
    yield _bf16(f"{prefix}q_norm.weight", config.q_lora_rank)
    yield _bf16(f"{prefix}kv_norm.weight", config.head_dim)
    yield from _fp8(f"{prefix}wq_a", config.q_lora_rank, width, block)
    yield from _fp8(f"{prefix}wq_b", heads_width, config.q_lora_rank, block)
    yield from _fp8(f"{prefix}wkv", config.head_dim, width, block)
    yield from _fp8(f"{prefix}wo_a", grouped_rank, heads_width // config.o_groups, block)
    yield from _fp8(f"{prefix}wo_b", width, grouped_rank, block)


def _compressor_tensors(config: Config, prefix: str, ratio: int) -> Iterator[TensorSpec]:
    yield _bf16(f"{prefix}compressor.wkv.weight", config.head_dim, config.hidden_size)
    if ratio == 2:
        yield _bf16(f"{prefix}compressor.wgate.weight", config.head_dim, config.hidden_size)
    yield _bf16(f"{prefix}compressor.norm.weight", config.head_dim)
    yield _bf16(f"{prefix}indexer.wk.weight", config.index_head_dim, config.head_dim)
    yield _bf16(f"{prefix}indexer.k_norm.weight", config.index_head_dim)


def _moe_tensors(config: Config, prefix: str, experts: int) -> Iterator[TensorSpec]:
    width, inner, block = config.hidden_size, config.expert_dim, config.block
    yield _bf16(f"{prefix}gate.weight", experts, width)
    yield _f32(f"{prefix}gate.bias", experts)
    yield _f32(f"{prefix}gate.bias_vl", experts)
    for expert_id in range(experts):
        yield from _fp4(f"{prefix}experts.{expert_id}.w1", inner, width, block)
        yield from _fp4(f"{prefix}experts.{expert_id}.w2", width, inner, block)
        yield from _fp4(f"{prefix}experts.{expert_id}.w3", inner, width, block)
    yield from _fp8(f"{prefix}shared_experts.w1", inner, width, block)
    yield from _fp8(f"{prefix}shared_experts.w2", width, inner, block)
    yield from _fp8(f"{prefix}shared_experts.w3", inner, width, block)


def _engram_tensors(config: Config, engram: Engram, layer_id: int) -> Iterator[TensorSpec]:
    prefix = f"layers.{layer_id}.engram."
    rows = engram.num_embeddings[engram.layer_ids.index(layer_id)]
    yield TensorSpec(f"{prefix}embed.weight", (rows, engram.head_dim), "F8_E4M3")
    yield TensorSpec(f"{prefix}embed.scale", (rows, engram.head_dim // config.block), "F8_E8M0")
    outputs = (config.num_streams + 1) * config.hidden_size
    yield from _fp8(f"{prefix}wkv", outputs, engram.num_columns * engram.head_dim, config.block)
    yield _bf16(f"{prefix}q_weight", config.num_streams, config.hidden_size)
    yield _bf16(f"{prefix}k_weight", config.num_streams, config.hidden_size)


def _draft_extras(config: Config, draft: Draft) -> Iterator[TensorSpec]:
    width = config.hidden_size
    first, last = "mtp.0.", f"mtp.{draft.num_layers - 1}."
    yield from _fp8(f"{first}main_proj", width, len(draft.tap_layers) * width, config.block)
    yield _bf16(f"{first}main_norm.weight", width)
    yield _bf16(f"{last}norm.weight", width)
    yield _bf16(f"{last}markov_head.embed.weight", config.vocab_size, draft.markov_rank)
    yield _bf16(f"{last}markov_head.head.weight", config.vocab_size, draft.markov_rank)
    yield _bf16(f"{last}confidence_head.proj.weight", 1, width + draft.markov_rank)


def _vision_tensors(width: int, vision: Vision) -> Iterator[TensorSpec]:
    inner = vision.hidden_size
    for name in ("image_start", "image_end", "image_newline"):
        yield _bf16(name, width)
    yield _bf16("vision.patch_embed.proj.weight", inner, 3 * vision.patch_size**2)
    yield _bf16("vision.patch_embed.proj.bias", inner)
    for block_id in range(vision.num_layers):
        prefix = f"vision.blocks.{block_id}."
        yield _bf16(f"{prefix}norm1.weight", inner)
        yield _bf16(f"{prefix}norm2.weight", inner)
        yield _bf16(f"{prefix}attn.wqkv.weight", 3 * inner, inner)
        yield _bf16(f"{prefix}attn.wqkv.bias", 3 * inner)
        yield _bf16(f"{prefix}attn.wo.weight", inner, inner)
        yield _bf16(f"{prefix}attn.wo.bias", inner)
        yield _bf16(f"{prefix}mlp.w1.weight", 2 * vision.intermediate_size, inner)
        yield _bf16(f"{prefix}mlp.w2.weight", inner, vision.intermediate_size)
    yield _bf16("vision.norm.weight", inner)
    yield _bf16("aligner.w1.weight", width, inner * vision.downsample**2)
    yield _bf16("aligner.w1.bias", width)
    yield _bf16("aligner.w2.weight", width, width)
    yield _bf16("aligner.w2.bias", width)
