"""The draft module: a few blocks that propose a block of tokens in one pass, and a small sequential head.

Context entries come from the backbone's taps, one per position and stage; the block's own tokens see that context and
each other in both directions. Read `layer.block` first: the stages are ordinary blocks with another attention.

Source: specification section 3.11; released `inference/model.py`, `MTPBlock` and the draft step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.reference import attention, layer, moe, streams
from headrace.models.deepseek_v41.reference.arithmetic import linear, linear_fp32, rms_norm
from headrace.models.deepseek_v41.reference.rope import frequencies

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.deepseek_v41.config import Config, Draft
    from headrace.models.deepseek_v41.reference.arithmetic import Weights


class Drafted(NamedTuple):
    """Greedy proposals for the tokens after a known one.

    Attributes:
        ids: [X] int64 proposals; the first follows the known token.
        logits: [X, V] float32, base logits plus the Markov bias of the token before.
        confidence: [X] float32 raw logits; their sigmoid estimates that a proposal is accepted if all before it are.
    """

    ids: Tensor
    logits: Tensor
    confidence: Tensor


def draft(
    weights: Weights, config: Config, taps_TA: Tensor, known_token: int, position: int, *, first_row: int = 0
) -> Drafted:
    """Propose the tokens after a known token.

    Args:
        weights: official names to tensors.
        config: the model.
        taps_TA: [T, taps x D] bfloat16, `main_hidden` from position 0 to at least `position`.
        known_token: the token at position + 1, chosen by the backbone.
        position: p, last position that the backbone has processed.
        first_row: first position with taps; the start of a bounded replay, or 0.

    Raises:
        UserError: the model has no draft module.

    Numerics: base and Markov logits in float32; greedy, of equal logits the lower id.
    """
    if config.draft is None:
        message = "the model has no draft module (block size 0), so it cannot propose tokens."
        raise UserError(message, "draft")
    context = torch.arange(max(first_row, position - config.window + 1), position + 1, device=taps_TA.device)
    main_TD = rms_norm(
        linear(weights, "mtp.0.main_proj", taps_TA[context]), weights["mtp.0.main_norm.weight"], config.norm_eps
    )
    ids = torch.full((config.draft.block_size,), config.draft.noise_token_id, device=taps_TA.device)
    ids[0] = known_token
    flow = streams.start(weights["embed.weight"][ids], config.num_streams)
    for stage in range(config.draft.num_layers):
        flow = _stage(weights, config, config.draft, stage, flow, (main_TD, context))
    return _propose(weights, config, config.draft, streams.collapse(*flow), known_token)


def _stage(
    weights: Weights,
    config: Config,
    settings: Draft,
    stage: int,
    flow: tuple[Tensor, Tensor],
    context: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Run one draft block.

    Args:
        weights: official names to tensors.
        config: the model.
        settings: its draft settings.
        stage: number of the block.
        flow: streams [X, M, D] and pre-mix [X, M] of the block's tokens.
        context: projected taps [c, D], the same for every stage, and their positions [c].
    """
    name = f"mtp.{stage}"
    freqs = frequencies(config, config.compress_ratios[config.num_layers + stage])
    main_TD, past = context
    positions = past[-1] + 1 + torch.arange(settings.block_size, device=past.device)

    def attend_fn(u_XD: Tensor) -> Tensor:
        prefix = f"{name}.attn"
        latent = attention.latent_queries(weights, prefix, config, u_XD)
        q = attention.queries(weights, prefix, config, latent, positions, freqs)
        before = attention.window_entries(weights, prefix, config, main_TD, past, freqs)
        own = attention.window_entries(weights, prefix, config, u_XD, positions, freqs)
        entries = torch.cat((before, own))
        # every token of the block sees the whole context and the whole block
        allowed = torch.ones(len(positions), len(entries), dtype=torch.bool, device=past.device)
        o = attention.attend(q, entries, allowed, weights[f"{prefix}.attn_sink"])
        return attention.project_out(weights, prefix, config, o, positions, freqs)

    def expert_fn(u_XD: Tensor) -> Tensor:
        picks = settings.experts_per_token
        return moe.mixture(weights, f"{name}.ffn", config, u_XD, num_picks=picks, image_T=None)

    return layer.block(weights, name, config, flow, attend_fn, expert_fn)[0]


def _propose(weights: Weights, config: Config, settings: Draft, y_XD: Tensor, known_token: int) -> Drafted:
    """Turn the collapsed streams of the last stage [X, D] into proposals, one after the other."""
    last = f"mtp.{settings.num_layers - 1}"
    base_XV = linear_fp32(weights["head.weight"], rms_norm(y_XD, weights[f"{last}.norm.weight"], config.norm_eps))
    previous, ids, logits, confidence = known_token, [], [], []
    for i in range(settings.block_size):
        markov = weights[f"{last}.markov_head.embed.weight"][previous]
        logits.append(base_XV[i] + linear_fp32(weights[f"{last}.markov_head.head.weight"], markov[None])[0])
        # the streams in front of the norm, then the embedding of the token before
        seen = torch.cat((y_XD[i], markov))
        confidence.append(linear_fp32(weights[f"{last}.confidence_head.proj.weight"], seen[None])[0, 0])
        previous = int(logits[-1].argmax())
        ids.append(previous)
    return Drafted(torch.tensor(ids, device=y_XD.device), torch.stack(logits), torch.stack(confidence))
