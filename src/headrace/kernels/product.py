"""Matrix products whose rows do not depend on how many rows, or threads, compute them together.

A library picks another summation order for one row than for many (a matrix-vector kernel, a split of the inner
dimension between threads), and for float32 also for the last few columns of a thread's share. So the same row can
come out with other bits. Every product here pads its rows to a multiple of `ROW_TILE`, and float32 weights have a
multiple of `COLUMN_TILE` columns; from there on the CPU library sums each value the same way for any number of rows
and threads. `tests/kernels/test_row_invariance.py` checks this at small and at released widths.

PyTorch has two libraries for float32 products on a CPU. Its default one takes half the vector width on some processors,
oneDNN does not. Products of float32 activations and all gradients go through oneDNN where it is there; those of
bfloat16 activations with float32 weights go through the default one. The dtype decides, in training as in serving.

Gradients obey the same rule: that of `x` is a product of the same form, that of `weight` is summed over pieces of rows
in order, because the library splits a long inner dimension between threads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from headrace.kernels.native.weight_gradient import add_weight_gradient
from headrace.kernels.precision import wide_dtype, widen

ROW_TILE = 8
COLUMN_TILE = 16
GRADIENT_ROWS = 512
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pad_rows(x_TK: Tensor) -> Tensor:
    """Return `x` with zero rows appended up to a multiple of `ROW_TILE` (the tensor itself if it fits already)."""
    missing = -x_TK.shape[0] % ROW_TILE
    if missing == 0:
        return x_TK
    padded = x_TK.new_zeros((x_TK.shape[0] + missing, x_TK.shape[1]))
    padded[: x_TK.shape[0]] = x_TK
    return padded


def product(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return `x` times the transpose of `weight`, [T, N], without a gradient; either may be a transpose.

    Numerics: sums in float32 (float64 from float64), one rounding; whole row tiles are row-invariant.
    """
    if _HAS_ONEDNN and x_TK.dtype == torch.float32 and x_TK.device.type == "cpu" and 0 not in x_TK.shape:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(x_TK), _dense(weight_NK), None, "none", [], "")
        return found
    return functional.linear(x_TK, weight_NK)


def _dense(matrix: Tensor) -> Tensor:
    """Return a matrix without gaps between its rows or columns: over others oneDNN is a hundred times slower."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


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
        found: Tensor = _Linear.apply(x_TK, weight_NK, product)
        return found
    return _linear(x_TK, weight_NK, product)


def default_linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Do the same with PyTorch's default library for every dtype: its batched products have the same bits."""
    if torch.is_grad_enabled() and (x_TK.requires_grad or weight_NK.requires_grad):
        found: Tensor = _Linear.apply(x_TK, weight_NK, functional.linear)
        return found
    return _linear(x_TK, weight_NK, functional.linear)


def _linear(x_TK: Tensor, weight_NK: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    num_rows = x_TK.shape[0]
    if num_rows == 0:
        return x_TK.new_zeros((0, weight_NK.shape[0]))
    return multiply(pad_rows(x_TK), weight_NK)[:num_rows]


class _Linear(torch.autograd.Function):
    """`linear` with gradients whose bits no number of rows and threads changes."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        return _linear(x_TK, weight_NK, multiply)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TK, weight_NK = ctx.saved_tensors
        rows_TN = gradient_TN.contiguous()
        of_x = product(pad_rows(rows_TN), weight_NK.t())[: x_TK.shape[0]] if ctx.needs_input_grad[0] else None
        of_weight = weight_gradient(rows_TN, x_TK) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


def weight_gradient(gradient_TN: Tensor, x_TK: Tensor) -> Tensor:
    """Return the sum over rows of gradient times input, [N, K] in the dtype of the input."""
    total = x_TK.new_zeros((gradient_TN.shape[1], x_TK.shape[1]), dtype=wide_dtype(x_TK.dtype))
    add_over_rows(gradient_TN, x_TK, total)
    return total.to(x_TK.dtype)


def add_over_rows(gradient_TN: Tensor, x_TK: Tensor, total_NK: Tensor) -> None:
    """Add the sum over rows of gradient times input to `total`, in the dtype of sums.

    Numerics: in order, over pieces of 256 rows where there is a kernel, and of `GRADIENT_ROWS` elsewhere.
    """
    if add_weight_gradient(gradient_TN, x_TK, total_NK):
        return
    gradient_TN, x_TK = pad_rows(gradient_TN), pad_rows(x_TK)
    for low in range(0, x_TK.shape[0], GRADIENT_ROWS):
        rows = slice(low, low + GRADIENT_ROWS)
        total_NK += product(gradient_TN[rows].t(), x_TK[rows].t())


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
        x_TK: [T, K]; not widened before, so that its dtype says in which order the sums are.
        weight_NK: [N', K] float32 from `pad_columns`.
        columns: columns that are not padding.

    Returns:
        [T, columns] float32, contiguous rows if nothing was padded.
    """
    if x_TK.dtype == weight_NK.dtype:
        return linear(x_TK, weight_NK)[:, :columns]
    return default_linear(widen(x_TK), weight_NK)[:, :columns]


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
        found: Tensor = _GroupedLinear.apply(x_TGK, weight_GNK)
        return found
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
        num_groups, of_x, of_weight = x_TGK.shape[1], None, None
        rows_TGN = gradient.unflatten(1, (num_groups, -1))
        if ctx.needs_input_grad[0]:
            padded = _pad_grouped(rows_TGN)
            parts = [product(padded[:, group], weight_GNK[group].t()) for group in range(num_groups)]
            of_x = torch.stack([part[: x_TGK.shape[0]] for part in parts], 1)
        if ctx.needs_input_grad[1]:
            of_weight = torch.stack(
                [weight_gradient(rows_TGN[:, group], x_TGK[:, group]) for group in range(num_groups)]
            )
        return of_x, of_weight
