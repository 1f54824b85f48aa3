"""Attention in PyTorch, in the kernels' order of summation; one row at a time."""

import torch
from torch import Tensor

from headrace.kernels.native.lanes_reference import exp, multiply_add, tree

_SMALLEST = 2.0**-126


def _flush(x: Tensor) -> Tensor:
    return torch.where(x.abs() < _SMALLEST, x * 0.0, x)  # a zero keeps its sign


def attend(q_QH: Tensor, keys_SH: Tensor, sink_Q: Tensor, scale: float) -> Tensor:
    """Return [Q, H] bfloat16 of rotated bfloat16 queries and the keys they see, not yet turned back."""
    pairs_q, pairs_k = (_flush(x.float()).unflatten(-1, (-1, 16, 2)) for x in (q_QH, keys_SH))
    lanes = torch.zeros((q_QH.shape[0], keys_SH.shape[0], 16))
    for step in range(pairs_q.shape[1]):
        for half in (1, 0):
            lanes = _flush(multiply_add(pairs_q[:, None, step, :, half], pairs_k[None, :, step, :, half], lanes))
    scores = tree(lanes) * scale
    count = scores.shape[1]
    peak = scores.amax(1, keepdim=True)
    weights = exp(torch.nn.functional.pad(scores, (0, -count % 16), value=float("-inf")) - peak)
    parts = torch.zeros((q_QH.shape[0], 16))
    for step in range(0, weights.shape[1], 16):
        parts = parts + weights[:, step : step + 16]
    total = tree(parts).unsqueeze(1) + exp(sink_Q.unsqueeze(1) - peak)
    rounded, keys = weights.to(torch.bfloat16).float(), _flush(keys_SH.float())
    value = torch.zeros((q_QH.shape[0], keys_SH.shape[1]))
    for place in range(count):
        value = _flush(multiply_add(rounded[:, place : place + 1], keys[place], value))
    return (value / total).to(torch.bfloat16)
