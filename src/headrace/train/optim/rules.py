"""Which update rule owns which parameter, as data: one table per family.

Nothing here computes. `ownership.py` reads a table and finds each parameter's one owner. A rule carries its evidence:
"report" for what a technical report states, "open" for what public material leaves open and this table had to choose.
Source: `docs/sources.md`; DeepSeek-V4 report on optimizers, DeepSeek-V4.1-Flash report section 2.5.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

from headrace.core.errors import UserError

Update = Literal["muon", "adamw", "sinkhorn", "balance"]
Split = Literal["whole", "heads", "index_heads", "groups", "experts"]
Evidence = Literal["report", "open"]

DECAY = 0.1


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of a family's table.

    Attributes:
        group: name of the line, by which a recipe changes it.
        names: parameter names it owns; `{block}` stands for one layer or draft layer, `{n}` for a number.
        update: the rule that moves them; "balance" marks what only the routing balance may move.
        split: what is one matrix to Muon: the whole parameter, equal slices of its rows (a number, or a count that
            the configuration holds), or every matrix of a stack of experts.
        rate: factor of the learning rate.
        decay: decoupled weight decay per unit of the multiplied learning rate.
        evidence: where the line comes from.
    """

    group: str
    names: tuple[str, ...]
    update: Update
    split: Split | int = "whole"
    rate: float = 1.0
    decay: float = DECAY
    evidence: Evidence = "report"

    def __post_init__(self) -> None:
        """Refuse values that no rule can have.

        Raises:
            UserError: an unknown update or split, a rate that is not above 0, or a decay below 0.
        """
        if self.update not in get_args(Update):
            raise UserError(
                f"Group {self.group!r} has update {self.update!r}; {', '.join(get_args(Update))} are accepted.",
                param="update",
            )
        if self.split not in get_args(Split) and not (isinstance(self.split, int) and self.split > 0):
            raise UserError(
                f"Group {self.group!r} has split {self.split!r}; a count or {', '.join(get_args(Split))} are accepted.",
                param="split",
            )
        if not (self.rate > 0.0 and isfinite(self.rate)):
            raise UserError(
                f"Group {self.group!r} has rate {self.rate}; a finite number above 0 is accepted.", param="rate"
            )
        if not (self.decay >= 0.0 and isfinite(self.decay)):
            raise UserError(
                f"Group {self.group!r} has decay {self.decay}; a finite number of at least 0 is accepted.",
                param="decay",
            )


_ATTENTION = tuple(f"{{block}}.attn.{name}.weight" for name in ("wq_a", "wkv", "wo_b"))
_COMPRESSOR = ("{block}.attn.compressor.wkv.weight", "{block}.attn.compressor.wgate.weight")
_EXPERTS = tuple(f"{{block}}.ffn.experts.{name}" for name in ("w1", "w2", "w3"))
_SHARED = tuple(f"{{block}}.ffn.shared_experts.{name}.weight" for name in ("w1", "w2", "w3"))
_HALVES = ("attn", "ffn")
_STREAM_VECTORS = tuple(f"{{block}}.hc_{half}_{name}" for half in _HALVES for name in ("base", "scale"))
_NORMS = (
    "norm.weight",
    "mtp.{n}.norm.weight",
    "{block}.attn_norm.weight",
    "{block}.ffn_norm.weight",
    "{block}.attn.q_norm.weight",
    "{block}.attn.kv_norm.weight",
    "{block}.attn.compressor.norm.weight",
)

# What both families share: everything but embedding, head, n-gram memory, the query projections and the draft module.
_SHARED_RULES = (
    Rule(group="attention", names=(*_ATTENTION, *_COMPRESSOR), update="muon"),
    Rule(group="index_weights", names=("{block}.attn.indexer.weights_proj.weight",), update="muon"),
    Rule(group="output_groups", names=("{block}.attn.wo_a.weight",), update="muon", split="groups", evidence="open"),
    Rule(group="experts", names=_EXPERTS, update="muon", split="experts"),
    Rule(group="shared_expert", names=_SHARED, update="muon"),
    Rule(group="router", names=("{block}.ffn.gate.weight",), update="muon"),
    Rule(group="streams", names=tuple(f"{{block}}.hc_{half}_fn" for half in _HALVES), update="muon"),
    Rule(group="stream_vectors", names=_STREAM_VECTORS, update="adamw", decay=0.0),
    Rule(group="sink", names=("{block}.attn.attn_sink",), update="adamw", decay=0.0),
    Rule(group="norms", names=_NORMS, update="adamw"),
    Rule(group="balance", names=("{block}.ffn.gate.bias",), update="balance", decay=0.0),
)

V4 = (
    Rule(group="embedding", names=("embed.weight",), update="adamw"),
    Rule(group="head", names=("head.weight",), update="adamw"),
    Rule(group="queries", names=("{block}.attn.wq_b.weight", "{block}.attn.indexer.wq_b.weight"), update="muon"),
    *_SHARED_RULES,
    Rule(
        group="index_compressor",
        names=tuple(f"{{block}}.attn.indexer.compressor.{name}.weight" for name in ("wkv", "wgate")),
        update="muon",
    ),
    Rule(  # on V4.1's graph, which runs these rules as long as headrace has none of V4: its index keys have no gate
        group="index_keys", names=("{block}.attn.indexer.wk.weight",), update="muon", evidence="open"
    ),
    Rule(
        group="index_norms",
        names=("{block}.attn.indexer.compressor.norm.weight", "{block}.attn.indexer.k_norm.weight"),
        update="adamw",
    ),
    Rule(
        group="position_biases",  # the report names no rule for them; they are biases of a softmax, like the sinks
        names=("{block}.attn.compressor.ape", "{block}.attn.indexer.compressor.ape"),
        update="adamw",
        decay=0.0,
        evidence="open",
    ),
    Rule(group="head_streams", names=("hc_head_fn", "mtp.{n}.hc_head_fn"), update="muon"),
    Rule(
        group="head_stream_vectors",
        names=("hc_head_base", "hc_head_scale", "mtp.{n}.hc_head_base", "mtp.{n}.hc_head_scale"),
        update="adamw",
        decay=0.0,
    ),
    Rule(group="next_token", names=("mtp.{n}.e_proj.weight", "mtp.{n}.h_proj.weight"), update="muon"),
    Rule(group="next_token_norms", names=("mtp.{n}.enorm.weight", "mtp.{n}.hnorm.weight"), update="adamw"),
)

_VISION = (
    Rule(
        group="vision",
        names=(
            "vision.patch_embed.proj.weight",
            "vision.blocks.{n}.attn.wo.weight",
            "vision.blocks.{n}.mlp.w2.weight",
            "aligner.w1.weight",
            "aligner.w2.weight",
        ),
        update="muon",
        evidence="open",
    ),
    Rule(  # query, key and value are one tensor in the file and three matrices to Muon
        group="vision_qkv", names=("vision.blocks.{n}.attn.wqkv.weight",), update="muon", split=3, evidence="open"
    ),
    Rule(  # gate and up are never fused
        group="vision_gate_up", names=("vision.blocks.{n}.mlp.w1.weight",), update="muon", split=2, evidence="open"
    ),
    Rule(
        group="vision_norms",
        names=("vision.norm.weight", "vision.blocks.{n}.norm1.weight", "vision.blocks.{n}.norm2.weight"),
        update="adamw",
        evidence="open",
    ),
    Rule(
        group="vision_vectors",
        names=(
            "image_start",
            "image_end",
            "image_newline",
            "vision.patch_embed.proj.bias",
            "vision.blocks.{n}.attn.wqkv.bias",
            "vision.blocks.{n}.attn.wo.bias",
            "aligner.w1.bias",
            "aligner.w2.bias",
        ),
        update="adamw",
        decay=0.0,
        evidence="open",
    ),
)

_DRAFT = (
    Rule(group="draft_projection", names=("mtp.{n}.main_proj.weight",), update="muon", evidence="open"),
    Rule(group="draft_norms", names=("mtp.{n}.main_norm.weight",), update="adamw", evidence="open"),
    Rule(  # the published draft trainer uses AdamW without decay for everything
        group="draft_heads",
        names=(
            "mtp.{n}.markov_head.embed.weight",
            "mtp.{n}.markov_head.head.weight",
            "mtp.{n}.confidence_head.proj.weight",
        ),
        update="adamw",
        decay=0.0,
        evidence="open",
    ),
)

V41 = (
    Rule(group="embedding", names=("embed.weight",), update="sinkhorn", decay=0.0),
    Rule(group="head", names=("head.weight",), update="sinkhorn", decay=0.0),
    Rule(group="engram_table", names=("layers.{n}.engram.embed.weight",), update="sinkhorn", rate=5.0, decay=0.0),
    Rule(group="engram_projection", names=("layers.{n}.engram.wkv.weight",), update="muon", rate=5.0, evidence="open"),
    Rule(  # gains of norms, though they have two axes
        group="engram_gains",
        names=("layers.{n}.engram.q_weight", "layers.{n}.engram.k_weight"),
        update="adamw",
        rate=5.0,
        evidence="open",
    ),
    Rule(group="queries", names=("{block}.attn.wq_b.weight",), update="muon", split="heads"),
    Rule(group="index_queries", names=("{block}.attn.indexer.wq_b.weight",), update="muon", split="index_heads"),
    Rule(group="index_keys", names=("{block}.attn.indexer.wk.weight",), update="muon"),
    Rule(group="index_norms", names=("{block}.attn.indexer.k_norm.weight",), update="adamw"),
    *_SHARED_RULES,
    Rule(group="image_balance", names=("{block}.ffn.gate.bias_vl",), update="balance", decay=0.0),
    *_DRAFT,
    *_VISION,
)

FAMILIES: dict[str, tuple[Rule, ...]] = {"v4": V4, "v4.1": V41}
