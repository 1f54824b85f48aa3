"""Weights in the form the cached path computes with.

Routed experts and n-gram tables stay in their stored bits. Dense FP8 matrices become bfloat16 (exact: code times a
power of two), and what the model computes in float32 becomes float32 (spec section 2.9). Every tensor is taken out of
the loaded set as it is converted, so memory never holds two copies of more than one of them.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels.block_quant import decode_fp8_weight
from headrace.kernels.grouped_experts import Expert, ExpertSet, PackedExperts, PackedMatrix
from headrace.kernels.native.choice import Choice, choose
from headrace.kernels.native.tiles import Matrix
from headrace.kernels.product import pad_columns
from headrace.memory.table import Table
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.plan import LayerPlan, build_plan
from headrace.models.deepseek_v41.tiled import (
    HeldElsewhere,
    TiledDraft,
    TiledLayer,
    Tiler,
    tile_attention,
    tile_compressor,
    tile_draft,
    tile_experts,
)
from headrace.models.deepseek_v41.weights import Weights


@dataclass(frozen=True)
class MixWeights:
    """Hyper-connection weights of one half, float32: `fn` [(2+M)M, M*D] padded, `base` [(2+M)M], `scale` [3]."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """Dense attention weights of one layer, bfloat16 [out, in]; norms and `sink` float32.

    `q_a_kv` stacks the query's low-rank rows on the window entry's, `o_a` is [G, rank, in].
    """

    q_a_kv: Tensor
    q_norm: Tensor
    q_b: Tensor
    kv_norm: Tensor
    o_a: Tensor
    o_b: Tensor
    sink: Tensor


@dataclass(frozen=True)
class CompressorWeights:
    """Producer of global KV and index keys; `kv` and `gate` float32 at ratio 2, `kv` bfloat16 and no gate at 1."""

    kv: Tensor
    gate: Tensor | None
    norm: Tensor
    index_key: Tensor
    index_key_norm: Tensor


@dataclass(frozen=True)
class IndexerWeights:
    """Query side of the indexer, bfloat16."""

    q_b: Tensor
    head_weights: Tensor


@dataclass(frozen=True)
class MoeWeights:
    """Router (float32, padded), routed experts as stored, shared expert in bfloat16 (gate rows, then up rows).

    `bias_vl` is None in draft layers.
    """

    gate: Tensor
    bias: Tensor
    bias_vl: Tensor | None
    experts: ExpertSet
    shared_gate_up: Tensor
    shared_down: Tensor


@dataclass(frozen=True)
class NgramWeights:
    """N-gram memory of one layer: its table as stored, `kv` bfloat16 [(M+1)D, C*U], weights float32 [M, D]."""

    table: Table
    kv: Tensor
    q_weight: Tensor
    k_weight: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer, backbone or draft.

    What native kernels read is in `tiled`; the PyTorch matrices of those operations are empty then.
    """

    plan: LayerPlan
    attn_norm: Tensor
    ffn_norm: Tensor
    attn_mix: MixWeights
    ffn_mix: MixWeights
    attention: AttentionWeights
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None
    moe: MoeWeights
    ngram: NgramWeights | None
    tiled: TiledLayer | None = None


@dataclass(frozen=True)
class DraftWeights:
    """Draft module: blocks, tap projection and the sequential head (`markov_head`, `confidence` float32, padded).

    What native kernels read is in `tiled`; the PyTorch matrices of those operations are empty then.
    """

    layers: tuple[LayerWeights, ...]
    main_proj: Tensor
    main_norm: Tensor
    norm: Tensor
    markov_embed: Tensor
    markov_head: Tensor
    confidence: Tensor
    tiled: TiledDraft


@dataclass(frozen=True)
class Parameters:
    """A whole model. `vision` holds the image tower's tensors by official name, empty if it was not loaded.

    `tiled_head` is what a native vocabulary head reads; `head` is empty then. `choice` says what native kernels do.
    """

    embed: Tensor
    head: Tensor
    norm: Tensor
    layers: tuple[LayerWeights, ...]
    draft: DraftWeights | None
    vision: dict[str, Tensor]
    tiled_head: Matrix | None = None
    choice: Choice = field(default_factory=lambda: choose("torch"))


class _Source:
    """Hands out each loaded tensor once, moved to the device."""

    def __init__(
        self, weights: Weights, config: Config, device: torch.device, dtype: torch.dtype, native: frozenset[str]
    ) -> None:
        self.native = native
        self._tensors = weights.tensors
        self.tables = weights.tables
        self._device = device
        self._dtype = dtype
        self._block = config.block
        self.tiler = Tiler(self.stored)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str) -> Tensor:
        return self._tensors.pop(name).to(self._device)

    def bytes(self, name: str) -> Tensor:
        return self.take(name).contiguous().view(torch.uint8)

    def stored(self, name: str) -> Tensor:
        """Hand out bytes of FP8 and FP4 matrices and their scales, and anything else as it is stored."""
        tensor = self.take(name).contiguous()
        return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor

    def nothing(self) -> Tensor:
        return torch.empty(0, dtype=self._dtype, device=self._device)

    def dense(self, name: str) -> Tensor:
        return self.take(name).to(self._dtype)

    def fp32(self, name: str) -> Tensor:
        return self.take(name).float()

    def fp32_matrix(self, name: str) -> Tensor:
        return pad_columns(self.take(name))

    def fp8(self, name: str) -> Tensor:
        weight = decode_fp8_weight(self.bytes(f"{name}.weight"), self.bytes(f"{name}.scale"), self._block)
        return weight.to(self._dtype)

    def fp4(self, name: str) -> PackedMatrix:
        return PackedMatrix(self.bytes(f"{name}.weight"), self.bytes(f"{name}.scale"))

    def names(self, prefixes: tuple[str, ...]) -> list[str]:
        return [name for name in self._tensors if name.startswith(prefixes)]


def build_parameters(
    weights: Weights,
    config: Config,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    choice: Choice | None = None,
) -> Parameters:
    """Convert loaded tensors to `Parameters`, emptying `weights.tensors`; `choice` says what native kernels read.

    Raises:
        InternalError: a loaded tensor was not used.
    """
    choice = choice or choose("torch")
    source = _Source(weights, config, device, dtype, choice.native)
    plans = build_plan(config)
    layers = tuple(_layer(source, f"layers.{plan.id}", plan, config) for plan in plans if not plan.is_draft)
    draft = _draft(source, config, plans) if source.has("mtp.0.main_norm.weight") else None
    vision = {
        name: source.dense(name)
        for name in source.names(("vision.", "aligner.", "image_start", "image_end", "image_newline"))
    }
    tiled_head = source.tiler.bf16("head") if "head" in source.native else None
    parameters = Parameters(
        embed=source.dense("embed.weight"),
        head=source.nothing() if tiled_head else source.fp32_matrix("head.weight"),
        tiled_head=tiled_head,
        choice=choice,
        norm=source.fp32("norm.weight"),
        layers=layers,
        draft=draft,
        vision=vision,
    )
    if weights.tensors:
        raise InternalError(f"{len(weights.tensors)} loaded tensors were not used, {next(iter(weights.tensors))} first")
    return parameters


def _layer(source: _Source, prefix: str, plan: LayerPlan, config: Config) -> LayerWeights:
    tiled = _tiled(source, prefix, plan, config) if source.native else None
    has_attention = tiled is not None and tiled.attention is not None
    has_experts = tiled is not None and tiled.experts is not None
    return LayerWeights(
        tiled=tiled,
        plan=plan,
        attn_norm=source.fp32(f"{prefix}.attn_norm.weight"),
        ffn_norm=source.fp32(f"{prefix}.ffn_norm.weight"),
        attn_mix=_mix(source, f"{prefix}.hc_attn"),
        ffn_mix=_mix(source, f"{prefix}.hc_ffn"),
        attention=(_attention_norms if has_attention else _attention)(source, f"{prefix}.attn", config),
        compressor=_compressor(source, f"{prefix}.attn", plan),
        indexer=(
            IndexerWeights(source.nothing(), source.nothing())
            if has_attention and plan.role in ("full", "reindex")
            else _indexer(source, f"{prefix}.attn.indexer")
        ),
        moe=_no_moe(source, _num_experts(plan, config)) if has_experts else _moe(source, f"{prefix}.ffn", plan, config),
        ngram=_ngram(source, f"{prefix}.engram", plan),
    )


def _tiled(source: _Source, prefix: str, plan: LayerPlan, config: Config) -> TiledLayer:
    attention = experts = None
    if "attention" in source.native:
        has_query = source.has(f"{prefix}.attn.indexer.wq_b.weight")
        attention = tile_attention(source.tiler, f"{prefix}.attn", config, has_index_query=has_query)
    if "experts" in source.native:
        experts = tile_experts(source.tiler, f"{prefix}.ffn", plan, _num_experts(plan, config))
    has_compressor = "compress" in source.native and plan.role == "full"
    compressor = tile_compressor(source.tiler, f"{prefix}.attn", plan) if has_compressor else None
    has_ngram = "ngram" in source.native and plan.has_ngram
    return TiledLayer(attention, experts, compressor, source.tiler.fp8(f"{prefix}.engram.wkv") if has_ngram else None)


def _attention_norms(source: _Source, prefix: str, _: Config) -> AttentionWeights:
    nothing = source.nothing()
    return AttentionWeights(
        q_a_kv=nothing,
        q_norm=source.fp32(f"{prefix}.q_norm.weight"),
        q_b=nothing,
        kv_norm=source.fp32(f"{prefix}.kv_norm.weight"),
        o_a=nothing,
        o_b=nothing,
        sink=source.fp32(f"{prefix}.attn_sink"),
    )


def _no_moe(source: _Source, num_experts: int) -> MoeWeights:
    nothing = source.nothing()
    return MoeWeights(nothing, nothing, nothing, HeldElsewhere(num_experts), nothing, nothing)


def _num_experts(plan: LayerPlan, config: Config) -> int:
    return config.draft.num_experts if plan.is_draft and config.draft else config.num_experts


def _mix(source: _Source, prefix: str) -> MixWeights:
    fn = source.fp32_matrix(f"{prefix}_fn")
    if "mhc" in source.native:
        fn = source.tiler.arena.copy(fn)
    return MixWeights(fn, source.fp32(f"{prefix}_base"), source.fp32(f"{prefix}_scale"))


def _attention(source: _Source, prefix: str, config: Config) -> AttentionWeights:
    return AttentionWeights(
        q_a_kv=torch.cat([source.fp8(f"{prefix}.wq_a"), source.fp8(f"{prefix}.wkv")]),
        q_norm=source.fp32(f"{prefix}.q_norm.weight"),
        q_b=source.fp8(f"{prefix}.wq_b"),
        kv_norm=source.fp32(f"{prefix}.kv_norm.weight"),
        o_a=source.fp8(f"{prefix}.wo_a").unflatten(0, (config.o_groups, config.o_lora_rank)),
        o_b=source.fp8(f"{prefix}.wo_b"),
        sink=source.fp32(f"{prefix}.attn_sink"),
    )


def _compressor(source: _Source, prefix: str, plan: LayerPlan) -> CompressorWeights | None:
    if plan.role != "full":
        return None
    if "compress" in source.native and not plan.is_draft:
        nothing = source.nothing()
        norms = [source.fp32(f"{prefix}.{name}.weight") for name in ("compressor.norm", "indexer.k_norm")]
        return CompressorWeights(nothing, None, norms[0], nothing, norms[1])
    is_pair = plan.ratio == 2
    kv = f"{prefix}.compressor.wkv.weight"
    return CompressorWeights(
        kv=source.fp32_matrix(kv) if is_pair else source.dense(kv),
        gate=source.fp32_matrix(f"{prefix}.compressor.wgate.weight") if is_pair else None,
        norm=source.fp32(f"{prefix}.compressor.norm.weight"),
        index_key=source.dense(f"{prefix}.indexer.wk.weight"),
        index_key_norm=source.fp32(f"{prefix}.indexer.k_norm.weight"),
    )


def _indexer(source: _Source, prefix: str) -> IndexerWeights | None:
    if not source.has(f"{prefix}.wq_b.weight"):
        return None
    return IndexerWeights(source.fp8(f"{prefix}.wq_b"), source.dense(f"{prefix}.weights_proj.weight"))


def _moe(source: _Source, prefix: str, plan: LayerPlan, config: Config) -> MoeWeights:
    experts = tuple(
        Expert(*(source.fp4(f"{prefix}.experts.{expert}.{part}") for part in ("w1", "w3", "w2")))
        for expert in range(_num_experts(plan, config))
    )
    return MoeWeights(
        gate=source.fp32_matrix(f"{prefix}.gate.weight"),
        bias=source.fp32(f"{prefix}.gate.bias"),
        bias_vl=None if plan.is_draft else source.fp32(f"{prefix}.gate.bias_vl"),
        experts=PackedExperts(experts),
        shared_gate_up=torch.cat(
            [source.fp8(f"{prefix}.shared_experts.w1"), source.fp8(f"{prefix}.shared_experts.w3")]
        ),
        shared_down=source.fp8(f"{prefix}.shared_experts.w2"),
    )


def _ngram(source: _Source, prefix: str, plan: LayerPlan) -> NgramWeights | None:
    if not plan.has_ngram:
        return None
    return NgramWeights(
        table=source.tables[plan.id],
        kv=source.nothing() if "ngram" in source.native else source.fp8(f"{prefix}.wkv"),
        q_weight=source.fp32(f"{prefix}.q_weight"),
        k_weight=source.fp32(f"{prefix}.k_weight"),
    )


def _draft(source: _Source, config: Config, plans: tuple[LayerPlan, ...]) -> DraftWeights:
    drafts = [plan for plan in plans if plan.is_draft]
    last, native = f"mtp.{len(drafts) - 1}", source.native
    tiled = tile_draft(source.tiler, last, native)
    has_head = "head" in native
    return DraftWeights(
        tiled=tiled,
        layers=tuple(_layer(source, f"mtp.{stage}", plan, config) for stage, plan in enumerate(drafts)),
        main_proj=source.nothing() if "attention" in native else source.fp8("mtp.0.main_proj"),
        main_norm=source.fp32("mtp.0.main_norm.weight"),
        norm=source.fp32(f"{last}.norm.weight"),
        markov_embed=source.dense(f"{last}.markov_head.embed.weight"),
        markov_head=source.nothing() if has_head else source.fp32_matrix(f"{last}.markov_head.head.weight"),
        confidence=source.nothing() if has_head else source.fp32_matrix(f"{last}.confidence_head.proj.weight"),
    )
