"""DeepSeek-V4.1: facts from the inventory and the layer plan that the model itself is built from.

Source: deepseek-v41.md sections 2 to 4; serving.md sections 0 and 3.4.
"""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from headrace.models.deepseek_v41.config import MODEL_TYPE, Config, from_json
from headrace.models.deepseek_v41.inspect import state_bytes, window_entry_bytes
from headrace.models.deepseek_v41.inventory import expected_tensors
from headrace.models.deepseek_v41.plan import LayerPlan, build_plan
from headrace.plan.facts import EXPERTS, TABLES, Facts, Fixed, Growing, Scan, Table, Tensors, group
from headrace.plan.families.deepseek_names import classify

_PRODUCER = ("attn_norm.", "attn.compressor.", "attn.indexer.wk.", "attn.indexer.k_norm.")


def read(document: dict[str, Any], where: str) -> Facts:
    """Read a configuration in either spelling.

    Raises:
        UserError: a key is missing or unknown, or a value is refused.
    """
    config = from_json(document, where)
    plans = build_plan(config)
    backbone = tuple(plan for plan in plans if not plan.is_draft)
    encoder = sum(plan.half == "encoder" for plan in backbone)
    row = window_entry_bytes(config)
    pending = state_bytes(config, plans)
    tables = _tables(config)
    shares = {
        EXPERTS: Fraction(config.experts_per_token, config.num_experts),
        "embedding": Fraction(1, config.vocab_size),
    }
    if tables:
        shares[TABLES] = Fraction(0)  # rows are counted per table, see `Table`
    tensors = tuple(_tensors(config, shares))
    return Facts(
        name=where,
        model_type=MODEL_TYPE,
        max_positions=config.max_positions,
        num_layers=config.num_layers,
        streams=config.num_streams,
        hidden_size=config.hidden_size,
        experts=(config.num_experts, config.experts_per_token),
        weights=group(tensors),
        growing=_growing(config, backbone),
        window_tokens=config.window,
        window=Fixed(name="window", layers=len(plans), num_bytes=config.window * row),
        state=(Fixed(name="pending half pairs", layers=1, num_bytes=pending),) if pending else (),
        scans=_scans(config, backbone, row),
        tables=tables,
        encoder_layers=encoder,
        prefill_parameters=_prefill_parameters(config, tensors),
        snapshot_bytes=encoder * 2 * config.window * row + pending,
    )


def _tensors(config: Config, shares: dict[str, Fraction]) -> Iterator[Tensors]:
    """List the checkpoint; the experts of a layer are equal, so its first stands for all of them."""
    num_experts = {"layers": config.num_experts, "mtp": config.draft.num_experts if config.draft else 0}
    for spec in expected_tensors(config):
        _, _, expert = spec.name.partition(".experts.")
        if not expert:
            yield classify(spec, shares)
        elif expert.startswith("0."):
            yield classify(spec, shares, num_experts[spec.name.partition(".")[0]])


def _prefill_parameters(config: Config, tensors: tuple[Tensors, ...]) -> int:
    """Parameters that a prompt token meets in replay: encoder layers, and the cut layer's producer of global KV."""
    total = Fraction(0)
    for one in tensors:
        prefix, _, rest = one.spec.name.partition(".")
        number, _, rest = rest.partition(".")
        if prefix == "layers" and one.precision:
            layer_id = int(number)
            if layer_id < config.cut or (layer_id == config.cut and rest.startswith(_PRODUCER)):
                total += one.parameters * one.share
    return int(total)


def _main_bytes(config: Config) -> int:
    return config.head_dim // 2 + config.head_dim // 16


def _key_bytes(config: Config) -> int:
    return config.index_head_dim // 2 + config.index_head_dim // 32


def _tables(config: Config) -> tuple[Table, ...]:
    engram = config.engram
    if engram is None:
        return ()
    row_bytes = engram.head_dim + engram.head_dim // config.block
    return tuple(
        Table(layer_id=layer_id, num_rows=rows, row_bytes=row_bytes, rows_per_token=engram.num_columns)
        for layer_id, rows in zip(engram.layer_ids, engram.num_embeddings, strict=True)
    )


def _growing(config: Config, plans: tuple[LayerPlan, ...]) -> tuple[Growing, ...]:
    sources = Counter(plan.ratio for plan in plans if plan.role == "full")
    return tuple(
        Growing(name=name, layers=layers, entry_bytes=size, ratio=ratio)
        for name, size in (("entries", _main_bytes(config)), ("index keys", _key_bytes(config)))
        for ratio, layers in sorted(sources.items(), reverse=True)
    )


def _scans(config: Config, plans: tuple[LayerPlan, ...], window_row: int) -> tuple[Scan, ...]:
    attention = 4 * config.num_heads * config.head_dim  # a score and a weighted value per head
    score = 2 * config.index_heads * config.index_head_dim
    topk, key = config.index_topk, _key_bytes(config)
    pool = config.candidate_blocks * config.candidate_block_size
    source = config.candidate_source
    scans = [
        Scan(name="window rows", layers=len(plans), ratio=1, row_bytes=window_row, flops=attention, precision="bf16",
             limit=config.window)
    ]  # fmt: skip
    for ratio, layers in sorted(Counter(plan.ratio for plan in plans if plan.ratio).items(), reverse=True):
        scans.append(
            Scan(name="selected entries", layers=layers, ratio=ratio, row_bytes=_main_bytes(config), flops=attention,
                 precision="bf16", limit=topk)
        )  # fmt: skip
    selecting = Counter(
        (plan.ratio, plan.role == "reindex" and source is not None and plan.id > source)
        for plan in plans
        if plan.role in {"full", "reindex"}
    )
    for (ratio, is_pooled), layers in sorted(selecting.items(), reverse=True):
        name = "index keys of the candidate pool" if is_pooled else "index keys"
        limit, block = (pool, config.candidate_block_size) if is_pooled else (None, 0)
        scans.append(
            Scan(name=name, layers=layers, ratio=ratio, row_bytes=key, flops=score, precision="fp4", limit=limit,
                 free=topk, pool_block=block)
        )  # fmt: skip
    return tuple(scans)
