"""Kinds of weights by the names that DeepSeek checkpoints give them, V4 and V4.1 alike."""

from collections.abc import Mapping
from fractions import Fraction

from headrace.core.spec import TensorSpec
from headrace.plan.facts import DRAFT, EXPERTS, TABLES, VISION, Precision, Tensors

_KINDS = (
    ("mtp.", DRAFT),
    ("vision.", VISION),
    ("aligner.", VISION),
    ("image_", VISION),
    (".engram.embed.", TABLES),
    (".engram.", "n-gram projections"),
    (".ffn.experts.", EXPERTS),
    (".ffn.shared_experts.", "shared experts"),
    (".ffn.gate.tid2eid", "hash routing"),
    (".ffn.gate.", "routers"),
    (".attn.compressor.", "compressors and indexers"),
    (".attn.indexer.", "compressors and indexers"),
    (".attn.", "attention"),
    ("hc_", "residual streams"),
    ("embed.", "embedding"),
    ("head.", "head"),
    ("norm.", "norms"),
)
_PREFIXES = frozenset({"mtp.", "vision.", "aligner.", "image_", "embed.", "head."})
_LOOKED_UP = frozenset({TABLES, "hash routing", "embedding"})


def kind_of(name: str) -> str:
    """Return the kind of a tensor."""
    for part, kind in _KINDS:
        if name.startswith(part) if part in _PREFIXES else part in name:
            return kind
    return "norms"


def precision_of(name: str, dtype: str) -> Precision:
    """Return the format in which a tensor's products run: FP4 and FP8 weights meet FP8 inputs, `wo_a` BF16 ones."""
    is_low = dtype in {"I8", "F8_E4M3", "F8_E8M0"}
    return "fp8" if is_low and ".wo_a." not in name else "bf16"


def classify(spec: TensorSpec, shares: Mapping[str, Fraction], count: int = 1) -> Tensors:
    """Return a tensor with its kind, the share that a decoded token reads, and the format of its products.

    Args:
        spec: the tensor.
        shares: what a token reads of each kind that it does not read whole.
        count: how many equal tensors it stands for.
    """
    kind = kind_of(spec.name)
    is_idle = kind in {DRAFT, VISION}
    precision = None if is_idle or kind in _LOOKED_UP else precision_of(spec.name, spec.dtype)
    return Tensors(
        spec=spec, kind=kind, share=Fraction(0) if is_idle else shares.get(kind, Fraction(1)), precision=precision,
        count=count,
    )  # fmt: skip
