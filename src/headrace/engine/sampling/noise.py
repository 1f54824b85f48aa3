"""Randomness keyed by seed and position, so that it depends on nothing else: no batch, no order, no earlier draw."""

import numpy as np
import torch
from torch import Tensor


def exponential_noise(count: int, seed: int, position: int) -> Tensor:
    """Return [count] float32 exponential variates that are a function of `seed` and `position` alone.

    The key of the counter-based generator holds all bits of both, so no two pairs share their noise (torch's CPU
    generator would keep 32 bits of a seed). Raw bits of Philox are the same in every version of numpy.
    """
    bits = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw(count)
    uniform = ((bits >> np.uint64(11)) + 0.5) * 2.0**-53  # inside (0, 1)
    return torch.from_numpy(-np.log(uniform)).float()
