"""Matrix products whose rows do not depend on how many rows, or threads, compute them together.

A library picks another summation order for one row than for many (a matrix-vector kernel, a split of the inner
dimension between threads), and for float32 also for the last few columns of a thread's share. So the same row can
come out with other bits. Every product here pads its rows to a multiple of `ROW_TILE`, and float32 weights have a
multiple of `COLUMN_TILE` columns; from there on the CPU library sums each value the same way for any number of rows
and threads. `tests/kernels/test_row_invariance.py` checks this at small and at released widths.
"""

import torch
from torch import Tensor
from torch.nn import functional

from headrace.kernels.precision import widen

ROW_TILE = 8
COLUMN_TILE = 16


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
    num_rows = x_TK.shape[0]
    if num_rows == 0:
        return x_TK.new_zeros((0, weight_NK.shape[0]))
    return functional.linear(pad_rows(x_TK), weight_NK)[:num_rows]


def pad_columns(weight_NK: Tensor) -> Tensor:
    """Return float32 weights with zero output columns appended up to a multiple of `COLUMN_TILE`, for `linear_fp32`."""
    missing = -weight_NK.shape[0] % COLUMN_TILE
    weight = widen(weight_NK)
    return torch.cat([weight, weight.new_zeros((missing, weight.shape[1]))]) if missing else weight


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
    num_rows, num_groups, width = x_TGK.shape
    rows = pad_rows(x_TGK.reshape(num_rows, num_groups * width)).view(-1, num_groups, width)
    out_GTN = torch.bmm(rows.transpose(0, 1), weight_GNK.transpose(1, 2))
    return out_GTN.transpose(0, 1)[:num_rows].reshape(num_rows, num_groups * weight_GNK.shape[1])
