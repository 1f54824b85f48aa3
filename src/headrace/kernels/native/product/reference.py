"""Products in PyTorch, in the kernels' order of summation."""

import torch
from torch import Tensor

from headrace.kernels.block_quant import e2m1_values, e4m3_values, encode_q8
from headrace.kernels.native.tiles import FP4, FP8, GROUP, Matrix, stored

_SMALLEST = 2.0**-126


def multiply(x_TK: Tensor, matrix: Matrix, *, is_quantised: bool, is_float: bool = False) -> Tensor:
    """Multiply bfloat16 rows by a matrix; bfloat16, or float32 if asked for."""
    weights, factors = _weights(matrix)
    if is_quantised:
        codes, scales = encode_q8(x_TK)
        values, of_rows = e4m3_values(codes).float(), _powers(scales)
    else:
        values, of_rows = x_TK.float(), torch.ones((x_TK.shape[0], matrix.width // GROUP))
    is_flushed = matrix.kind != FP4
    if is_flushed:
        values, weights = _flush(values), _flush(weights)
    total = torch.zeros((x_TK.shape[0], matrix.rows))
    for group in range(matrix.width // GROUP):
        part = torch.zeros_like(total)
        for column in range(group * GROUP, (group + 1) * GROUP):
            place = column ^ 1  # the odd column of a pair first
            part = multiply_add(values[:, place : place + 1], weights[:, place], part, is_flushed)
        scale = of_rows[:, group : group + 1] * factors[:, group]
        scale = _flush(scale) if is_flushed else scale
        total = multiply_add(part, scale, total, is_flushed)
    return total if is_float else total.to(torch.bfloat16)


def multiply_add(a: Tensor, b: Tensor, total: Tensor, is_flushed: bool = False) -> Tensor:
    """Return a * b + total rounded once to float32."""
    wide = (a.double() * b.double() + total.double()).float()
    return _flush(wide) if is_flushed else wide


def _flush(x: Tensor) -> Tensor:
    return torch.where(x.abs() < _SMALLEST, x * 0.0, x)  # a zero keeps its sign


def _powers(scales: Tensor) -> Tensor:
    return torch.exp2(scales.double() - 127.0).float()


def _weights(matrix: Matrix) -> tuple[Tensor, Tensor]:
    """Return unscaled weights [N, K] and factors [N, K / 32], float32."""
    values, scales = stored(matrix)
    if matrix.kind == FP4 and scales is not None:
        return e2m1_values(values).float(), _powers(scales)
    if matrix.kind == FP8 and scales is not None:
        return e4m3_values(values).float(), _powers(scales).repeat_interleave(GROUP, 0)[: matrix.rows]
    return values.float(), torch.ones((matrix.rows, matrix.width // GROUP))
