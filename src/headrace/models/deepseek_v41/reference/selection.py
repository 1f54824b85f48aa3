"""Which compressed entries a row may attend to: index keys, index scores, candidate blocks and top-k.

Layers that own an index produce one key per compressed entry; layers that own an index query score all keys and pick
the K best; other layers reuse the pick of their source. One layer may publish candidate blocks, and the index-only
layers behind it pick among those. All results here are boolean masks over the compressed entries of the sequence.

Source: specification sections 3.5 and 3.6; released `inference/model.py`, `Indexer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from headrace.models.deepseek_v41.reference.arithmetic import linear, quantise_index, rms_norm
from headrace.models.deepseek_v41.reference.attention import group_positions
from headrace.models.deepseek_v41.reference.rope import rotate

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.deepseek_v41.config import Config
    from headrace.models.deepseek_v41.reference.arithmetic import Weights

IndexScores = Literal["bf16", "fp32"]


def index_keys(weights: Weights, prefix: str, config: Config, latent_CH: Tensor, ratio: int, freqs: Tensor) -> Tensor:
    """Return one index key per compressed entry, as the FP4 cache would give it back.

    Args:
        weights: official names to tensors.
        prefix: for example `layers.2.attn.indexer`.
        config: the model.
        latent_CH: [C, H] bfloat16, latents before rotation.
        ratio: tokens per entry.
        freqs: [P / 2] float32, of the layer.

    Returns:
        [C, I] bfloat16: projection, norm, rotation at the group's first token, then Q4I.
    """
    key = rms_norm(linear(weights, f"{prefix}.wk", latent_CH), weights[f"{prefix}.k_norm.weight"], config.norm_eps)
    return quantise_index(rotate(key, group_positions(key.shape[0], ratio, key.device), freqs)).dequantise()


def index_queries(
    weights: Weights, prefix: str, config: Config, latent_TR: Tensor, positions_T: Tensor, freqs: Tensor
) -> Tensor:
    """Return index queries [T, J, I] bfloat16 from attention's own low-rank queries: rotated, then Q4I."""
    q_TJI = linear(weights, f"{prefix}.wq_b", latent_TR).unflatten(-1, (config.index_heads, config.index_head_dim))
    return quantise_index(rotate(q_TJI, positions_T, freqs)).dequantise()


def head_weights(weights: Weights, prefix: str, config: Config, u_TD: Tensor) -> Tensor:
    """Return the weight of every index head, [T, J] float32: a bfloat16 linear, then times (I x J)^-1/2."""
    scale = config.index_head_dim**-0.5 * config.index_heads**-0.5
    return linear(weights, f"{prefix}.weights_proj", u_TD).float() * scale


def index_scores(q_TJI: Tensor, v_TJ: Tensor, keys_CI: Tensor, precision: IndexScores) -> Tensor:
    """Score every entry for every row: sum over heads of v x max(0, query . key), visible or not.

    Args:
        q_TJI: [T, J, I] bfloat16 index queries.
        v_TJ: [T, J] float32 head weights.
        keys_CI: [C, I] bfloat16 index keys.
        precision: "bf16" rounds as the released code does; "fp32" keeps float32 throughout, as serving kernels do.

    Returns:
        [T, C] float32 (in "bf16" every score is a bfloat16 number).

    Numerics: "bf16" rounds the head weights, each dot product, each product of the two, and the sum over heads, which
        itself runs in float32. The two precisions pick other entries in a few per cent of the rows.
    """
    dots = torch.einsum("tji,ci->tjc", q_TJI.float(), keys_CI.float())
    if precision == "fp32":
        return (v_TJ[..., None] * dots.relu()).sum(dim=1)
    weighted = (v_TJ.bfloat16().float()[..., None] * dots.bfloat16().float().relu()).bfloat16()
    return weighted.float().sum(dim=1).bfloat16().float()


def visible(positions_T: Tensor, num_entries: int, ratio: int) -> Tensor:
    """Return which entries each row may see, [T, C] bool: those whose last token is at or before the row.

    Ratio 2: position 4 sees the entries of (0, 1) and (2, 3); position 5 also that of (4, 5).
    """
    last_token = group_positions(num_entries, ratio, positions_T.device) + ratio - 1
    return last_token[None, :] <= positions_T[:, None]


def best(scores_TC: Tensor, count: int) -> Tensor:
    """Mark the `count` highest scores of every row; of equal scores the lower position wins; -inf is never marked.

    Args:
        scores_TC: [T, C] float32.
        count: how many to mark at most.

    Returns:
        [T, C] bool.
    """
    # adding zero turns -0 into +0, which some sorts would otherwise place lower
    order = (scores_TC + 0.0).sort(dim=-1, descending=True, stable=True).indices[:, :count]
    marked = torch.zeros_like(scores_TC, dtype=torch.bool).scatter_(1, order, True)
    return marked & (scores_TC > -torch.inf)


def candidates(scores_TC: Tensor, visible_TC: Tensor, block_size: int, num_blocks: int) -> Tensor:
    """Mark the entries of the best blocks of every row; the block with the newest visible entry is always kept.

    Args:
        scores_TC: [T, C] float32, scores before the row's own top-k.
        visible_TC: [T, C] bool; entries a row does not see give no score to their block.
        block_size: entries per block.
        num_blocks: blocks kept per row at most.

    Returns:
        [T, C] bool: every entry of a kept block, visible to the row or not.
    """
    num_rows, num_entries = scores_TC.shape
    total = -(-num_entries // block_size)
    padded = torch.full((num_rows, total * block_size), -torch.inf, device=scores_TC.device)
    padded[:, :num_entries] = scores_TC.masked_fill(~visible_TC, -torch.inf)
    block_scores = padded.unflatten(1, (total, block_size)).amax(dim=-1)
    num_visible = visible_TC.sum(dim=1)
    for row in range(num_rows):
        if num_visible[row] > 0:
            block_scores[row, (num_visible[row] - 1) // block_size] = torch.inf
    return best(block_scores, num_blocks).repeat_interleave(block_size, dim=1)[:, :num_entries]


def positions_of(picked_TC: Tensor, width: int) -> Tensor:
    """List the marked entries of every row in ascending order, padded with -1: [T, width] int32."""
    listed = torch.full((picked_TC.shape[0], width), -1, dtype=torch.int32, device=picked_TC.device)
    for row, mask in enumerate(picked_TC):
        where = mask.nonzero().flatten()
        listed[row, : where.numel()] = where.to(torch.int32)
    return listed
