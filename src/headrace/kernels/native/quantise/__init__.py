"""Activation quantisation: bfloat16 rows to E4M3 codes with one E8M0 scale per 32 values (Q8).

`quantise_q8` is the operation, `reference.py` says it in PyTorch, `quantise.h` is what other kernels include: a product
quantises its own input and never writes the codes to memory.

Numerics: the scale is the smallest power of two that is not below max(amax, 1e-4) / 448; codes round half to even. A
group with an infinity or NaN gets the scale byte 255 and NaN codes. Every step is exact or elementwise, so there is no
order to state.
Source: spec section 0.3, Q8.
"""

import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels.native.library import Library


def quantise_q8(library: Library, x: Tensor) -> tuple[Tensor, Tensor]:
    """Store contiguous bfloat16 `x` [T, K] as codes uint8 [T, K] and scale bytes uint8 [T, K / 32].

    Raises:
        InternalError: the dtype, the layout or the width is another.
    """
    if x.dtype != torch.bfloat16 or not x.is_contiguous() or x.shape[-1] % 32:
        raise InternalError(f"rows to quantise are {x.dtype} {list(x.shape)}; contiguous bfloat16 [T, 32 n] is wanted")
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scales = torch.empty((*x.shape[:-1], x.shape[-1] // 32), dtype=torch.uint8)
    rows = x.numel() // x.shape[-1]
    run = library.function("hr_quantise", 5)
    run(x.data_ptr(), rows, x.shape[-1], codes.data_ptr(), scales.data_ptr())
    return codes, scales
