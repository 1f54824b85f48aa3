"""Hyper-connections: coefficients, collapse of the residual streams, expansion of a half's output.

Single-pass order (V4.1): a half uses its own `post` and `comb`, the next half uses its `pre`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.activation import sigmoid
from headrace.kernels.precision import widen
from headrace.kernels.product import linear_fp32


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
    num_rows, num_streams, _ = x_TMD.shape
    x = widen(x_TMD)
    mean_square = x.square().mean(-1).mean(-1, keepdim=True)
    m = num_streams
    c = linear_fp32(x.flatten(1), fn, base.shape[0]) * torch.rsqrt(mean_square + norm_eps)
    pre = sigmoid(c[:, :m] * scale[0] + base[:m]) + eps
    post = sigmoid(c[:, m : 2 * m] * scale[1] + base[m : 2 * m]) * 2.0
    logits = (c[:, 2 * m :] * scale[2] + base[2 * m :]).view(num_rows, m, m)
    return Mixes(pre, post, sinkhorn(logits, iterations, eps))


def collapse(x_TMD: Tensor, pre_TM: Tensor) -> Tensor:
    """Return sum over streams of pre * x as bfloat16 [T, D]; float32 products and sums in stream order."""
    out = widen(x_TMD[:, 0]) * pre_TM[:, 0:1]
    for stream in range(1, x_TMD.shape[1]):
        out += widen(x_TMD[:, stream]) * pre_TM[:, stream : stream + 1]
    return out.to(x_TMD.dtype)


def expand(out_TD: Tensor, x_TMD: Tensor, mix: Mixes) -> Tensor:
    """Return the new streams bf16(post_j * out + sum_i comb_ij * x_i), [T, M, D].

    Numerics: float32; the sum runs over the first index of comb.
    Source: spec section 3.2, Expand.
    """
    mixed = torch.bmm(mix.comb_TMM.transpose(1, 2), widen(x_TMD))
    return mixed.add_(widen(out_TD).unsqueeze(1) * mix.post_TM.unsqueeze(-1)).to(x_TMD.dtype)
