"""The order of tokens: larger value first, then lower id. No sort of a whole vocabulary where its head will do."""

import torch
from torch import Tensor

_FIRST_GUESS = 64
_GROWTH = 8


def largest_ids(values_V: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest values, [min(count, V)] int64, largest first.

    Args:
        values_V: [V] float32 without NaN.
        count: at least 1.

    Numerics: ties go to the lower id (`torch.topk` promises no order, so it only gives the threshold).
    """
    count = min(count, len(values_V))
    threshold = torch.topk(values_V, count, sorted=False).values.min()
    candidates = (values_V >= threshold).nonzero().squeeze(-1)
    order = torch.sort(values_V[candidates], descending=True, stable=True).indices
    return candidates[order[:count]]


def keep_top_p(probabilities_V: Tensor, top_p: float) -> Tensor:
    """Zero every token outside the smallest most probable set whose sum reaches `top_p` (ties to the lower id).

    Numerics: float32, summed from the most probable token on.
    """
    count = _FIRST_GUESS
    while True:
        ids = largest_ids(probabilities_V, count)
        values = probabilities_V[ids]
        sums = values.cumsum(-1)
        if count >= len(probabilities_V) or float(sums[-1]) >= top_p:
            break
        count *= _GROWTH
    kept = ids[: max(1, int((sums - values < top_p).sum()))]  # at least the most probable one
    out = torch.zeros_like(probabilities_V)
    out[kept] = probabilities_V[kept]
    return out


def keep_top_k(logits_V: Tensor, top_k: int) -> Tensor:
    """Return the logits with all but the `top_k` largest at -inf (ties to the lower id)."""
    if top_k >= len(logits_V):
        return logits_V
    kept = largest_ids(logits_V, top_k)
    out = torch.full_like(logits_V, -torch.inf)
    out[kept] = logits_V[kept]
    return out
