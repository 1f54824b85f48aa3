"""Randomness keyed by seed, position and purpose, so that it depends on no batch, no order and no earlier draw."""

from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Purpose(IntEnum):
    """What a random number decides. Numbers of different purposes are independent of each other.

    TARGET: which token comes next. DRAFT: which token a drafter guesses. ACCEPT: whether a guess is kept.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2


def uniform_draws(
    count: int, seed: int, position: int, purpose: Purpose = Purpose.TARGET, index: int = 0
) -> NDArray[np.float64]:
    """Return [count] uniform variates inside (0, 1) that are a function of the other arguments alone.

    The key of the counter-based generator holds all bits of seed and position, the upper half of its counter purpose
    and index, so no two calls share a number (torch's CPU generator would keep 32 bits of a seed). Raw bits of Philox
    are the same in every version of numpy.

    Args:
        count: how many.
        seed: of the request.
        position: of the token, or of the first token of a run of guesses.
        purpose: what they decide.
        index: tells several draws of one position and purpose apart.
    """
    key = np.array([seed, position], dtype=np.uint64)
    counter = np.array([0, 0, index, purpose], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw(count)
    return np.asarray(((bits >> np.uint64(11)) + 0.5) * 2.0**-53, dtype=np.float64)


def exponential_noise(
    count: int, seed: int, position: int, purpose: Purpose = Purpose.TARGET, index: int = 0
) -> Tensor:
    """Return [count] float32 exponential variates; see `uniform_draws`."""
    return torch.from_numpy(-np.log(uniform_draws(count, seed, position, purpose, index))).float()
