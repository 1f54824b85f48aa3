"""Hyper-connections: coefficients, collapse of the residual streams, expansion of a half's output.

Single-pass order (V4.1): a half uses its own `post` and `comb`, the next half uses its `pre`.

Gradients are written out: there are many small steps, and one pass over a tile of rows does the work of several of the
library's own. They have the dtype of what they belong to; sums over rows have one order for any number of threads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.kernels.activation import sigmoid
from headrace.kernels.precision import widen
from headrace.kernels.product import ROW_TILE, linear_fp32, pad_rows, weight_gradient

_TILE_ROWS = 128  # rows of streams worked on at once; several passes over larger pieces go to memory each time
_TILE_ELEMENTS = 1 << 18  # or more of them, up to so many values


@dataclass(frozen=True)
class Mixes:
    """Coefficients of one half: `pre_TM` and `post_TM` [T, M], `comb_TMM` [T, source, destination], float32."""

    pre_TM: Tensor
    post_TM: Tensor
    comb_TMM: Tensor


def _tiles(x_TMD: Tensor) -> Iterator[slice]:
    """Yield the rows of one tile after the other."""
    step = max(_TILE_ROWS, _TILE_ELEMENTS // max(1, x_TMD[:1].numel()) // ROW_TILE * ROW_TILE)
    for low in range(0, x_TMD.shape[0], step):
        yield slice(low, low + step)


def sinkhorn(logits_TMM: Tensor, iterations: int, eps: float) -> Tensor:
    """Normalise rows and columns in turn, starting with a row softmax and ending on columns.

    Args:
        logits_TMM: [T, M, M] float32, rows are source streams.
        iterations: column normalisations in total.
        eps: added to the matrix after the softmax and to every sum.

    Numerics: float32; sums over M run in a fixed order, so a token's matrix does not depend on T.
    Source: spec section 3.2.
    """
    return _sinkhorn(logits_TMM, iterations, eps)[0]


def _sinkhorn(logits_TMM: Tensor, iterations: int, eps: float) -> tuple[Tensor, list[Tensor]]:
    """Also return what was divided by, step for step: [M, 1, T] or [1, M, T]."""
    a = logits_TMM.permute(1, 2, 0).contiguous()  # [source, destination, T]: every step is elementwise over tokens
    a = torch.exp(a - a.amax(1, keepdim=True))
    small = torch.tensor(eps, dtype=a.dtype, device=a.device)  # a tensor once, not a number in every addition
    divisors = [_total(a, 1)]
    a = a / divisors[0] + small
    for step in range(2 * iterations - 1):
        divisors.append(_total(a, step % 2) + small)
        a = a / divisors[-1]
    return a.permute(2, 0, 1).contiguous(), divisors


def _sinkhorn_gradient(gradient_TMM: Tensor, comb_TMM: Tensor, divisors: list[Tensor], eps: float) -> Tensor:
    """Return the gradient of the logits; the matrix of every step is worked out again from the last, backwards."""
    g = gradient_TMM.permute(1, 2, 0).contiguous()
    a = comb_TMM.permute(1, 2, 0).contiguous()
    product = torch.empty_like(a)
    for step in range(len(divisors) - 2, -1, -1):
        divisor = divisors[step + 1]
        g.sub_(_total(torch.mul(g, a, out=product), step % 2)).div_(divisor)
        a.mul_(divisor)
    a.sub_(eps)
    g.sub_(_total(torch.mul(g, a, out=product), 1)).mul_(a)
    return g.permute(2, 0, 1)


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
    numbers = _Numbers(x_TMD.shape[1], norm_eps, iterations, eps)
    return Mixes(*_Mixes.apply(x_TMD, fn, base, scale, numbers))


@dataclass(frozen=True)
class _Numbers:
    """Streams M, eps of the statistic, Sinkhorn steps and eps."""

    streams: int
    norm_eps: float
    iterations: int
    eps: float

    def by_column(self, scale: Tensor) -> Tensor:
        """Return one factor per column of the product."""
        m = self.streams
        return torch.cat([part.expand(n) for part, n in zip(scale, (m, m, m * m), strict=True)])


class _Mixes(torch.autograd.Function):
    """Coefficients pre, post and comb."""

    @staticmethod
    def forward(
        ctx: Any, x_TMD: Tensor, fn: Tensor, base: Tensor, scale: Tensor, numbers: _Numbers
    ) -> tuple[Tensor, Tensor, Tensor]:
        m = numbers.streams
        scaled = base.new_empty((x_TMD.shape[0], base.shape[0]))
        factor = base.new_empty((x_TMD.shape[0], 1))
        for rows in _tiles(x_TMD):
            x = widen(x_TMD[rows])
            torch.rsqrt(x.square().mean(-1).mean(-1, keepdim=True) + numbers.norm_eps, out=factor[rows])
            torch.mul(linear_fp32(x.flatten(1), fn, base.shape[0]), factor[rows], out=scaled[rows])
        c = scaled * numbers.by_column(scale) + base
        pre = sigmoid(c[:, :m]) + numbers.eps
        post = sigmoid(c[:, m : 2 * m]) * 2.0
        comb, divisors = _sinkhorn(c[:, 2 * m :].unflatten(1, (m, m)), numbers.iterations, numbers.eps)
        ctx.save_for_backward(x_TMD, fn, scale, scaled, factor, pre, post, comb, *divisors)
        ctx.numbers = numbers
        return pre, post, comb

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_pre: Tensor, of_post: Tensor, of_comb: Tensor) -> tuple[Tensor | None, ...]:
        x_TMD, fn, scale, scaled, factor, pre, post, comb, *divisors = ctx.saved_tensors
        eps = ctx.numbers.eps
        plain = pre - eps
        of_pre = of_pre * plain * (1.0 - plain)
        of_post = of_post * post * (1.0 - 0.5 * post)
        of_logits = _sinkhorn_gradient(of_comb, comb, divisors, eps).flatten(1)
        of_c = torch.cat([of_pre, of_post, of_logits], 1)
        by_column = (of_c * scaled).sum(0)  # a column belongs to one thread; so the rows have one order
        m = ctx.numbers.streams
        of_scale = torch.stack([part.sum() for part in by_column.split([m, m, m * m])])
        of_scaled = of_c * ctx.numbers.by_column(scale)
        # the statistic is that of all values of a token: each gets its share in proportion to itself
        share = (of_scaled * scaled).sum(1, keepdim=True).mul_(factor.square()).div_(-x_TMD[0].numel())
        of_product = pad_rows(torch.nn.functional.pad(of_scaled * factor, (0, fn.shape[0] - of_c.shape[1])))
        of_x, of_fn = _product_gradients(x_TMD, fn, of_product, share)
        return of_x, of_fn, of_c.sum(0), of_scale, None


def _product_gradients(x_TMD: Tensor, fn: Tensor, of_product: Tensor, share_T1: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients of the streams and of `fn`; the first also gets `share` of the streams themselves."""
    of_x = torch.empty_like(x_TMD)
    for rows in _tiles(x_TMD):
        x = widen(x_TMD[rows]).flatten(1)
        part = torch.mm(of_product[rows], fn)[: x.shape[0]]
        torch.addcmul(part, x, share_T1[rows], out=part)
        of_x[rows] = part.view(x_TMD[rows].shape)
    return of_x, weight_gradient(of_product, pad_rows(widen(x_TMD).flatten(1)))


def collapse(x_TMD: Tensor, pre_TM: Tensor) -> Tensor:
    """Return sum over streams of pre * x as bfloat16 [T, D]; float32 products and sums in stream order."""
    out: Tensor = _Collapse.apply(x_TMD, pre_TM)
    return out


class _Collapse(torch.autograd.Function):
    """Weighted sum of the streams."""

    @staticmethod
    def forward(ctx: Any, x_TMD: Tensor, pre_TM: Tensor) -> Tensor:
        ctx.save_for_backward(x_TMD, pre_TM)
        out_TD = x_TMD.new_empty((x_TMD.shape[0], x_TMD.shape[2]))
        for rows in _tiles(x_TMD):
            out_TD[rows] = _weighted_sum(widen(x_TMD[rows]), pre_TM[rows])
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor, Tensor]:
        x_TMD, pre_TM = ctx.saved_tensors
        of_x, of_pre = torch.empty_like(x_TMD, dtype=pre_TM.dtype), torch.empty_like(pre_TM)
        for rows in _tiles(x_TMD):
            g = widen(gradient_TD[rows]).unsqueeze(1)
            torch.sum(widen(x_TMD[rows]) * g, -1, out=of_pre[rows])
            torch.mul(pre_TM[rows].unsqueeze(-1), g, out=of_x[rows])
        return of_x.to(x_TMD.dtype), of_pre


def _weighted_sum(x_TMD: Tensor, weights_TM: Tensor) -> Tensor:
    """Return sum over streams of weight * x, one stream after the other."""
    out = x_TMD[:, 0] * weights_TM[:, 0:1]
    product = torch.empty_like(out)
    for stream in range(1, x_TMD.shape[1]):
        out += torch.mul(x_TMD[:, stream], weights_TM[:, stream : stream + 1], out=product)
    return out


def expand(out_TD: Tensor, x_TMD: Tensor, mix: Mixes) -> Tensor:
    """Return the new streams bf16(post_j * out + sum_i comb_ij * x_i), [T, M, D].

    Numerics: float32; the sum runs over the first index of comb, one source stream after the other, as the vendor's
        does. Rows are taken in tiles that stay in cache.
    Source: spec section 3.2, Expand.
    """
    streams: Tensor = _Expand.apply(out_TD, x_TMD, mix.post_TM, mix.comb_TMM)
    return streams


class _Expand(torch.autograd.Function):
    """New streams from a half's output and the old streams."""

    @staticmethod
    def forward(ctx: Any, out_TD: Tensor, x_TMD: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
        ctx.save_for_backward(out_TD, x_TMD, post_TM, comb_TMM)
        streams = torch.empty_like(x_TMD)
        for rows in _tiles(x_TMD):
            streams[rows] = _expand_rows(out_TD[rows], x_TMD[rows], post_TM[rows], comb_TMM[rows])
        return streams

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TMD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out_TD, x_TMD, post_TM, comb_TMM = ctx.saved_tensors
        of_post, of_comb = torch.empty_like(post_TM), torch.empty_like(comb_TMM)
        of_x = torch.empty_like(x_TMD, dtype=post_TM.dtype)
        of_out = post_TM.new_empty((x_TMD.shape[0], 1, x_TMD.shape[2]))
        for rows in _tiles(x_TMD):
            g = widen(gradient_TMD[rows])
            torch.bmm(comb_TMM[rows], g, out=of_x[rows])
            torch.bmm(post_TM[rows].unsqueeze(1), g, out=of_out[rows])
            torch.bmm(widen(x_TMD[rows]), g.transpose(1, 2), out=of_comb[rows])
            torch.sum(g * widen(out_TD[rows]).unsqueeze(1), -1, out=of_post[rows])
        return of_out.squeeze(1).to(out_TD.dtype), of_x.to(x_TMD.dtype), of_post, of_comb


def _expand_rows(out_TD: Tensor, x_TMD: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
    x, comb = widen(x_TMD), comb_TMM.unsqueeze(-1)
    carried = comb[:, 0] * x[:, 0:1]
    product = torch.empty_like(carried)
    for stream in range(1, x.shape[1]):
        carried += torch.mul(comb[:, stream], x[:, stream : stream + 1], out=product)
    return torch.mul(post_TM.unsqueeze(-1), widen(out_TD).unsqueeze(1), out=product).add_(carried)
