"""Matrix products whose rows do not depend on how many rows, or threads, compute them together.

A library picks another summation order for one row than for many (a matrix-vector kernel, a split of the inner
dimension between threads), and for float32 also for the last few columns of a thread's share. So the same row can
come out with other bits. Every product here pads its rows to a multiple of `ROW_TILE`, and float32 weights have a
multiple of `COLUMN_TILE` columns; from there on the CPU library sums each value the same way for any number of rows
and threads. `tests/kernels/test_row_invariance.py` checks this at small and at released widths.

Gradients obey the same rule: that of `x` is a product of the same form, that of `weight` is summed over pieces of
`GRADIENT_ROWS` rows in order, because the library splits a long inner dimension between threads.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from headrace.kernels.precision import wide_dtype, widen

ROW_TILE = 8
COLUMN_TILE = 16
GRADIENT_ROWS = 512


def pad_rows(x_TK: Tensor) -> Tensor:
    """Return `x` with zero rows appended up to a multiple of `ROW_TILE` (the tensor itself if it fits already)."""
    missing = -x_TK.shape[0] % ROW_TILE
    if missing == 0:
        return x_TK
    padded = x_TK.new_zeros((x_TK.shape[0] + missing, x_TK.shape[1]))
    padded[: x_TK.shape[0]] = x_TK
    return padded


def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Multiply `x` by the transpose of `weight`.

    Args:
        x_TK: [T, K] float32 or bfloat16.
        weight_NK: [N, K], same dtype.

    Returns:
        [T, N] in the same dtype.

    Numerics: products and sums in float32, one rounding at the end; row-invariant.
    State: none.
    """
    if torch.is_grad_enabled() and (x_TK.requires_grad or weight_NK.requires_grad):
        product: Tensor = _Linear.apply(x_TK, weight_NK)
        return product
    return _linear(x_TK, weight_NK)


def _linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    num_rows = x_TK.shape[0]
    if num_rows == 0:
        return x_TK.new_zeros((0, weight_NK.shape[0]))
    return functional.linear(pad_rows(x_TK), weight_NK)[:num_rows]


class _Linear(torch.autograd.Function):
    """`linear` with gradients whose bits no number of rows and threads changes."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        return _linear(x_TK, weight_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TK, weight_NK = ctx.saved_tensors
        rows_TN = pad_rows(gradient_TN.contiguous())
        of_x = torch.mm(rows_TN, weight_NK)[: x_TK.shape[0]] if ctx.needs_input_grad[0] else None
        of_weight = weight_gradient(rows_TN, pad_rows(x_TK)) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


def weight_gradient(gradient_TN: Tensor, x_TK: Tensor) -> Tensor:
    """Return the sum over rows of gradient times input, [N, K]; both are padded by `pad_rows`."""
    num_rows = x_TK.shape[0]
    if num_rows <= GRADIENT_ROWS:
        return torch.mm(gradient_TN.t(), x_TK)
    total = x_TK.new_zeros((gradient_TN.shape[1], x_TK.shape[1]), dtype=wide_dtype(x_TK.dtype))
    for low in range(0, num_rows, GRADIENT_ROWS):
        rows = slice(low, low + GRADIENT_ROWS)
        total += torch.mm(gradient_TN[rows].t(), x_TK[rows])
    return total.to(x_TK.dtype)


def pad_columns(weight_NK: Tensor) -> Tensor:
    """Return float32 weights with zero output columns appended up to a multiple of `COLUMN_TILE`, for `linear_fp32`."""
    missing = -weight_NK.shape[0] % COLUMN_TILE
    if missing == 0:
        return widen(weight_NK)
    padded = weight_NK.new_zeros((weight_NK.shape[0] + missing, weight_NK.shape[1]), dtype=wide_dtype(weight_NK.dtype))
    padded[: weight_NK.shape[0]] = weight_NK
    return padded


def linear_fp32(x_TK: Tensor, weight_NK: Tensor, columns: int) -> Tensor:
    """Multiply in float32 whatever the dtype of `x`.

    Args:
        x_TK: [T, K].
        weight_NK: [N', K] float32 from `pad_columns`.
        columns: columns that are not padding.

    Returns:
        [T, columns] float32, contiguous rows if nothing was padded.
    """
    return linear(widen(x_TK), weight_NK)[:, :columns]


def grouped_linear(x_TGK: Tensor, weight_GNK: Tensor) -> Tensor:
    """Multiply every group of columns by its own matrix.

    Args:
        x_TGK: [T, G, K] bfloat16.
        weight_GNK: [G, N, K] bfloat16.

    Returns:
        [T, G * N] bfloat16, group by group.

    Numerics: as `linear`.
    Source: DeepSeek-V4.1-Flash, grouped low-rank output projection.
    """
    if torch.is_grad_enabled() and (x_TGK.requires_grad or weight_GNK.requires_grad):
        product: Tensor = _GroupedLinear.apply(x_TGK, weight_GNK)
        return product
    return _grouped_linear(x_TGK, weight_GNK)


def _pad_grouped(x_TGK: Tensor) -> Tensor:
    return pad_rows(x_TGK.flatten(1)).unflatten(1, x_TGK.shape[1:])


def _grouped_linear(x_TGK: Tensor, weight_GNK: Tensor) -> Tensor:
    num_rows = x_TGK.shape[0]
    num_groups, columns, _ = weight_GNK.shape
    out_GTN = torch.bmm(_pad_grouped(x_TGK).transpose(0, 1), weight_GNK.transpose(1, 2))
    return out_GTN.transpose(0, 1)[:num_rows].reshape(num_rows, num_groups * columns)


class _GroupedLinear(torch.autograd.Function):
    """`grouped_linear` with gradients like those of `_Linear`."""

    @staticmethod
    def forward(ctx: Any, x_TGK: Tensor, weight_GNK: Tensor) -> Tensor:
        ctx.save_for_backward(x_TGK, weight_GNK)
        return _grouped_linear(x_TGK, weight_GNK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TGK, weight_GNK = ctx.saved_tensors
        num_groups = x_TGK.shape[1]
        rows_TGN = pad_rows(gradient.contiguous()).unflatten(1, (num_groups, -1))
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = torch.bmm(rows_TGN.transpose(0, 1), weight_GNK).transpose(0, 1)[: x_TGK.shape[0]]
        if ctx.needs_input_grad[1]:
            padded = _pad_grouped(x_TGK)
            parts = [weight_gradient(rows_TGN[:, group], padded[:, group]) for group in range(num_groups)]
            of_weight = torch.stack(parts)
        return of_x, of_weight
