"""The router in PyTorch, in the kernels' order of summation."""

import torch
from torch import Tensor

from headrace.kernels.native.lanes_reference import softplus, sqrt


def route(z_TE: Tensor, bias: Tensor, *, per_token: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return picked experts [T, K] and weights [T, K] of router products; `bias` is [E], or [T, E] by row."""
    scores = sqrt(softplus(z_TE))
    order = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    picked = order[:, :per_token].sort(-1).values
    chosen = scores.gather(1, picked)
    total = chosen[:, 0]
    for slot in range(1, per_token):
        total = total + chosen[:, slot]
    return picked, chosen / (total + 1e-20).unsqueeze(1) * scale
