"""Sinkhorn normalisation of the streams' mixing matrices, and its gradient."""

import torch
from torch import Tensor

from headrace.kernels.native.streams_gradient import STREAMS, StreamGradients, native_gradients


def sinkhorn(logits_TMM: Tensor, iterations: int, eps: float) -> Tensor:
    """Normalise rows and columns in turn, starting with a row softmax and ending on columns.

    Args:
        logits_TMM: [T, M, M] float32, rows are source streams.
        iterations: column normalisations in total.
        eps: added to the matrix after the softmax and to every sum.

    Numerics: float32; sums over M run in a fixed order, so a token's matrix does not depend on T.
    Source: spec section 3.2.
    """
    return sinkhorn_steps(logits_TMM, iterations, eps)[0]


def sinkhorn_steps(logits_TMM: Tensor, iterations: int, eps: float) -> tuple[Tensor, list[Tensor]]:
    """Also return what was divided by: all steps in one tensor, or step for step, [M, 1, T] or [1, M, T]."""
    a = logits_TMM.permute(1, 2, 0).contiguous()  # [source, destination, T]: every step is elementwise over tokens
    a = torch.exp(a - a.amax(1, keepdim=True))
    small = torch.tensor(eps, dtype=a.dtype, device=a.device)  # a tensor once, not a number in every addition
    divisors = [_total(a, 1)]
    a = a / divisors[0] + small
    native = _native(logits_TMM)
    if native is not None:
        comb, steps = native.sinkhorn(a, 2 * iterations - 1, eps)
        return comb, [steps]
    for step in range(2 * iterations - 1):
        divisors.append(_total(a, step % 2) + small)
        a = a / divisors[-1]
    return a.permute(2, 0, 1).contiguous(), divisors


def sinkhorn_gradient(gradient_TMM: Tensor, comb_TMM: Tensor, divisors: list[Tensor], eps: float) -> Tensor:
    """Return the gradient of the logits; the matrix of every step is worked out again from the last, backwards."""
    native = _native(comb_TMM)
    if native is not None:
        a, g = native.sinkhorn_gradient(gradient_TMM, comb_TMM, divisors[0])
    else:
        g = gradient_TMM.permute(1, 2, 0).contiguous()
        a = comb_TMM.permute(1, 2, 0).contiguous()
        for step in range(len(divisors) - 2, -1, -1):
            divisor = divisors[step + 1]
            g.sub_(_total(g * a, step % 2)).div_(divisor)
            a.mul_(divisor)
    a.sub_(eps)
    g.sub_(_total(g * a, 1)).mul_(a)
    return g.permute(2, 0, 1)


def _native(matrices_TMM: Tensor) -> StreamGradients | None:
    is_plain = matrices_TMM.dtype == torch.float32 and matrices_TMM.device.type == "cpu"
    return native_gradients() if is_plain and matrices_TMM.shape[1] == STREAMS else None


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
