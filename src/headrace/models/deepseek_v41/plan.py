"""What each layer does, derived once from the configuration.

Pure values: no tensors, no files. `inspect` prints them, the model is built from them. Source: spec 3.3 and 3.7.
"""

from dataclasses import dataclass
from typing import Literal

from headrace.models.deepseek_v41.architecture import Config

Half = Literal["encoder", "decoder"]
Role = Literal["window", "full", "reindex", "reuse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """One layer's part in the model.

    `half` is None for a draft layer. `role`: window (own window only), full (writes global KV and index keys, selects),
    reindex (selects anew from a source's keys), reuse (takes a source's KV and selection). `kv_source` and
    `index_source` are the layers whose entries and selection this one uses, itself included, None for a window layer.
    `has_candidates`: it builds the candidate pool that later selections are restricted to.
    """

    id: int
    half: Half | None
    role: Role
    ratio: int
    kv_source: int | None
    index_source: int | None
    has_candidates: bool
    has_ngram: bool
    is_draft: bool


def _source(sources: tuple[int, ...], layer_id: int) -> int | None:
    """The last source at or before a layer."""
    return max((source for source in sources if source <= layer_id), default=None)


def _plan_layer(config: Config, layer_id: int) -> LayerPlan:
    ratio = config.compress_ratios[layer_id]
    is_draft = layer_id >= config.num_layers
    role: Role = "reuse"
    if ratio == 0:
        role = "window"
    elif layer_id in config.kv_sources:
        role = "full"
    elif layer_id in config.index_sources:
        role = "reindex"
    half: Half = "encoder" if layer_id < config.cut else "decoder"
    return LayerPlan(
        id=layer_id,
        half=None if is_draft else half,
        role=role,
        ratio=ratio,
        kv_source=_source(config.kv_sources, layer_id) if ratio else None,
        index_source=_source(config.index_sources, layer_id) if ratio else None,
        has_candidates=layer_id == config.candidate_source,
        has_ngram=config.engram is not None and layer_id in config.engram.layer_ids,
        is_draft=is_draft,
    )


def build_plan(config: Config) -> tuple[LayerPlan, ...]:
    """Return the plan of every layer, draft layers last."""
    return tuple(_plan_layer(config, layer_id) for layer_id in range(config.num_layers + config.num_draft_layers))
