"""Router: scores of a row's experts, the best of them, their weights. `experts` does this within its one call.

The product with the router's matrix is one of `product`; what follows it is `router.h`, which `experts` includes, and
`route` here calls it alone.

Numerics: float32; score sqrt(softplus(z)); the highest scores plus bias win, the lower expert of equal ones, NaN over
any number; weights are score / (sum + 1e-20) * scale, the sum over picked experts in ascending order.
Source: spec section 3.8.
"""

import ctypes

import torch
from torch import Tensor

from headrace.kernels.native.library import Library


def route(library: Library, z_TE: Tensor, bias_E: Tensor, *, per_token: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return picked experts [T, K] int64, ascending, and their weights [T, K] float32.

    Args:
        library: the kernels.
        z_TE: [T, E] float32, contiguous: products of the router.
        bias_E: [E] float32, added to scores for the choice alone.
        per_token: experts for a row.
        scale: factor of the weights.
    """
    rows, count = z_TE.shape
    scores, factor = z_TE.clone(), ctypes.c_double(scale)
    picked = torch.empty((rows, per_token), dtype=torch.int64)
    weights = torch.empty((rows, per_token), dtype=torch.float32)
    run = library.function("hr_route", 8)
    addresses = [tensor.data_ptr() for tensor in (scores, bias_E, picked, weights)]
    run(*addresses[:2], rows, count, per_token, ctypes.addressof(factor), *addresses[2:])
    return picked, weights
