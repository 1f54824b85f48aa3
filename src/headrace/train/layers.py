"""Builds the layers that the cached path computes with out of master parameters, gradients attached.

The same layer code then runs in training and in serving; with every quantiser on, the values are those that a saved
checkpoint gives when it is loaded.
"""

import torch
from torch import Tensor

from headrace.kernels.block_quant import straight_through
from headrace.kernels.grouped_experts import DenseExperts
from headrace.kernels.product import pad_columns
from headrace.models.deepseek_v41.parameters import (
    AttentionWeights,
    CompressorWeights,
    IndexerWeights,
    LayerWeights,
    MixWeights,
    MoeWeights,
)
from headrace.models.deepseek_v41.plan import LayerPlan
from headrace.train.masters import Masters
from headrace.train.quantise import QuantPlan, fake_fp4_weight, fake_fp8_weight


class LayerBuilder:
    """Rounds masters as `quant` says and hands them out in the dtype of the activations."""

    def __init__(self, masters: Masters, quant: QuantPlan, dtype: torch.dtype) -> None:
        self._parameters = masters.parameters
        self._buffers = masters.buffers
        self._config = masters.config
        self._quant = quant
        self._dtype = dtype
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32

    def stored(self, name: str) -> Tensor:
        """Return a bfloat16 tensor of the checkpoint: rounded to bfloat16 when weights are quantised."""
        weight = self._parameters[name]
        return self._as_bfloat16(weight).to(self._dtype)

    def wide(self, name: str) -> Tensor:
        """Return a tensor that the model computes with in float32 and the checkpoint keeps in bfloat16."""
        return self._as_bfloat16(self._parameters[name]).to(self._wide)

    def exact(self, name: str) -> Tensor:
        """Return a tensor that the checkpoint keeps in float32."""
        return self._parameters[name].to(self._wide)

    def dense(self, name: str) -> Tensor:
        """Return a dense matrix that the checkpoint keeps in FP8."""
        weight: Tensor = self._parameters[f"{name}.weight"]
        if self._quant.dense_weights:
            weight = fake_fp8_weight(weight, self._config.block)
        return weight.to(self._dtype)

    def _as_bfloat16(self, weight: Tensor) -> Tensor:
        """Round to bfloat16 when weights are quantised; the gradient is not rounded."""
        if not self._quant.dense_weights:
            return weight
        return straight_through(weight, weight.detach().to(torch.bfloat16).to(weight.dtype))

    def layer(self, plan: LayerPlan, prefix: str) -> LayerWeights:
        """Build one backbone or draft layer; its n-gram memory stays with the graph."""
        return LayerWeights(
            plan=plan,
            attn_norm=self.wide(f"{prefix}.attn_norm.weight"),
            ffn_norm=self.wide(f"{prefix}.ffn_norm.weight"),
            attn_mix=self._mix(f"{prefix}.hc_attn"),
            ffn_mix=self._mix(f"{prefix}.hc_ffn"),
            attention=self._attention(f"{prefix}.attn"),
            compressor=self._compressor(f"{prefix}.attn", plan),
            indexer=self._indexer(f"{prefix}.attn.indexer"),
            moe=self._moe(f"{prefix}.ffn", is_draft=plan.is_draft),
            ngram=None,
        )

    def _mix(self, prefix: str) -> MixWeights:
        return MixWeights(
            pad_columns(self.exact(f"{prefix}_fn")), self.exact(f"{prefix}_base"), self.exact(f"{prefix}_scale")
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        config = self._config
        return AttentionWeights(
            q_a_kv=torch.cat([self.dense(f"{prefix}.wq_a"), self.dense(f"{prefix}.wkv")]),
            q_norm=self.wide(f"{prefix}.q_norm.weight"),
            q_b=self.dense(f"{prefix}.wq_b"),
            kv_norm=self.wide(f"{prefix}.kv_norm.weight"),
            o_a=self.dense(f"{prefix}.wo_a").unflatten(0, (config.o_groups, config.o_lora_rank)),
            o_b=self.dense(f"{prefix}.wo_b"),
            sink=self.exact(f"{prefix}.attn_sink"),
        )

    def _compressor(self, prefix: str, plan: LayerPlan) -> CompressorWeights | None:
        if plan.role != "full":
            return None
        kv, gate = f"{prefix}.compressor.wkv.weight", f"{prefix}.compressor.wgate.weight"
        is_pair = plan.ratio == 2
        return CompressorWeights(
            kv=pad_columns(self.wide(kv)) if is_pair else self.stored(kv),
            gate=pad_columns(self.wide(gate)) if is_pair else None,
            norm=self.wide(f"{prefix}.compressor.norm.weight"),
            index_key=self.stored(f"{prefix}.indexer.wk.weight"),
            index_key_norm=self.wide(f"{prefix}.indexer.k_norm.weight"),
        )

    def _indexer(self, prefix: str) -> IndexerWeights | None:
        if f"{prefix}.wq_b.weight" not in self._parameters:
            return None
        return IndexerWeights(self.dense(f"{prefix}.wq_b"), self.stored(f"{prefix}.weights_proj.weight"))

    def _moe(self, prefix: str, *, is_draft: bool) -> MoeWeights:
        parts: list[Tensor] = [self._parameters[f"{prefix}.experts.{part}"] for part in ("w1", "w3", "w2")]
        if self._quant.expert_weights:
            parts = [fake_fp4_weight(part) for part in parts]
        gate, up, down = (part.to(self._dtype) for part in parts)
        shared = f"{prefix}.shared_experts"
        return MoeWeights(
            gate=pad_columns(self.wide(f"{prefix}.gate.weight")),
            bias=self._buffers[f"{prefix}.gate.bias"].to(self._wide),
            bias_vl=None if is_draft else self._buffers[f"{prefix}.gate.bias_vl"].to(self._wide),
            experts=DenseExperts(torch.cat([gate, up], 1), down),
            shared_gate_up=torch.cat([self.dense(f"{shared}.w1"), self.dense(f"{shared}.w3")]),
            shared_down=self.dense(f"{shared}.w2"),
        )
