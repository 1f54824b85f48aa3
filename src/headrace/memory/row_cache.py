"""Rows of n-gram tables kept in a fixed number of bytes, exactly as they are stored.

A row can lie in one of `WAYS` places that its key alone decides, so finding, adding and forgetting are a few numpy
calls for a whole batch, and the memory is what was planned. Within its places a row is forgotten by CLOCK: a hand goes
round, spares what was used since it last passed, and takes the first that was not.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.native.row_cache import open_cache
from headrace.memory.row_format import Bytes

WAYS = 16
_FREE = -1  # a place without a row
_MIX = 0x9E3779B97F4A7C15  # of Fibonacci hashing: neighbouring keys go to distant sets
_EXTRA_BYTES = 8 + 1  # of a place beside its row: the key, and whether it was used

_ORDER = np.arange(WAYS)

Keys = NDArray[np.int64]
Places = NDArray[np.int64]


class RowCache:
    """Owns the bytes of the rows it keeps. What it keeps never changes an answer, only where a row comes from."""

    def __init__(self, num_bytes: int, head_dim: int, num_scales: int, *, is_native: bool = True) -> None:
        """Divide the budget into places; a budget below one set of places keeps nothing.

        Args:
            num_bytes: budget for rows, keys and marks together.
            head_dim: codes per row.
            num_scales: scales per row.
            is_native: let compiled code find and add rows, where there is any; it does the same.
        """
        per_set = WAYS * (head_dim + num_scales + _EXTRA_BYTES) + 1
        self.num_sets = num_bytes // per_set
        self.num_bytes = self.num_sets * per_set
        places = self.num_sets * WAYS
        self._codes = np.empty((places, head_dim), dtype=np.uint8)
        self._scales = np.empty((places, num_scales), dtype=np.uint8)
        for part in (self._codes, self._scales):
            part.fill(0)  # rows go to scattered places: the first prompt would wait for every page to be cleared
        self._keys = np.zeros((self.num_sets, WAYS), dtype=np.int64)  # the key plus one, so that zeros mean free
        self._used = np.zeros((self.num_sets, WAYS), dtype=np.bool_)
        self._hands = np.zeros(self.num_sets, dtype=np.uint8)
        rows = (self._codes, self._scales)
        self._native = open_cache(rows, self._keys, self._used, self._hands) if is_native else None

    def find(self, keys: Keys) -> Places:
        """Return the place of every row, -1 where it is not kept, and mark those found as used.

        Args:
            keys: [n] int64, not negative.
        """
        if self.num_sets == 0:
            return np.full(len(keys), _FREE, dtype=np.int64)
        if self._native is not None:
            return self._native.find(keys)
        sets = self._sets(keys)
        matches = self._keys[sets] == (keys + 1)[:, None]
        ways = matches.argmax(axis=1)
        hits = matches[np.arange(len(keys)), ways]
        self._used[sets[hits], ways[hits]] = True
        return np.where(hits, sets * WAYS + ways, _FREE)

    def copy(self, places: Places, codes: Bytes, scales: Bytes) -> None:
        """Copy the rows at `places`, none of them -1, into `codes` [n, head_dim] and `scales`."""
        np.take(self._codes, places, axis=0, out=codes, mode="clip")
        np.take(self._scales, places, axis=0, out=scales, mode="clip")

    def add(self, keys: Keys, codes: Bytes, scales: Bytes) -> None:
        """Keep rows, forgetting others.

        Args:
            keys: [n] int64, none twice; those that are kept already stay.
            codes: [n, head_dim] uint8.
            scales: [n, head_dim / 32] uint8.

        State: of more new rows than one set has places, the set keeps the first.
        """
        if self.num_sets == 0 or len(keys) == 0:
            return
        if self._native is not None:
            self._native.add(keys, codes, scales)
            return
        sets = self._sets(keys)
        new = np.flatnonzero(~(self._keys[sets] == (keys + 1)[:, None]).any(axis=1))
        order = new[np.argsort(sets[new], kind="stable")]
        ranks = _ranks(sets[order])
        for rank in range(min(WAYS, int(ranks.max(initial=-1)) + 1)):  # in a round, one row for each set
            chosen = order[ranks == rank]
            ways = self._evict(sets[chosen])
            self._keys[sets[chosen], ways] = keys[chosen] + 1
            self._used[sets[chosen], ways] = False
            places = sets[chosen] * WAYS + ways
            self._codes[places], self._scales[places] = codes[chosen], scales[chosen]

    def _sets(self, keys: Keys) -> Places:
        mixed = (keys.astype(np.uint64) * np.uint64(_MIX)) >> np.uint64(32)
        return (mixed % np.uint64(self.num_sets)).astype(np.int64)

    def _evict(self, sets: Places) -> Places:
        """Return a way of each set (none twice in `sets`) to be overwritten, and move the hands past it."""
        ways = (self._hands[sets].astype(np.int64)[:, None] + _ORDER) % WAYS  # as the hand meets them
        used = self._used[sets[:, None], ways]
        is_full = used.all(axis=1)
        first = np.where(is_full, 0, used.argmin(axis=1))  # all used: once round, and then the first after all
        passed = is_full[:, None] | (first[:, None] > _ORDER)
        self._used[sets[:, None], ways] = used & ~passed
        chosen: Places = ways[np.arange(len(sets)), first]
        self._hands[sets] = ((chosen + 1) % WAYS).astype(np.uint8)
        return chosen


def _ranks(sets: Places) -> Places:
    """Return how many of the same number stand before each element of an ascending array."""
    starts = np.flatnonzero(np.concatenate([[True], sets[1:] != sets[:-1]])) if len(sets) else np.empty(0, np.int64)
    lengths = np.diff(np.concatenate([starts, [len(sets)]])).astype(np.int64)
    return np.arange(len(sets)) - np.repeat(starts, lengths)
