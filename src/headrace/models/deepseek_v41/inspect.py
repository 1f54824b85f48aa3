"""Report what a configuration or a checkpoint is: tensors, bytes, layers, state per token and sequence, parameters.

Everything follows from shapes; weights are never read here. `cli/inspect.py` prints the report.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from headrace.core.spec import TensorSpec
from headrace.models.deepseek_v41.config import MODEL_TYPE, Config
from headrace.models.deepseek_v41.inventory import expected_tensors
from headrace.models.deepseek_v41.plan import LayerPlan, build_plan

CONTEXTS = (131_072, 1_048_576)
_FLOAT32_BYTES = 4


def report(config: Config) -> dict[str, Any]:
    """Return the report of a configuration; its checkpoint must hold exactly the tensors it counts.

    Returns:
        JSON values: `model_type`, `num_tensors`, `total_bytes`, `bytes_by_dtype`, `layers`, `kv_bytes_per_token`,
        `window_bytes_per_sequence`, `state_bytes_per_sequence`, `parameters`, `active_parameters`, `contexts`. Byte
        counts are those of the stored formats; parameters are logical elements, scales not counted.
    """
    specs = list(expected_tensors(config))
    plans = build_plan(config)
    return {
        "model_type": MODEL_TYPE,
        "num_tensors": len(specs),
        "total_bytes": sum(spec.num_bytes for spec in specs),
        "bytes_by_dtype": bytes_by_dtype(specs),
        "layers": [_layer(plan) for plan in plans],
        "kv_bytes_per_token": kv_bytes_per_token(config, plans),
        "window_bytes_per_sequence": len(plans) * config.window * window_entry_bytes(config),
        "state_bytes_per_sequence": state_bytes(config, plans),
        "parameters": count_parameters(config, specs),
        "active_parameters": count_active(config, specs, plans),
        "contexts": [{"tokens": tokens, "bytes": context_bytes(config, plans, tokens)} for tokens in CONTEXTS],
    }


def bytes_by_dtype(specs: Iterable[TensorSpec]) -> dict[str, int]:
    """Sum the stored bytes per safetensors dtype, in order of names."""
    counts: Counter[str] = Counter()
    for spec in specs:
        counts[spec.dtype] += spec.num_bytes
    return dict(sorted(counts.items()))


def _layer(plan: LayerPlan) -> dict[str, Any]:
    return {
        "id": plan.id,
        "half": plan.half,
        "role": plan.role,
        "ratio": plan.ratio,
        "kv_source": plan.kv_source,
        "index_source": plan.index_source,
        "has_candidates": plan.has_candidates,
        "has_ngram": plan.has_ngram,
    }


def global_entry_bytes(config: Config) -> int:
    """Bytes of one compressed entry and its index key: FP4 codes, E4M3 scales per 16, E8M0 scales per 32."""
    main = config.head_dim // 2 + config.head_dim // 16
    key = config.index_head_dim // 2 + config.index_head_dim // 32
    return main + key


def window_entry_bytes(config: Config) -> int:
    """Bytes of one window entry: E4M3 codes and E8M0 scales per 32."""
    return config.head_dim + config.head_dim // 32


def kv_bytes_per_token(config: Config, plans: Iterable[LayerPlan]) -> int | float:
    """Global KV bytes per token: a source of ratio r stores one entry for every r tokens."""
    total = sum(global_entry_bytes(config) / plan.ratio for plan in plans if plan.role == "full")
    return int(total) if float(total).is_integer() else total


def context_bytes(config: Config, plans: Iterable[LayerPlan], tokens: int) -> int:
    """Global KV bytes of a context of that many tokens."""
    return sum(tokens // plan.ratio * global_entry_bytes(config) for plan in plans if plan.role == "full")


def state_bytes(config: Config, plans: Iterable[LayerPlan]) -> int:
    """Bytes of pending half pairs: value and gate vectors in float32 for every source of ratio 2."""
    return sum(2 * config.head_dim * _FLOAT32_BYTES for plan in plans if plan.role == "full" and plan.ratio == 2)


def _elements(spec: TensorSpec) -> int:
    """Logical parameters of a tensor: none for a scale, two per byte of packed FP4."""
    if spec.dtype == "F8_E8M0":
        return 0
    return spec.num_elements * (2 if spec.dtype == "I8" else 1)


def _kind(name: str) -> str:
    if name.startswith("mtp."):
        return "draft"
    if name.startswith(("vision.", "aligner.", "image_")):
        return "vision"
    if ".engram.embed." in name:
        return "engram_tables"
    if ".engram." in name:
        return "engram_projections"
    if ".ffn.experts." in name:
        return "routed_experts"
    if name in {"embed.weight", "head.weight"}:
        return name.removesuffix(".weight")
    return "other_layers"


def count_parameters(config: Config, specs: Iterable[TensorSpec]) -> dict[str, int]:
    """Count parameters by kind.

    Returns:
        `total` = `backbone` + `engram_tables` + `draft` + `vision`, where the backbone consists of `routed_experts`,
        `other_layers` (the final norm included), `embed`, `head` and `engram_projections`.
    """
    kinds: Counter[str] = Counter()
    for spec in specs:
        kinds[_kind(spec.name)] += _elements(spec)
    parts = ["routed_experts", "other_layers", "embed", "head"]
    if config.engram:
        parts.append("engram_projections")
    apart = [kind for kind in ("engram_tables", "draft", "vision") if kinds[kind]]
    return {
        "total": kinds.total(),
        "backbone": sum(kinds[part] for part in parts),
        **{part: kinds[part] for part in parts},
        **{kind: kinds[kind] for kind in apart},
    }


_STUB = ("attn_norm.", "attn.compressor.", "attn.indexer.wk.", "attn.indexer.k_norm.")


def count_active(config: Config, specs: Iterable[TensorSpec], plans: Iterable[LayerPlan]) -> dict[str, int]:
    """Count the parameters one token meets.

    Returns:
        `decode`: all layers with the experts a token is routed to, n-gram projections, final norm and head; `prefill`:
        the encoder's layers likewise, and what layer `cut` needs to write global KV. No embedding, table, vision or
        draft module in either.
    """
    layers: Counter[int] = Counter()
    experts: Counter[int] = Counter()
    stub = head = 0
    for spec in specs:
        if _kind(spec.name) in {"draft", "vision", "engram_tables", "embed"}:
            continue
        if not spec.name.startswith("layers."):
            head += _elements(spec)
            continue
        number, _, rest = spec.name.removeprefix("layers.").partition(".")
        layer_id = int(number)
        counter = experts if rest.startswith("ffn.experts.") else layers
        counter[layer_id] += _elements(spec)
        if layer_id == config.cut and rest.startswith(_STUB):
            stub += _elements(spec)
    for layer_id, size in experts.items():
        layers[layer_id] += size * config.experts_per_token // config.num_experts
    encoder = sum(layers[plan.id] for plan in plans if plan.half == "encoder")
    return {"decode": layers.total() + head, "prefill": encoder + stub}
