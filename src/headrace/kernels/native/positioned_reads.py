"""Many short reads of a file in one call without Python in between, where the package was built with a compiler."""

import ctypes
import os
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.native.library import plain_function


def read_stretches(file: int, places: NDArray[np.int64], out: NDArray[np.uint8]) -> bool:
    """Fill the rows of `out` with stretches of a file; say whether there is a native way to do so.

    Args:
        file: an open file's number.
        places: [n] int64, contiguous; where each stretch begins.
        out: [n, size] uint8, contiguous; written.

    Returns:
        False, with nothing done, where the library is absent.

    Raises:
        OSError: the file cannot be read.
        EOFError: it ends before a stretch does.
    """
    function = _function()
    if function is None:
        return False
    failed = function(file, places.ctypes.data, len(places), out.shape[1], out.ctypes.data)
    if failed < 0:
        raise EOFError("the file has become shorter")
    if failed:
        raise OSError(failed, os.strerror(failed))
    return True


@cache
def _function() -> Any:
    found = plain_function("hr_positioned_reads")
    if found is not None:
        found.argtypes, found.restype = [ctypes.c_int64] * 5, ctypes.c_int64
    return found
