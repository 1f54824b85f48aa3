"""Entries and index keys in PyTorch, in the kernels' order of summation."""

import torch
from torch import Tensor

from headrace.kernels.block_quant import encode_q4i, encode_q4k
from headrace.kernels.native.lanes_reference import exp, multiply_add, rms_norm
from headrace.kernels.native.product.reference import multiply
from headrace.kernels.native.tiles import Matrix
from headrace.kernels.rope import rotate


def pool(values_P2H: Tensor, gates_P2H: Tensor) -> Tensor:
    """Pool pairs [P, 2, H] float32 to bfloat16 [P, H]."""
    raw = exp(gates_P2H - gates_P2H.amax(1, keepdim=True))
    weights = raw / (raw[:, :1] + raw[:, 1:])
    first = weights[:, 0] * values_P2H[:, 0]
    return multiply_add(weights[:, 1], values_P2H[:, 1], first).to(torch.bfloat16)


def store(
    latents_CH: Tensor, weights: tuple[Tensor, Matrix, Tensor], turn: tuple[Tensor, Tensor], eps: float
) -> tuple[Tensor, ...]:
    """Return the four planes' bytes of latents [C, H]; `weights` are norm, key matrix and key norm."""
    norm, key, key_norm = weights
    latents = rms_norm(latents_CH, norm, eps)
    keys = rms_norm(multiply(latents, key, is_quantised=False), key_norm, eps)
    return *encode_q4k(rotate(latents, *turn)), *encode_q4i(rotate(keys, *turn))
