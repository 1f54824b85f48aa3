"""Weights of a layer in the layout of native kernels: the stored bits in tiles, no decoded copy.

Source: spec section 2.9; wo_a is FP8 in a checkpoint and is multiplied without rounding its input.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels.native.arena import Arena
from headrace.kernels.native.choice import OPERATIONS
from headrace.kernels.native.experts import ExpertMatrices
from headrace.kernels.native.tiles import Matrix, tile_bf16, tile_fp4, tile_fp8
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.plan import LayerPlan

Take = Callable[[str], Tensor]
"""Hands out a tensor of the checkpoint once, by name: bytes as uint8 for FP8 and FP4, otherwise as stored."""
_PARTS = ("weight", "scale")


@dataclass(frozen=True)
class TiledAttention:
    """Attention: `q_a_kv` [R + H, D], `q_b` [Q H, R], `o_a` one [rank, in] per group, `o_b` [D, G rank].

    Of an index source also the query side of the indexer: `index_q_b` [J I, R] and `head_weights` [J, D] bfloat16.
    """

    q_a_kv: Matrix
    q_b: Matrix
    o_a: tuple[Matrix, ...]
    o_b: Matrix
    index_q_b: Matrix | None
    head_weights: Matrix | None


@dataclass(frozen=True)
class TiledCompressor:
    """Producer of entries: `kv` and `gate` (None at ratio 1) [H, D], `index_key` [I, H], bfloat16."""

    kv: Matrix
    gate: Matrix | None
    index_key: Matrix


@dataclass(frozen=True)
class TiledLayer:
    """What native kernels read of one layer; None where PyTorch does the operation, or the layer has none."""

    attention: TiledAttention | None
    experts: ExpertMatrices | None
    compressor: TiledCompressor | None
    ngram: Matrix | None


@dataclass(frozen=True)
class TiledDraft:
    """What native kernels read of the draft module besides its layers; None where PyTorch does the operation.

    `main_proj` FP8 [D, n D] belongs to attention, `markov_head` [V, rank] and `confidence` [1, D + rank] bfloat16 to
    the head.
    """

    main_proj: Matrix | None
    markov_head: Matrix | None
    confidence: Matrix | None


class HeldElsewhere:
    """Stands for routed experts that are in tiles only."""

    dense: tuple[Tensor, Tensor] | None = None
    elements = 0

    def __init__(self, count: int) -> None:
        self.count = count

    def gate_up(self, _: object) -> Tensor:
        """Refuse.

        Raises:
            InternalError: always.
        """
        raise InternalError("experts of native kernels were asked for as PyTorch matrices")

    down = gate_up


class Tiler:
    """Takes tensors out of a checkpoint by name and tiles them into one arena."""

    def __init__(self, take: Take) -> None:
        self.take = take
        self.arena = Arena()

    def fp8(self, name: str) -> Matrix:
        """Tile an FP8 linear."""
        return tile_fp8(self.take(f"{name}.weight"), self.take(f"{name}.scale"), self.arena)

    def fp4(self, name: str) -> Matrix:
        """Tile an FP4 linear."""
        return tile_fp4(self.take(f"{name}.weight"), self.take(f"{name}.scale"), self.arena)

    def bf16(self, name: str) -> Matrix:
        """Tile a bfloat16 linear."""
        return tile_bf16(self.take(f"{name}.weight"), self.arena)

    def stacked_fp8(self, first: str, second: str) -> Matrix:
        """Tile two FP8 linears of one input as one, the first one's outputs first."""
        codes, scales = (torch.cat([self.take(f"{name}.{part}") for name in (first, second)]) for part in _PARTS)
        return tile_fp8(codes, scales, self.arena)


def tile_attention(tiler: Tiler, prefix: str, config: Config, *, has_index_query: bool) -> TiledAttention:
    """Tile one layer's attention matrices."""
    codes, scales = (tiler.take(f"{prefix}.wo_a.{part}") for part in _PARTS)
    rank = config.o_lora_rank
    groups = tuple(
        tile_fp8(codes[low : low + rank], scales[low // 32 : (low + rank) // 32], tiler.arena)
        for low in range(0, config.o_groups * rank, rank)
    )
    return TiledAttention(
        q_a_kv=tiler.stacked_fp8(f"{prefix}.wq_a", f"{prefix}.wkv"),
        q_b=tiler.fp8(f"{prefix}.wq_b"),
        o_a=groups,
        o_b=tiler.fp8(f"{prefix}.wo_b"),
        index_q_b=tiler.fp8(f"{prefix}.indexer.wq_b") if has_index_query else None,
        head_weights=tiler.bf16(f"{prefix}.indexer.weights_proj") if has_index_query else None,
    )


def tile_compressor(tiler: Tiler, prefix: str, plan: LayerPlan) -> TiledCompressor:
    """Tile one KV source's matrices."""
    return TiledCompressor(
        kv=tiler.bf16(f"{prefix}.compressor.wkv"),
        gate=tiler.bf16(f"{prefix}.compressor.wgate") if plan.ratio == 2 else None,
        index_key=tiler.bf16(f"{prefix}.indexer.wk"),
    )


def tile_draft(tiler: Tiler, last: str, native: frozenset[str]) -> TiledDraft:
    """Tile the draft module's own matrices; `last` is the prefix of its last layer."""
    has_head = "head" in native
    return TiledDraft(
        main_proj=tiler.fp8("mtp.0.main_proj") if "attention" in native else None,
        markov_head=tiler.bf16(f"{last}.markov_head.head") if has_head else None,
        confidence=tiler.bf16(f"{last}.confidence_head.proj") if has_head else None,
    )


def tile_experts(tiler: Tiler, prefix: str, plan: LayerPlan, count: int) -> ExpertMatrices:
    """Tile one layer's router and experts."""
    # an expert's matrices lie together
    experts = [
        [tiler.fp4(f"{prefix}.experts.{expert}.{part}") for part in ("w1", "w3", "w2")] for expert in range(count)
    ]
    gate, up, down = zip(*experts, strict=True)
    shared = f"{prefix}.shared_experts"
    return ExpertMatrices(
        router=tiler.bf16(f"{prefix}.gate"),
        bias=tiler.take(f"{prefix}.gate.bias"),
        image_bias=None if plan.is_draft else tiler.take(f"{prefix}.gate.bias_vl"),
        gate=gate,
        up=up,
        down=down,
        shared_gate_up=tiler.stacked_fp8(f"{shared}.w1", f"{shared}.w3"),
        shared_down=tiler.fp8(f"{shared}.w2"),
    )


def unsupported(config: Config, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Return the operations that native kernels cannot do for a configuration, with reasons."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return dict.fromkeys(OPERATIONS, f"{dtype} on {device.type}; kernels do bfloat16 on CPUs")
    found: dict[str, str] = {}
    if config.num_streams != 4 or config.hidden_size % 16:
        reason = f"{config.num_streams} streams of width {config.hidden_size}; kernels do 4 of a multiple of 16"
        found |= dict.fromkeys(("mhc", "ngram", "head"), reason)
    if config.o_lora_rank % 32 or config.q_lora_rank % 32 or config.head_dim % 32 or config.block != 32:
        found["attention"] = "a rank or head width that is no multiple of 32"
    if config.head_dim % 32 or config.index_head_dim % 32 or set(config.compress_ratios) - {0, 1, 2}:
        found["compress"] = "a ratio above 2 or a head width that is no multiple of 32"
    if config.draft is not None and (config.hidden_size % 32 or config.draft.markov_rank % 32):
        found["head"] = f"a Markov head of rank {config.draft.markov_rank}; kernels do multiples of 32"
    if config.expert_dim % 32 or config.block != 32:
        found["experts"] = f"experts of width {config.expert_dim}; kernels do multiples of 32"
    return found
