"""Hyper-connections: coefficients, collapse of the residual streams, expansion of a half's output.

Single-pass order (V4.1): a half uses its own `post` and `comb`, the next half uses its `pre`.

Gradients are written out: there are many small steps, and one pass over a tile of rows does the work of several of the
library's own. They have the dtype of what they belong to; sums over rows have one order for any number of threads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.kernels.activation import sigmoid
from headrace.kernels.native.streams_gradient import stream_gradients
from headrace.kernels.precision import widen
from headrace.kernels.product import COLUMN_TILE, ROW_TILE, linear_fp32, pad_rows, product, weight_gradient
from headrace.kernels.sinkhorn import sinkhorn_gradient, sinkhorn_steps

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
    numbers = Numbers(x_TMD.shape[1], norm_eps, iterations, eps)
    return Mixes(*_Mixes.apply(x_TMD, fn, base, scale, numbers))


def open_half(
    x_TMD: Tensor, before_TM: Tensor, fn: Tensor, base: Tensor, scale: Tensor, numbers: "Numbers"
) -> tuple[Tensor, Tensor, Mixes]:
    """Do `mixes` and `collapse` of the same streams, with one gradient for both and for what comes after.

    Args:
        x_TMD: [T, M, D] streams.
        before_TM: [T, M] float32, pre-mix of the half before.
        fn: see `mixes`, like `base` and `scale`.
        base: ...
        scale: ...
        numbers: the others.

    Returns:
        The streams as they were, for `expand`, so that their gradient is not a sum of three; the collapse [T, D]; the
        coefficients.
    """
    streams, collapsed, *found = _Open.apply(x_TMD, before_TM, fn, base, scale, numbers)
    return streams, collapsed, Mixes(*found)


@dataclass(frozen=True)
class Numbers:
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
        ctx: Any, x_TMD: Tensor, fn: Tensor, base: Tensor, scale: Tensor, numbers: Numbers
    ) -> tuple[Tensor, Tensor, Tensor]:
        (pre, post, comb), kept = _coefficients(x_TMD, fn, base, scale, numbers)
        ctx.save_for_backward(x_TMD, fn, scale, pre, post, comb, *kept)
        ctx.numbers = numbers
        return pre, post, comb

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_pre: Tensor, of_post: Tensor, of_comb: Tensor) -> tuple[Tensor | None, ...]:
        x_TMD, fn, scale, *found = ctx.saved_tensors
        back = _coefficient_gradients((of_pre, of_post, of_comb), found, scale, x_TMD[0].numel(), ctx.numbers)
        of_x, of_fn = _product_gradients(x_TMD, fn, back)
        return of_x, of_fn, back.of_base, back.of_scale, None


class _Open(torch.autograd.Function):
    """Streams passed on, their collapse with another half's pre-mix, and the coefficients; one gradient for all."""

    @staticmethod
    def forward(
        ctx: Any, x_TMD: Tensor, before_TM: Tensor, fn: Tensor, base: Tensor, scale: Tensor, numbers: Numbers
    ) -> tuple[Tensor, ...]:
        (pre, post, comb), kept = _coefficients(x_TMD, fn, base, scale, numbers)
        ctx.save_for_backward(x_TMD, before_TM, fn, scale, pre, post, comb, *kept)
        ctx.numbers = numbers
        return x_TMD.view_as(x_TMD), _collapse(x_TMD, before_TM), pre, post, comb

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_streams: Tensor, of_collapsed: Tensor, *of_mixes: Tensor) -> tuple[Tensor | None, ...]:
        x_TMD, before_TM, fn, scale, *found = ctx.saved_tensors
        back = _coefficient_gradients(of_mixes, found, scale, x_TMD[0].numel(), ctx.numbers)
        native = stream_gradients(x_TMD)
        if native is None:
            of_x, of_fn = _product_gradients(x_TMD, fn, back)
            of_more, of_before = _collapse_gradients(x_TMD, before_TM, of_collapsed)
            of_x = (of_x + of_more).add_(of_streams)
        else:
            of_product = back.of_product[:, : back.of_base.shape[0]]
            given = (of_streams, of_collapsed, x_TMD, before_TM, of_product[: len(x_TMD)], back.share_T1, fn)
            of_x, of_before = native.open_gradient(*(one.contiguous() for one in given))
            of_fn = weight_gradient(back.of_product[: len(x_TMD)], x_TMD.flatten(1))
        return of_x, of_before, of_fn, back.of_base, back.of_scale, None


def _coefficients(
    x_TMD: Tensor, fn: Tensor, base: Tensor, scale: Tensor, numbers: Numbers
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor]]:
    """Return pre, post and comb, and what their gradients need besides."""
    m = numbers.streams
    scaled = base.new_empty((x_TMD.shape[0], base.shape[0]))
    factor = base.new_empty((x_TMD.shape[0], 1))
    for rows in _tiles(x_TMD):
        x = widen(x_TMD[rows])
        torch.rsqrt(x.square().mean(-1).mean(-1, keepdim=True) + numbers.norm_eps, out=factor[rows])
        torch.mul(linear_fp32(x_TMD[rows].flatten(1), fn, base.shape[0]), factor[rows], out=scaled[rows])
    c = scaled * numbers.by_column(scale) + base
    pre = sigmoid(c[:, :m]) + numbers.eps
    post = sigmoid(c[:, m : 2 * m]) * 2.0
    comb, divisors = sinkhorn_steps(c[:, 2 * m :].unflatten(1, (m, m)), numbers.iterations, numbers.eps)
    return (pre, post, comb), [scaled, factor, *divisors]


@dataclass(frozen=True)
class _Back:
    """Gradients behind the coefficients.

    `of_product` [T', C'] of the product with `fn`, padded like it; `share_T1` [T, 1], what the gradient of a token's
    values has of the values themselves, through the statistic; `of_base` [C] and `of_scale` [3].
    """

    of_product: Tensor
    share_T1: Tensor
    of_base: Tensor
    of_scale: Tensor


def _coefficient_gradients(
    of_mixes: Sequence[Tensor], found: Sequence[Tensor], scale: Tensor, values: int, numbers: Numbers
) -> _Back:
    """Return gradients of product, statistic, base and scale; `values` is how many the statistic is over."""
    (of_pre, of_post, of_comb), (pre, post, comb, scaled, factor, *divisors) = of_mixes, found
    m = numbers.streams
    plain = pre - numbers.eps
    of_pre = of_pre * plain * (1.0 - plain)
    of_post = of_post * post * (1.0 - 0.5 * post)
    of_logits = sinkhorn_gradient(of_comb, comb, divisors, numbers.eps).flatten(1)
    of_c = torch.cat([of_pre, of_post, of_logits], 1)
    by_column = (of_c * scaled).sum(0)  # a column belongs to one thread; so the rows have one order
    of_scale = torch.stack([part.sum() for part in by_column.split([m, m, m * m])])
    of_scaled = of_c * numbers.by_column(scale)
    # the statistic is that of all values of a token: each gets its share in proportion to itself
    share = (of_scaled * scaled).sum(1, keepdim=True).mul_(factor.square()).div_(-values)
    missing = -of_c.shape[1] % COLUMN_TILE
    of_product = pad_rows(torch.nn.functional.pad(of_scaled * factor, (0, missing)))
    return _Back(of_product, share, of_c.sum(0), of_scale)


def _product_gradients(x_TMD: Tensor, fn: Tensor, back: _Back) -> tuple[Tensor, Tensor]:
    """Return gradients of the streams and of `fn`; the first also gets `share` of the streams themselves."""
    of_x = torch.empty_like(x_TMD)
    for rows in _tiles(x_TMD):
        x = widen(x_TMD[rows]).flatten(1)
        part = product(back.of_product[rows], fn.t())[: x.shape[0]]
        torch.addcmul(part, x, back.share_T1[rows], out=part)
        of_x[rows] = part.view(x_TMD[rows].shape)
    return of_x, weight_gradient(back.of_product[: len(x_TMD)], widen(x_TMD).flatten(1))


def collapse(x_TMD: Tensor, pre_TM: Tensor) -> Tensor:
    """Return sum over streams of pre * x as bfloat16 [T, D]; float32 products and sums in stream order."""
    out: Tensor = _Collapse.apply(x_TMD, pre_TM)
    return out


class _Collapse(torch.autograd.Function):
    """Weighted sum of the streams."""

    @staticmethod
    def forward(ctx: Any, x_TMD: Tensor, pre_TM: Tensor) -> Tensor:
        ctx.save_for_backward(x_TMD, pre_TM)
        return _collapse(x_TMD, pre_TM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor, Tensor]:
        x_TMD, pre_TM = ctx.saved_tensors
        return _collapse_gradients(x_TMD, pre_TM, gradient_TD)


def _collapse_gradients(x_TMD: Tensor, pre_TM: Tensor, gradient_TD: Tensor) -> tuple[Tensor, Tensor]:
    of_x, of_pre = torch.empty_like(x_TMD, dtype=pre_TM.dtype), torch.empty_like(pre_TM)
    for rows in _tiles(x_TMD):
        g = widen(gradient_TD[rows]).unsqueeze(1)
        torch.sum(widen(x_TMD[rows]) * g, -1, out=of_pre[rows])
        torch.mul(pre_TM[rows].unsqueeze(-1), g, out=of_x[rows])
    return of_x.to(x_TMD.dtype), of_pre


def _collapse(x_TMD: Tensor, pre_TM: Tensor) -> Tensor:
    native = stream_gradients(x_TMD)
    if native is not None:
        return native.collapse(x_TMD, pre_TM.contiguous())
    out_TD = x_TMD.new_empty((x_TMD.shape[0], x_TMD.shape[2]))
    for rows in _tiles(x_TMD):
        out_TD[rows] = _weighted_sum(widen(x_TMD[rows]), pre_TM[rows])
    return out_TD


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
        native = stream_gradients(x_TMD)
        if native is not None:
            return native.expand(out_TD.contiguous(), x_TMD, post_TM.contiguous(), comb_TMM.contiguous())
        streams = torch.empty_like(x_TMD)
        for rows in _tiles(x_TMD):
            streams[rows] = _expand_rows(out_TD[rows], x_TMD[rows], post_TM[rows], comb_TMM[rows])
        return streams

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TMD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out_TD, x_TMD, post_TM, comb_TMM = ctx.saved_tensors
        native = stream_gradients(x_TMD)
        if native is not None:
            given = (gradient_TMD, out_TD, x_TMD, post_TM, comb_TMM)
            return native.expand_gradient(*(one.contiguous() for one in given))
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
