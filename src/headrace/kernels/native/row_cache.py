"""The row cache's two steps in one pass each, where the package was built with a compiler."""

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.native.library import plain_function

_FUNCTIONS = {"find": 6, "add": 12}


class NativeCache:
    """Works on the arrays of a `memory.row_cache.RowCache`, which owns them; leaves the same bytes as numpy does."""

    def __init__(
        self,
        functions: dict[str, Any],
        rows: tuple[NDArray[np.uint8], NDArray[np.uint8]],
        keys: NDArray[np.int64],
        used: NDArray[np.bool_],
        hands: NDArray[np.uint8],
    ) -> None:
        self._kept = (*rows, keys, used, hands)
        self._find, self._add = functions["find"], functions["add"]
        self._widths = [part.shape[1] for part in rows]
        self._rows = [part.ctypes.data for part in rows]
        self._keys, self._used, self._hands = keys.ctypes.data, used.ctypes.data, hands.ctypes.data
        self._num_sets = len(keys)

    def find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each key, [n] int64, -1 where it is not kept, and mark those found as used."""
        keys = np.ascontiguousarray(keys)
        places = np.empty(len(keys), dtype=np.int64)
        self._find(keys.ctypes.data, len(keys), self._keys, self._used, self._num_sets, places.ctypes.data)
        return places

    def add(self, keys: NDArray[np.int64], codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> None:
        """Keep rows. See `RowCache.add`."""
        keys = np.ascontiguousarray(keys)
        codes, scales = np.ascontiguousarray(codes), np.ascontiguousarray(scales)
        new = [codes.ctypes.data, self._widths[0], scales.ctypes.data, self._widths[1]]
        cache = [self._keys, self._used, self._hands, self._num_sets]
        self._add(keys.ctypes.data, len(keys), *new, *cache, *self._rows)


def open_cache(
    rows: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    keys: NDArray[np.int64],
    used: NDArray[np.bool_],
    hands: NDArray[np.uint8],
) -> NativeCache | None:
    """Return the native steps of a cache with these arrays; None where the library is absent.

    Args:
        rows: codes and scales, [sets x 16, width] uint8 each, contiguous.
        keys: [sets, 16] int64, contiguous, as `used`.
        used: [sets, 16] bool.
        hands: [sets] uint8.
    """
    functions = _functions()
    return None if functions is None or not len(keys) else NativeCache(functions, rows, keys, used, hands)


@cache
def _functions() -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for name, num_arguments in _FUNCTIONS.items():
        function = plain_function(f"hr_row_cache_{name}")
        if function is None:
            return None
        function.argtypes, function.restype = [ctypes.c_int64] * num_arguments, ctypes.c_int64
        found[name] = function
    return found
