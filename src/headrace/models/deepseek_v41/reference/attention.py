"""Attention of one layer: window entries, compressed entries, and the weighted sum with a sink.

One vector per entry is key and value of all heads. A row attends to the last W window entries (itself included) and to
the compressed entries that `selection` picked; both sets may cover the same token. Because a value carries the rotation
of its position, the output is turned back at the query's position.

Functions take the rows they are given: in a bounded replay the decoder is called with its rows only, and the window is
cut at the first of them because no earlier window entry exists. Read `selection` next.

Source: specification sections 3.3 and 3.4; released `inference/model.py`, `Attention` and `Compressor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace.models.deepseek_v41.reference.arithmetic import (
    dequantise_fp8,
    linear,
    linear_fp32,
    quantise_entry,
    quantise_window,
    rms_norm,
)
from headrace.models.deepseek_v41.reference.rope import rotate

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.deepseek_v41.config import Config
    from headrace.models.deepseek_v41.reference.arithmetic import Weights

LOWEST = -1e30  # where the running maximum starts; keeps a row without any entry finite


def latent_queries(weights: Weights, prefix: str, config: Config, u_TD: Tensor) -> Tensor:
    """Return the normalised low-rank queries that attention and indexer share, [T, R] bfloat16."""
    return rms_norm(linear(weights, f"{prefix}.wq_a", u_TD), weights[f"{prefix}.q_norm.weight"], config.norm_eps)


def queries(
    weights: Weights, prefix: str, config: Config, latent_TR: Tensor, positions_T: Tensor, freqs: Tensor
) -> Tensor:
    """Return rotated queries [T, Q, H] bfloat16; heads are not normalised one by one."""
    q_TQH = linear(weights, f"{prefix}.wq_b", latent_TR).unflatten(-1, (config.num_heads, config.head_dim))
    return rotate(q_TQH, positions_T, freqs)


def window_entries(
    weights: Weights, prefix: str, config: Config, u_TD: Tensor, positions_T: Tensor, freqs: Tensor
) -> Tensor:
    """Return one window entry per row, as the FP8 window cache would give it back.

    Args:
        weights: official names to tensors.
        prefix: for example `layers.3.attn`.
        config: the model.
        u_TD: [T, D] bfloat16, collapsed and normalised streams (for the draft: projected taps).
        positions_T: [T] int64.
        freqs: [P / 2] float32, of the layer.

    Returns:
        [T, H] bfloat16: projection, norm, rotation, then Q8 over all H elements, the rotated ones included.
    """
    entry = rms_norm(linear(weights, f"{prefix}.wkv", u_TD), weights[f"{prefix}.kv_norm.weight"], config.norm_eps)
    return quantise_window(rotate(entry, positions_T, freqs)).dequantise()


def latents(weights: Weights, prefix: str, config: Config, u_TD: Tensor, ratio: int) -> Tensor:
    """Compress neighbouring rows into one latent each; row j of the result stands for rows r j .. r j + r - 1.

    Args:
        weights: official names to tensors.
        prefix: for example `layers.2.attn.compressor`.
        config: the model.
        u_TD: [T, D] bfloat16, all rows of the sequence from position 0.
        ratio: r, rows per entry. Rows after the last full group give nothing yet.

    Returns:
        [floor(T / r), H] bfloat16, normalised, not rotated.

    Numerics: ratio 1 is a bfloat16 linear. Otherwise both projections are float32, the softmax runs over the r rows of
        a group for each element on its own, and the pooled sum is rounded to bfloat16 before the norm.
    """
    if ratio == 1:
        pooled = linear(weights, f"{prefix}.wkv", u_TD)
    else:
        full = u_TD[: u_TD.shape[0] // ratio * ratio]
        values = linear_fp32(weights[f"{prefix}.wkv.weight"], full).unflatten(0, (-1, ratio))
        gates = linear_fp32(weights[f"{prefix}.wgate.weight"], full).unflatten(0, (-1, ratio))
        pooled = (gates.softmax(dim=1) * values).sum(dim=1).bfloat16()
    return rms_norm(pooled, weights[f"{prefix}.norm.weight"], config.norm_eps)


def group_positions(num_entries: int, ratio: int, device: torch.device) -> Tensor:
    """Return the position of each entry's first token, [C] int64: what its rotation uses."""
    return torch.arange(num_entries, device=device) * ratio


def compressed_entries(latent_CH: Tensor, ratio: int, freqs: Tensor) -> Tensor:
    """Return entries [C, H] bfloat16 as the FP4 cache gives them back: rotated first, then Q4K over all H elements."""
    positions = group_positions(latent_CH.shape[0], ratio, latent_CH.device)
    return quantise_entry(rotate(latent_CH, positions, freqs)).dequantise()


def window_mask(positions_T: Tensor, window: int) -> Tensor:
    """Return which window entries each row sees: position p sees p - W + 1 .. p, as [T, T] bool."""
    distance = positions_T[:, None] - positions_T[None, :]
    return (distance >= 0) & (distance < window)


def attend(q_TQH: Tensor, entries_EH: Tensor, allowed_TE: Tensor, sink_Q: Tensor) -> Tensor:
    """Sum entries with softmax weights; a sink takes its share of the weight and gives no value.

    Args:
        q_TQH: [T, Q, H] bfloat16.
        entries_EH: [number of entries, H] bfloat16, keys and values at once.
        allowed_TE: [T, number of entries] bool.
        sink_Q: [Q] float32 logits, used without scaling.

    Returns:
        [T, Q, H] bfloat16; zero for a row that may see nothing.

    Numerics: scores, maximum and sums in float32; weights exp(score - row maximum) are rounded to bfloat16 before they
        multiply values, the denominator adds them unrounded. The sink has no part in the maximum. The released kernel
        walks over blocks of 64 entries with a running maximum, which rounds the weights of earlier blocks relative to
        an earlier maximum; up to 64 entries it is this function.
    """
    scale = q_TQH.shape[-1] ** -0.5
    out = torch.empty_like(q_TQH)
    for row, allowed_E in enumerate(allowed_TE):
        entries = entries_EH[allowed_E].float()
        scores = (q_TQH[row].float() @ entries.T) * scale
        top = functional.pad(scores, (0, 1), value=LOWEST).amax(dim=-1, keepdim=True)
        weight = (scores - top).exp()
        total = weight.sum(dim=-1, keepdim=True) + (sink_Q[:, None] - top).exp()
        out[row] = ((weight.bfloat16().float() @ entries) / total).bfloat16()
    return out


def project_out(
    weights: Weights, prefix: str, config: Config, o_TQH: Tensor, positions_T: Tensor, freqs: Tensor
) -> Tensor:
    """Turn head outputs back to position zero and project them in two low-rank steps.

    Args:
        weights: official names to tensors.
        prefix: for example `layers.3.attn`.
        config: the model.
        o_TQH: [T, Q, H] bfloat16.
        positions_T: [T] int64, positions of the queries.
        freqs: [P / 2] float32, of the layer.

    Returns:
        [T, D] bfloat16.

    Numerics: the first step is a bfloat16 product with weights dequantised to bfloat16 (its input is not quantised),
        one group of heads at a time; the second is an FP8 linear.
    """
    heads = rotate(o_TQH, positions_T, freqs, inverse=True)
    first = dequantise_fp8(weights[f"{prefix}.wo_a.weight"], weights[f"{prefix}.wo_a.scale"]).bfloat16().float()
    by_group = first.unflatten(0, (config.o_groups, config.o_lora_rank))
    grouped = heads.float().unflatten(1, (config.o_groups, -1)).flatten(2)
    z = torch.einsum("tgi,gri->tgr", grouped, by_group).bfloat16()
    return linear(weights, f"{prefix}.wo_b", z.flatten(1))
