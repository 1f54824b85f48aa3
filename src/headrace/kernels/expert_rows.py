"""Rows sorted by expert: taking them from tokens, multiplying each by its expert's matrix, summing them per token.

The three have written-out gradients for dense experts (training). Gradients are gathered without atomic additions, and
those of matrices are summed in the order of rows, so threads do not change them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.kernels.precision import wide_dtype, widen
from headrace.kernels.product import add_over_rows, linear, pad_rows, product


@dataclass(frozen=True)
class Places:
    """Where the rows of an expert selection stand.

    `tokens_P` the token of every sorted row, `places_TK` the sorted rows of every token in the order of its experts,
    `counts` rows of every expert.
    """

    tokens_P: Tensor
    places_TK: Tensor
    counts: Sequence[int]


def take_rows(x_TD: Tensor, places: Places) -> Tensor:
    """Return the rows [P, D] of tokens [T, D]."""
    rows: Tensor = _TakeRows.apply(x_TD, places)
    return rows


def multiply_rows(x_PK: Tensor, matrices_ENK: Tensor, places: Places) -> Tensor:
    """Multiply every row by its expert's matrix: [P, N]. The gradient of an unused matrix is zero."""
    products: Tensor = _MultiplyRows.apply(x_PK, matrices_ENK, places)
    return products


def sum_rows(rows_PD: Tensor, places: Places) -> Tensor:
    """Return [T, D] float32: the sum of a token's rows, one expert after the other."""
    total: Tensor = _SumRows.apply(rows_PD, places)
    return total


def _sum_rows(rows_PD: Tensor, places_TK: Tensor) -> Tensor:
    total = widen(rows_PD.index_select(0, places_TK[:, 0]))
    for slot in range(1, places_TK.shape[1]):
        total += rows_PD.index_select(0, places_TK[:, slot])
    return total


class _TakeRows(torch.autograd.Function):
    """`take_rows`, whose gradient sums the rows of a token."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return x_TD.index_select(0, places.tokens_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_PD: Tensor) -> tuple[Tensor, None]:
        return _sum_rows(gradient_PD, ctx.places.places_TK).to(gradient_PD.dtype), None


class _SumRows(torch.autograd.Function):
    """`sum_rows`, whose gradient hands every row that of its token."""

    @staticmethod
    def forward(ctx: Any, rows_PD: Tensor, places: Places) -> Tensor:
        ctx.places, ctx.dtype = places, rows_PD.dtype
        return _sum_rows(rows_PD, places.places_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor, None]:
        return gradient_TD.to(ctx.dtype).index_select(0, ctx.places.tokens_P), None


class _MultiplyRows(torch.autograd.Function):
    """`multiply_rows`, with a product per expert on the way back too."""

    @staticmethod
    def forward(ctx: Any, x_PK: Tensor, matrices_ENK: Tensor, places: Places) -> Tensor:
        ctx.save_for_backward(x_PK, matrices_ENK)
        ctx.places = places
        out = x_PK.new_empty((x_PK.shape[0], matrices_ENK.shape[1]))
        for expert, rows in _slices(places.counts):
            out[rows] = linear(x_PK[rows], matrices_ENK[expert])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_PN: Tensor) -> tuple[Tensor, Tensor, None]:
        x_PK, matrices_ENK = ctx.saved_tensors
        of_x, of_matrices = torch.empty_like(x_PK), torch.zeros_like(matrices_ENK, dtype=wide_dtype(x_PK.dtype))
        for expert, rows in _slices(ctx.places.counts):
            gradient = gradient_PN[rows]
            of_x[rows] = product(pad_rows(gradient), matrices_ENK[expert].t())[: rows.stop - rows.start]
            add_over_rows(gradient, x_PK[rows], of_matrices[expert])
        return of_x, of_matrices.to(matrices_ENK.dtype), None


def _slices(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """Return used experts and where their rows stand."""
    found, low = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((expert, slice(low, low + count)))
        low += count
    return found
