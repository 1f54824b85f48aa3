"""Hyper-connections: coefficients, collapse of the residual streams, expansion of a half's output.

Single-pass order (V4.1): a half uses its own `post` and `comb`, the next half uses its `pre`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.activation import sigmoid
from headrace.kernels.precision import widen
from headrace.kernels.product import linear_fp32

_TILE_ROWS = 128  # rows of streams worked on at once; several passes over larger pieces go to memory each time


@dataclass(frozen=True)
class Mixes:
    """Coefficients of one half: `pre_TM` and `post_TM` [T, M], `comb_TMM` [T, source, destination], float32."""

    pre_TM: Tensor
    post_TM: Tensor
    comb_TMM: Tensor


def sinkhorn(logits_TMM: Tensor, iterations: int, eps: float) -> Tensor:
    """Normalise rows and columns in turn, starting with a row softmax and ending on columns.

    Args:
        logits_TMM: [T, M, M] float32, rows are source streams.
        iterations: column normalisations in total.
        eps: added to the matrix after the softmax and to every sum.

    Numerics: float32; sums over M run in a fixed order, so a token's matrix does not depend on T.
    Source: spec section 3.2.
    """
    a = logits_TMM.permute(1, 2, 0).contiguous()  # [source, destination, T]: every step is elementwise over tokens
    a = torch.exp(a - a.amax(1, keepdim=True))
    small = torch.tensor(eps, dtype=a.dtype, device=a.device)  # a tensor once, not a number in every addition
    a = a / _total(a, 1) + small
    a = a / (_total(a, 0) + small)
    for _ in range(iterations - 1):
        a = a / (_total(a, 1) + small)
        a = a / (_total(a, 0) + small)
    return a.permute(2, 0, 1).contiguous()


def _total(a: Tensor, dim: int) -> Tensor:
    """Sum a short dimension, keeping it, in an order that does not depend on the other dimensions.

    Up to four terms the library adds one after the other; with more it uses other partial sums for the last columns.
    """
    if a.shape[dim] <= 4:
        return a.sum(dim, keepdim=True)
    total = a.narrow(dim, 0, 1)
    for index in range(1, a.shape[dim]):
        total = total + a.narrow(dim, index, 1)
    return total


def mixes(
    x_TMD: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, iterations: int, eps: float
) -> Mixes:
    """Compute a half's coefficients from the streams before it.

    Args:
        x_TMD: [T, M, D] bfloat16 streams.
        fn: [(2 + M) * M, M * D] float32, padded by `pad_columns`.
        base: [(2 + M) * M] float32.
        scale: [3] float32, for pre, post and comb.
        norm_eps: eps of the statistic over all M * D values.
        iterations: Sinkhorn column normalisations.
        eps: Sinkhorn and `pre` offset.

    Numerics: float32; the product first, then the statistic.
    Source: spec section 3.2.
    """
    num_rows, m, _ = x_TMD.shape
    tiles = [_scaled_product(tile, fn, base.shape[0], norm_eps) for tile in x_TMD.split(_TILE_ROWS)]
    c = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
    # one factor per column: threads would split the sum over all rows that is the gradient of a single factor
    pre_scale, post_scale, comb_scale = (part.expand(n) for part, n in zip(scale, (m, m, m * m), strict=True))
    c = c * torch.cat([pre_scale, post_scale, comb_scale]) + base
    pre = sigmoid(c[:, :m]) + eps
    post = sigmoid(c[:, m : 2 * m]) * 2.0
    logits = c[:, 2 * m :].reshape(num_rows, m, m)
    return Mixes(pre, post, sinkhorn(logits, iterations, eps))


def _scaled_product(x_TMD: Tensor, fn: Tensor, columns: int, eps: float) -> Tensor:
    """Return fn times the flattened streams over their root mean square, [T, columns] float32."""
    x = widen(x_TMD)
    mean_square = x.square().mean(-1).mean(-1, keepdim=True)
    return linear_fp32(x.flatten(1), fn, columns) * torch.rsqrt(mean_square + eps)


def collapse(x_TMD: Tensor, pre_TM: Tensor) -> Tensor:
    """Return sum over streams of pre * x as bfloat16 [T, D]; float32 products and sums in stream order."""
    tiles = [_collapse_rows(*parts) for parts in zip(x_TMD.split(_TILE_ROWS), pre_TM.split(_TILE_ROWS), strict=True)]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _collapse_rows(x_TMD: Tensor, pre_TM: Tensor) -> Tensor:
    out = widen(x_TMD[:, 0]) * pre_TM[:, 0:1]
    for stream in range(1, x_TMD.shape[1]):
        out += widen(x_TMD[:, stream]) * pre_TM[:, stream : stream + 1]
    return out.to(x_TMD.dtype)


def expand(out_TD: Tensor, x_TMD: Tensor, mix: Mixes) -> Tensor:
    """Return the new streams bf16(post_j * out + sum_i comb_ij * x_i), [T, M, D].

    Numerics: float32; the sum runs over the first index of comb, one source stream after the other, as the vendor's
        does. Rows are taken in tiles that stay in cache.
    Source: spec section 3.2, Expand.
    """
    tiles = [
        _expand_rows(*parts)
        for parts in zip(
            out_TD.split(_TILE_ROWS),
            x_TMD.split(_TILE_ROWS),
            mix.post_TM.split(_TILE_ROWS),
            mix.comb_TMM.split(_TILE_ROWS),
            strict=True,
        )
    ]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _expand_rows(out_TD: Tensor, x_TMD: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
    x = widen(x_TMD)
    carried = comb_TMM[:, 0].unsqueeze(-1) * x[:, 0:1]
    for stream in range(1, x.shape[1]):
        carried += comb_TMM[:, stream].unsqueeze(-1) * x[:, stream : stream + 1]
    return (post_TM.unsqueeze(-1) * widen(out_TD).unsqueeze(1) + carried).to(x_TMD.dtype)
