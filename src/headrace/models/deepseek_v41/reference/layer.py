"""One layer: what sources share with the layers behind them, the attention of a layer, and the two halves of a block.

A *KV source* produces compressed entries and index keys for the layers up to the next source; an *index source* picks
entries that the layers up to the next one reuse, each for its own rows. `block` shows the timing of the stream mixes
and also serves the draft, which brings its own attention.

Source: specification sections 3.1, 3.3 and 3.7; released `inference/model.py`, `Block` and `Attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from headrace.core.errors import InternalError
from headrace.models.deepseek_v41.reference import attention, selection, streams
from headrace.models.deepseek_v41.reference.arithmetic import rms_norm
from headrace.models.deepseek_v41.reference.rope import frequencies

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from headrace.models.deepseek_v41.config import Config
    from headrace.models.deepseek_v41.reference.arithmetic import Weights

Part = TypeVar("Part")


class Entries(NamedTuple):
    """What a KV source produces, for the whole sequence.

    Attributes:
        values: [C, H] bfloat16 compressed entries.
        keys: [C, I] bfloat16 index keys.
    """

    values: Tensor
    keys: Tensor


class Picks(NamedTuple):
    """What an index source chooses, for the rows it ran on.

    Attributes:
        scores: [T, C] float32, of all entries, visible or not.
        picked: [T, C] bool, what the rows may attend to.
        candidates: [T, C] bool, what later index sources may pick from; None before the candidate source.
    """

    scores: Tensor
    picked: Tensor
    candidates: Tensor | None


@dataclass
class Shared:
    """The latest results of the source layers, None before the first; the layer loop owns it."""

    entries: Entries | None = None
    picks: Picks | None = None


class Halves(NamedTuple):
    """Inputs and outputs of the two halves of a block, [T, D] bfloat16 each."""

    attn_in: Tensor
    attn_out: Tensor
    ffn_in: Tensor
    ffn_out: Tensor


def half_input(weights: Weights, norm: str, config: Config, x_TMD: Tensor, pre_TM: Tensor) -> Tensor:
    """Collapse the streams with the pending pre-mix and normalise: the input of a half, [T, D] bfloat16."""
    return rms_norm(streams.collapse(x_TMD, pre_TM), weights[f"{norm}.weight"], config.norm_eps)


def produce(weights: Weights, config: Config, layer: int, u_TD: Tensor) -> Entries:
    """Compress the whole sequence at a KV source.

    Args:
        weights: official names to tensors.
        config: the model.
        layer: a member of `config.kv_sources`.
        u_TD: [N, D] bfloat16, attention input of all rows from position 0 on.
    """
    ratio = config.compress_ratios[layer]
    freqs = frequencies(config, ratio)
    prefix = f"layers.{layer}.attn"
    latent_CH = attention.latents(weights, f"{prefix}.compressor", config, u_TD, ratio)
    return Entries(
        attention.compressed_entries(latent_CH, ratio, freqs),
        selection.index_keys(weights, f"{prefix}.indexer", config, latent_CH, ratio, freqs),
    )


def pick(
    weights: Weights,
    config: Config,
    layer: int,
    inputs: tuple[Tensor, Tensor],
    positions_T: Tensor,
    shared: Shared,
    precision: selection.IndexScores,
) -> Picks:
    """Choose the entries of every row at an index source, and the candidate blocks at the candidate source.

    Args:
        weights: official names to tensors.
        config: the model.
        layer: a member of `config.index_sources`.
        inputs: attention input [T, D] and low-rank queries [T, R] of the rows.
        positions_T: [T] int64.
        shared: its entries and earlier candidates are read.
        precision: see `selection.index_scores`.
    """
    u_TD, latent_TR = inputs
    ratio = config.compress_ratios[layer]
    prefix = f"layers.{layer}.attn.indexer"
    q_TJI = selection.index_queries(weights, prefix, config, latent_TR, positions_T, frequencies(config, ratio))
    v_TJ = selection.head_weights(weights, prefix, config, u_TD)
    scores_TC = selection.index_scores(q_TJI, v_TJ, _given(shared.entries, layer).keys, precision)
    allowed_TC = selection.visible(positions_T, scores_TC.shape[1], ratio)
    candidates_TC = shared.picks.candidates if shared.picks else None
    if candidates_TC is not None:
        allowed_TC = allowed_TC & candidates_TC
    elif layer == config.candidate_source:
        # made from scores in front of this layer's own pick, which is not restricted
        blocks = config.candidate_blocks
        candidates_TC = selection.candidates(scores_TC, allowed_TC, config.candidate_block_size, blocks)
    picked_TC = selection.best(scores_TC.masked_fill(~allowed_TC, -torch.inf), config.index_topk)
    return Picks(scores_TC, picked_TC, candidates_TC)


def attend(
    weights: Weights,
    config: Config,
    layer: int,
    u_TD: Tensor,
    positions_T: Tensor,
    shared: Shared,
    precision: selection.IndexScores,
) -> Tensor:
    """Run the attention of a backbone layer over its rows.

    Args:
        weights: official names to tensors.
        config: the model.
        layer: layer id.
        u_TD: [T, D] bfloat16, attention input of the rows.
        positions_T: [T] int64, consecutive. Window entries exist for these rows only, so a replay cuts the window.
        shared: results of source layers; an index source replaces its picks.
        precision: see `selection.index_scores`.

    Returns:
        [T, D] bfloat16.
    """
    prefix, ratio = f"layers.{layer}.attn", config.compress_ratios[layer]
    freqs = frequencies(config, ratio)
    latent_TR = attention.latent_queries(weights, prefix, config, u_TD)
    q_TQH = attention.queries(weights, prefix, config, latent_TR, positions_T, freqs)
    entries_EH = attention.window_entries(weights, prefix, config, u_TD, positions_T, freqs)
    allowed_TE = attention.window_mask(positions_T, config.window)
    if ratio > 0:
        if layer in config.index_sources:
            shared.picks = pick(weights, config, layer, (u_TD, latent_TR), positions_T, shared, precision)
        entries_EH = torch.cat((entries_EH, _given(shared.entries, layer).values))
        allowed_TE = torch.cat((allowed_TE, _given(shared.picks, layer).picked), dim=1)
    o_TQH = attention.attend(q_TQH, entries_EH, allowed_TE, weights[f"{prefix}.attn_sink"])
    return attention.project_out(weights, prefix, config, o_TQH, positions_T, freqs)


def _given(part: Part | None, layer: int) -> Part:
    """Return what a source layer left, which a checked configuration guarantees."""
    if part is None:
        message = f"layer {layer} needs the entries of a source layer, and none ran before it."
        raise InternalError(message)
    return part


def block(
    weights: Weights,
    prefix: str,
    config: Config,
    flow: tuple[Tensor, Tensor],
    attend_fn: Callable[[Tensor], Tensor],
    expert_fn: Callable[[Tensor], Tensor],
) -> tuple[tuple[Tensor, Tensor], Halves]:
    """Run attention and experts between the stream mixes.

    Args:
        weights: official names to tensors.
        prefix: `layers.{i}` or `mtp.{i}`.
        config: the model.
        flow: streams [T, M, D] bfloat16 and the pending pre-mix [T, M] float32.
        attend_fn: attention input [T, D] to attention output [T, D].
        expert_fn: expert input [T, D] to expert output [T, D].

    Returns:
        The flow behind the block, and what went in and out of its halves.
    """
    x_TMD, pre_TM = flow
    attn_mix = streams.mixes(weights, f"{prefix}.hc_attn", config, x_TMD)
    attn_in = half_input(weights, f"{prefix}.attn_norm", config, x_TMD, pre_TM)
    attn_out = attend_fn(attn_in)
    x_TMD = streams.expand(attn_out, x_TMD, attn_mix)

    ffn_mix = streams.mixes(weights, f"{prefix}.hc_ffn", config, x_TMD)
    ffn_in = half_input(weights, f"{prefix}.ffn_norm", config, x_TMD, attn_mix.pre)
    ffn_out = expert_fn(ffn_in)
    x_TMD = streams.expand(ffn_out, x_TMD, ffn_mix)
    return (x_TMD, ffn_mix.pre), Halves(attn_in, attn_out, ffn_in, ffn_out)
