"""Seeds: fresh ones, and those of further answers to one prompt."""

import secrets

import numpy as np

_DRAWN_BITS = 53  # every JSON reader keeps a number of this size
_FORK_KEY = 1 << 63  # positions stay below it, so a fork's seed shares its key with no noise


def draw_seed() -> int:
    """Return a fresh random seed."""
    return secrets.randbits(_DRAWN_BITS)


def fork_seed(seed: int, index: int) -> int:
    """Return the seed of answer `index` of several to one prompt; answer 0 has the request's own."""
    if index == 0:
        return seed
    return int(np.random.Philox(key=np.array([seed, _FORK_KEY + index], dtype=np.uint64)).random_raw(1)[0] >> 1)
