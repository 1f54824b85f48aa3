"""Norm, rotation and rounding of projected rows in PyTorch, in the kernels' order of summation."""

import torch
from torch import Tensor

from headrace.kernels.block_quant import decode_q8
from headrace.kernels.native.lanes_reference import rms_norm
from headrace.kernels.native.quantise.reference import quantise_q8
from headrace.kernels.native.rows import Finished
from headrace.kernels.rope import rotate


def finish(y: Tensor, q_norm: Tensor, kv_norm: Tensor, turn: tuple[Tensor, Tensor], eps: float) -> Finished:
    """Finish rows [T, R + H]; `turn` are cosines and sines."""
    latent, entry = y.split([q_norm.shape[0], kv_norm.shape[0]], 1)
    codes, scales = quantise_q8(rotate(rms_norm(entry, kv_norm, eps), *turn))
    latent = rms_norm(latent, q_norm, eps) if latent.shape[1] else latent
    return Finished(latent, decode_q8(codes, scales).to(torch.bfloat16), codes, scales)
