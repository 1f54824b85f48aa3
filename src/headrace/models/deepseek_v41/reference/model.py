"""The whole model over one sequence: embeddings, the layer loop, logits, and a record of everything on the way.

In a bounded replay the layers from the cut on run only on the rows at and after the replay start. The cut is the last
layer that owns compressed entries; those entries and their index keys are produced for all rows, so that they are the
same in both modes. Read `layer` first.

Source: specification sections 3.0, 3.1 and 3.7; report sections 2.2 and 3.2 for the bounded replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.reference import engram, layer, moe, selection, streams, vision
from headrace.models.deepseek_v41.reference.arithmetic import linear_fp32, rms_norm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from headrace.models.deepseek_v41.config import Config
    from headrace.models.deepseek_v41.reference.arithmetic import Weights


class Flow(NamedTuple):
    """What moves from layer to layer, for the rows that still run.

    Attributes:
        x: [T, M, D] bfloat16 streams.
        pre: [T, M] float32 pending pre-mix.
        positions: [T] int64, consecutive.
        image: [T] bool, positions inside image spans.
    """

    x: Tensor
    pre: Tensor
    positions: Tensor
    image: Tensor

    def since(self, first: int) -> Flow:
        """Return the rows at and after a place in this flow."""
        return Flow(*(part[first:] for part in self))

    def fed(self, feed: Mapping[str, Tensor], name: str) -> Flow:
        """Return these rows with the streams and the pre-mix of a layer replaced by recorded ones, where there are."""
        x_TMD, pre_TM = feed.get(f"{name}.x_in"), feed.get(f"{name}.pre_in")
        return self._replace(
            x=self.x if x_TMD is None else x_TMD[0, self.positions],
            pre=self.pre if pre_TM is None else pre_TM[0, self.positions],
        )


class Options(NamedTuple):
    """How a sequence is run; see `forward`."""

    index_scores: selection.IndexScores
    replay_start: int | None
    feed: Mapping[str, Tensor] | None


class Recorder:
    """Collects tensors under the names of `headrace trace`, always for all N rows of the sequence.

    Rows that did not run are NaN in float tensors, -1 in lists of positions and 0 in candidate masks.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.tensors: dict[str, Tensor] = {}

    def whole(self, name: str, tensor: Tensor) -> None:
        """Record a tensor that has all its rows: [...] as [1, ...]."""
        self.tensors[name] = tensor[None]

    def rows(self, name: str, tensor: Tensor, fill: float = torch.nan) -> None:
        """Record the last rows of a tensor: [T, ...] as [1, N, ...] with `fill` in front."""
        missing = self.num_tokens - tensor.shape[0]
        front = torch.full((missing, *tensor.shape[1:]), fill, dtype=tensor.dtype, device=tensor.device)
        self.whole(name, torch.cat((front, tensor)))

    def picks(self, name: str, picks: layer.Picks, max_picks: int, *, is_candidate_source: bool) -> None:
        """Record what an index source scored and picked, and the candidates if it made them."""
        width = min(max_picks, picks.picked.shape[1])
        self.rows(f"{name}.index_score", picks.scores)
        self.rows(f"{name}.topk", selection.positions_of(picks.picked, width), fill=-1)
        if is_candidate_source and picks.candidates is not None:
            self.rows(f"{name}.candidates", picks.candidates.to(torch.uint8), fill=0)


def forward(
    weights: Weights,
    config: Config,
    token_ids: Sequence[int],
    *,
    token_map: Tensor | None = None,
    index_scores: selection.IndexScores = "bf16",
    replay_start: int | None = None,
    images: vision.Images | None = None,
    feed: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Run one sequence through the backbone and return every tensor of interest.

    Args:
        weights: official tensor names to tensors in stored dtype, n-gram tables included; all on one device.
        config: the model.
        token_ids: N ids, N >= 1.
        token_map: [V] integers, token id to compressed id; needed where the model has n-gram tables.
        index_scores: "bf16" rounds index scores as the released code does, "fp32" does not.
        replay_start: first row of the decoder layers, max(0, N - W) for a prompt of N; None runs all layers on all
            rows. Rows decoded after a prompt keep the start of their prompt.
        images: patches and position types, where the prompt has images.
        feed: tensors `layers.{i}.x_in` and `layers.{i}.pre_in`, [1, N, ...]; each that is there replaces what layer i
            is given, so that layers can be compared one at a time.

    Returns:
        The tensors of `headrace trace` under its names, and besides `layers.{i}.pre_in`, `.pre_out` and, for index
        sources, `.index_score` (visible or not). `main_hidden` holds the draft taps.

    Raises:
        UserError: a token id is out of range, the token map is missing, or images come to a model without a tower.
    """
    device = weights["embed.weight"].device
    ids_T = torch.tensor(_checked(config, token_ids, token_map), dtype=torch.int64, device=device)
    image_T = torch.zeros_like(ids_T, dtype=torch.bool) if images is None else images.types.to(device) >= 0
    record = Recorder(len(token_ids))
    record.whole("input_ids", ids_T)
    h_TD = weights["embed.weight"][ids_T]
    if images is not None:
        h_TD = vision.overlay(weights, config, h_TD, images)
    record.whole("embeds", h_TD)
    if config.engram is not None and token_map is not None:
        rows = engram.hash_ids(config.engram, token_map, ids_T.tolist(), image_T.tolist())
        record.whole("engram_hash_ids", rows.to(device))
    flow = Flow(*streams.start(h_TD, config.num_streams), torch.arange(len(ids_T), device=device), image_T)
    flow = _layers(weights, config, flow, Options(index_scores, replay_start, feed), record)
    z_TD = rms_norm(streams.collapse(flow.x, flow.pre), weights["norm.weight"], config.norm_eps)
    record.rows("logits_all", linear_fp32(weights["head.weight"], z_TD))
    return record.tensors


def _checked(config: Config, token_ids: Sequence[int], token_map: Tensor | None) -> list[int]:
    """Return the ids as a list, or refuse them."""
    if len(token_ids) == 0:
        message = "token_ids is empty; a sequence needs at least one token."
        raise UserError(message, "token_ids")
    for position, token in enumerate(token_ids):
        if not 0 <= token < config.vocab_size:
            message = f"token id {token} at position {position} is outside 0..{config.vocab_size - 1}."
            raise UserError(message, "token_ids")
    if config.engram is not None and token_map is None:
        message = "the model has n-gram tables, so it needs a token map, and none was given."
        raise UserError(message, "token_map")
    return list(token_ids)


def _layers(weights: Weights, config: Config, flow: Flow, options: Options, record: Recorder) -> Flow:
    """Run all layers: n-gram injection, production of shared entries, the cut of a replay, the block."""
    shared, taps = layer.Shared(), {}
    for i in range(config.num_layers):
        name = f"layers.{i}"
        if config.engram is not None and i in config.engram.layer_ids:
            rows_TU = record.tensors["engram_hash_ids"][0, flow.positions, config.engram.layer_ids.index(i)]
            x_TMD = engram.inject(weights, f"{name}.engram", config, flow.x, rows_TU, flow.image)
            flow = flow._replace(x=x_TMD)
        computed_TMD = flow.x
        if options.feed is not None:
            flow = flow.fed(options.feed, name)
        if i in config.kv_sources:
            u_TD = layer.half_input(weights, f"{name}.attn_norm", config, flow.x, flow.pre)
            shared.entries = layer.produce(weights, config, i, u_TD)
            record.whole(f"{name}.compress_kv", shared.entries.values)
            record.whole(f"{name}.index_k", shared.entries.keys)
        if options.replay_start is not None and i == config.cut:
            flow, computed_TMD = flow.since(options.replay_start), computed_TMD[options.replay_start :]
        record.rows(f"{name}.x_in", computed_TMD)
        record.rows(f"{name}.pre_in", flow.pre)
        taps[i] = flow.x.float().mean(dim=1).bfloat16()
        flow = _block(weights, config, i, flow, shared, options.index_scores, record)
    if config.draft is not None:
        num_rows = len(flow.positions)
        record.rows("main_hidden", torch.cat([taps[i][-num_rows:] for i in config.draft.tap_layers], dim=-1))
    return flow


def _block(
    weights: Weights,
    config: Config,
    i: int,
    flow: Flow,
    shared: layer.Shared,
    index_scores: selection.IndexScores,
    record: Recorder,
) -> Flow:
    """Run the block of layer i on the rows of the flow, and record what it did."""
    name = f"layers.{i}"

    def attend_fn(u_TD: Tensor) -> Tensor:
        return layer.attend(weights, config, i, u_TD, flow.positions, shared, index_scores)

    def expert_fn(u_TD: Tensor) -> Tensor:
        picks = config.experts_per_token
        return moe.mixture(weights, f"{name}.ffn", config, u_TD, num_picks=picks, image_T=flow.image)

    (x_TMD, pre_TM), halves = layer.block(weights, name, config, (flow.x, flow.pre), attend_fn, expert_fn)
    for half, tensor in halves._asdict().items():
        record.rows(f"{name}.{half}", tensor)
    record.rows(f"{name}.x_out", x_TMD)
    record.rows(f"{name}.pre_out", pre_TM)
    if i in config.index_sources and shared.picks is not None:
        record.picks(name, shared.picks, config.index_topk, is_candidate_source=i == config.candidate_source)
    return flow._replace(x=x_TMD, pre=pre_TM)
