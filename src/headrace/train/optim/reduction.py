"""Sums in one fixed order, so that no thread count changes a bit.

The library splits a sum that leaves one number, or a sum over rows, between threads, and the split decides the order.
Here a long sum is made of rows that are each summed by one thread, and a sum over rows halves the rows again and again.
"""

import torch
from torch import Tensor

WIDTH = 1024  # values summed by one thread in one go; far below the size from which the library would split the sum


def total(values: Tensor) -> Tensor:
    """Return the sum of all values as a float64 scalar tensor, in one order for any number of threads."""
    flat = values.reshape(-1).double()
    while flat.numel() > WIDTH:
        whole = flat.numel() // WIDTH * WIDTH
        flat = torch.cat([flat[:whole].view(-1, WIDTH).sum(-1), flat[whole:]])
    return flat.sum()


def square_sum(values: Tensor) -> Tensor:
    """Return the sum of squares as a float64 scalar tensor, in one order for any number of threads.

    Numerics: squares of 1024 neighbours are summed in the dtype of `values`, the rest in float64. A value whose square
    that dtype cannot hold gives infinity.
    """
    flat = values.reshape(-1)
    whole = flat.numel() // WIDTH * WIDTH
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, WIDTH), dim=-1)
    rest = torch.linalg.vector_norm(flat[whole:]).reshape(1)
    return total(torch.cat([norms, rest]).double().square())


def column_sums(values_RC: Tensor) -> Tensor:
    """Return the sum over rows, [C], in one order for any number of threads.

    Numerics: pairwise in the dtype of the values: the second half of the rows is added to the first until one is left.
    """
    rows = values_RC
    while rows.shape[0] > 1:
        half = (rows.shape[0] + 1) // 2
        folded = rows[:half].clone()
        folded[: rows.shape[0] - half] += rows[half:]
        rows = folded
    return rows[0] if rows.shape[0] else values_RC.new_zeros(values_RC.shape[1])
