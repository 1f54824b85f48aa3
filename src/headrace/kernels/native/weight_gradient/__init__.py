"""Gradient of a weight: the sum over rows of gradient times input, without a transposed copy of either.

Numerics: float32. A value is summed over 256 rows at a time, from zero, in ascending order, by multiply-adds that round
once; these sums are added in order. So neither threads nor tiles change a bit.
What bounds it: multiply-adds; tiles of 12 by 32 sums stay in registers.
Source: training.md section 2.
"""

import ctypes

import torch
from torch import Tensor

from headrace.kernels.native.library import Library, best_library


class _Job(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("gradient", "x", "out", "num_rows", "columns", "width", "gradient_step", "x_step")
    ]


def add_weight_gradient(gradient_TN: Tensor, x_TK: Tensor, out_NK: Tensor, library: Library | None = None) -> bool:
    """Add the sum over rows to `out` [N, K], contiguous; return whether there is a kernel for it.

    The kernel takes float32, and without a given `library` AVX-512 alone: on other CPUs the library's products are as
    fast.
    """
    if library is None:
        library = best_library()
        if library is None or library.instruction_set != "avx512":
            return False
    tensors = (gradient_TN, x_TK, out_NK)
    is_plain = all(one.dtype == torch.float32 and one.device.type == "cpu" and one.stride(1) == 1 for one in tensors)
    if not is_plain or not out_NK.is_contiguous():
        return False
    job = _Job(
        gradient=gradient_TN.data_ptr(),
        x=x_TK.data_ptr(),
        out=out_NK.data_ptr(),
        num_rows=x_TK.shape[0],
        columns=gradient_TN.shape[1],
        width=x_TK.shape[1],
        gradient_step=gradient_TN.stride(0),
        x_step=x_TK.stride(0),
    )
    library.use_threads(torch.get_num_threads())
    library.function("hr_train_weight_back", 1)(ctypes.addressof(job))
    return True
