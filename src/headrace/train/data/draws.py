"""Random numbers that are a function of a seed and a path: the same in every process, on every thread, in any order.

Only the raw output of numpy's counter-based generator is used, which numpy keeps fixed; its distributions, which numpy
may change, are not. Python's `hash` is not used at all.
"""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import InternalError

Item = TypeVar("Item")

_MAX_LIMIT = 2**32


class Draws:
    """Owns one stream of random numbers; every method takes its numbers from it in order.

    `Draws(7, "task", "copy", 12, 0)` is always the same stream, and different from `Draws(7, "task", "copy", 1, 20)`:
    parts of the path are kept apart.
    """

    def __init__(self, seed: int, *path: int | str) -> None:
        """Start the stream of a seed and a path.

        Args:
            seed: any integer.
            path: what the numbers are for, e.g. ("fim", document name) or ("task", name, step, row).
        """
        digest = hashlib.blake2b(repr((seed, *path)).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self._bits = np.random.Philox(key=np.frombuffer(digest, dtype="<u8"))

    def raw(self, count: int) -> NDArray[np.uint64]:
        """Return `count` numbers of 64 random bits."""
        bits: NDArray[np.uint64] = self._bits.random_raw(count)
        return bits

    def integers(self, limit: int, count: int) -> NDArray[np.int64]:
        """Return [count] integers from 0 to `limit` - 1.

        Numerics: the upper 32 random bits times `limit`, shifted; no value is more than limit / 2**32 off its share.
        """
        if not 1 <= limit <= _MAX_LIMIT:
            raise InternalError(f"random integers below {limit} were asked for; 1 to {_MAX_LIMIT} are possible")
        scaled = (self.raw(count) >> np.uint64(32)) * np.uint64(limit)
        return (scaled >> np.uint64(32)).astype(np.int64)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Return [count] numbers in [0, 1), multiples of 2**-53."""
        return (self.raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def permutation(self, count: int) -> NDArray[np.int64]:
        """Return 0 to `count` - 1 in random order."""
        return np.argsort(self.raw(count), kind="stable").astype(np.int64)

    def distinct(self, limit: int, count: int) -> NDArray[np.int64]:
        """Return [count] different integers from 0 to `limit` - 1, in random order."""
        if count > limit:
            raise InternalError(f"{count} different integers below {limit} were asked for")
        return self.permutation(limit)[:count]

    def integer(self, limit: int) -> int:
        """Return one integer from 0 to `limit` - 1."""
        return int(self.integers(limit, 1)[0])

    def between(self, lowest: int, highest: int) -> int:
        """Return one integer from `lowest` to `highest`, both included."""
        return lowest + self.integer(highest - lowest + 1)

    def is_below(self, share: float) -> bool:
        """Return true with probability `share`."""
        return bool(self.uniform(1)[0] < share)

    def pick(self, items: Sequence[Item]) -> Item:
        """Return one item."""
        return items[self.integer(len(items))]
