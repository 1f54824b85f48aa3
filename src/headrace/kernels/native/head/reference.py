"""The vocabulary head in PyTorch, in the kernels' order of summation."""

from torch import Tensor

from headrace.kernels.native.lanes_reference import rms_norm
from headrace.kernels.native.product.reference import multiply
from headrace.kernels.native.streams.reference import collapse
from headrace.kernels.native.tiles import Matrix


def logits(x_TMD: Tensor, pre_TM: Tensor, matrix: Matrix, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return logits [T, V] and the collapse before its norm [T, D]."""
    hidden = collapse(x_TMD, pre_TM)
    return multiply(rms_norm(hidden, norm, eps), matrix, is_quantised=False, is_float=True), hidden
