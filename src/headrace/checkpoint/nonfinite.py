"""Find codes that stand for no number: E8M0 byte 255, E4M3 NaN codes, NaN and infinity in wider formats.

Works on raw bytes in slices, so that checking a tensor needs no second copy of it. Does not load torch.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.core.formats import E8M0_NAN, FORMATS

_SLICE_ELEMENTS = 2**20
# per format: how to view the bytes, and the bits that are all set in NaN and infinity (E4M3 and E8M0 know only NaN)
_VIEW = {
    "F8_E8M0": np.uint8,
    "F8_E4M3": np.uint8,
    "BF16": np.uint16,
    "F16": np.uint16,
    "F32": np.uint32,
    "F64": np.uint64,
}
_BITS = {
    "F8_E8M0": E8M0_NAN,
    "F8_E4M3": 0x7F,
    "BF16": 0x7F80,
    "F16": 0x7C00,
    "F32": 0x7F80_0000,
    "F64": 0x7FF0_0000_0000_0000,
}


def first_bad(data: NDArray[np.uint8], dtype: str) -> int | None:
    """Return the index of the first element that is no finite number, None where all are.

    Args:
        data: [n] uint8, the stored bytes of whole elements.
        dtype: safetensors name; every code of an integer format is a number.
    """
    if dtype not in _VIEW:
        return None
    width = FORMATS[dtype].num_bytes
    if data.ctypes.data % width:
        data = data.copy()  # a mapped tensor may start anywhere
    codes: NDArray[Any] = data.view(_VIEW[dtype])
    bits = codes.dtype.type(_BITS[dtype])
    for start in range(0, codes.size, _SLICE_ELEMENTS):
        bad = (codes[start : start + _SLICE_ELEMENTS] & bits) == bits
        if bad.any():
            return start + int(bad.argmax())
    return None


def describe(dtype: str) -> str:
    """Name what `first_bad` looks for in a format."""
    names = {"F8_E8M0": "scale byte 255 (NaN)", "F8_E4M3": "an E4M3 NaN code"}
    return names.get(dtype, "NaN or infinity")
