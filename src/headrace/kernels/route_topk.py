"""Router: scores, biased selection, weights of the selected experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.activation import softplus
from headrace.kernels.product import linear_fp32


@dataclass(frozen=True)
class Routes:
    """Selected experts of every token.

    `experts_TK` [T, K] int64 in ascending order, `weights_TK` [T, K] float32, `scores_TE` [T, E] float32 plain scores.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor


def route(x_TD: Tensor, gate_ED: Tensor, bias: Tensor, *, count: int, scale: float) -> Routes:
    """Select experts by biased score and weight them by their plain score.

    Args:
        x_TD: [T, D] bfloat16.
        gate_ED: [E, D] float32, padded by `pad_columns`.
        bias: [E] or [T, E] float32, added for selection only.
        count: experts per token.
        scale: factor of the normalised weights.

    Numerics: float32; sqrt(softplus(z)); equal biased scores go to the lower expert.
    Source: spec section 3.8.
    """
    scores = softplus(linear_fp32(x_TD, gate_ED, bias.shape[-1])).sqrt()
    order = torch.sort((scores + bias).detach(), dim=-1, descending=True, stable=True).indices
    return weigh(scores, order[:, :count].sort(-1).values, scale)


def weigh(scores_TE: Tensor, experts_TK: Tensor, scale: float) -> Routes:
    """Weight given experts (ascending per token) by their share of the selected scores, times `scale`.

    Also the way to replay a selection that was made earlier: the scores are dense, so their gradient is whole.
    """
    weights = scores_TE.gather(1, experts_TK)
    total = weights[:, 0:1]
    for slot in range(1, experts_TK.shape[1]):
        total = total + weights[:, slot : slot + 1]
    return Routes(experts_TK, weights / (total + 1e-20) * scale, scores_TE)
