"""What `lanes.h` does, in PyTorch and to the last bit: the references of kernels are made of these."""

import torch
from torch import Tensor

_EXP = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG = (
    *(-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)


def multiply_add(a: Tensor | float, b: Tensor | float, total: Tensor | float) -> Tensor:
    """Return a * b + total rounded once to float32."""
    wide = [torch.as_tensor(part, dtype=torch.float32).double() for part in (a, b, total)]
    return (wide[0] * wide[1] + wide[2]).float()


def lane_sum(terms: Tensor, squares_of: Tensor | None = None) -> Tensor:
    """Sum products over the last dimension as 16 lanes do: `terms` times `squares_of`, or the terms themselves."""
    lanes = terms.unflatten(-1, (-1, 16))
    other = None if squares_of is None else squares_of.unflatten(-1, (-1, 16))
    total = torch.zeros(torch.broadcast_shapes(lanes[..., 0, :].shape, (16,)))
    for step in range(lanes.shape[-2]):
        one = lanes[..., step, :]
        total = total + one if other is None else multiply_add(one, other[..., step, :], total)
    return tree(total)


def tree(lanes: Tensor) -> Tensor:
    """Add 16 lanes: those 8 apart, then 4, 2 and 1."""
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes[..., 0]


def sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded square root; the library's float32 one is not always that."""
    return x.double().sqrt().float()


def exp(x: Tensor) -> Tensor:
    """Return the kernels' exponential."""
    clipped = x.clamp(-104.0, 89.0)
    n = multiply_add(clipped, 1.44269504088896341, 12582912.0) - 12582912.0
    r = multiply_add(n, -0.693359375, clipped)
    r = multiply_add(n, 2.12194440e-4, r)
    p = torch.full_like(x, 1.9875691500e-4)
    for coefficient in _EXP:
        p = multiply_add(p, r, coefficient)
    p = multiply_add(p, r * r, r) + 1.0
    whole = n.to(torch.int32)
    first = whole >> 1
    y = p * _power(first) * _power(whole - first)
    y = torch.where(x > 88.72283, float("inf"), y)
    y = torch.where(x < -87.33654, 0.0, y)
    return torch.where(x.isnan(), x, y)


def _power(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def sigmoid(x: Tensor) -> Tensor:
    """Return the kernels' logistic function."""
    return 1.0 / (1.0 + exp(-x))


def log(x: Tensor) -> Tensor:
    """Return the kernels' logarithm of normal positive numbers."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) - 126
    m = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    is_small = m < torch.tensor(0.70710678, dtype=torch.float32)
    exponent = exponent - is_small.int()
    m = torch.where(is_small, m + m, m) - 1.0
    z = m * m
    p = torch.full_like(x, 7.0376836292e-2)
    for coefficient in _LOG:
        p = multiply_add(p, m, coefficient)
    e = exponent.float()
    y = multiply_add(e, -2.12194440e-4, m * z * p)
    y = multiply_add(z, -0.5, y)
    return multiply_add(e, 0.693359375, m + y)


def softplus(x: Tensor) -> Tensor:
    """Return the kernels' log(1 + exp(x))."""
    e = exp(torch.where(x > 20.0, 20.0, x))
    u = 1.0 + e
    is_one = u == 1.0
    y = torch.where(is_one, e, log(u) * (e / torch.where(is_one, 1.0, u - 1.0)))
    return torch.where((x > 20.0) | x.isnan(), x, y)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise bfloat16 [..., D] as the kernels do."""
    wide = x.float()
    mean = lane_sum(wide, wide) / x.shape[-1]
    factor = 1.0 / sqrt(mean + eps)
    return (wide * factor.unsqueeze(-1) * weight).to(torch.bfloat16)
