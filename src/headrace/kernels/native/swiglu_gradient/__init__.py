"""Gradient of the clamped SwiGLU of an expert in one pass; see `kernels/swiglu.py`, its reference.

Numerics: float32. The sum over F for a row's weight: lane j of 16 sums values 16 i + j in ascending i, lanes are added
as a tree (8, 4, 2, 1 apart). The exponential is that of `lanes.h`.
What bounds it: reading and writing the rows once.
Source: spec section 3.8.
"""

import ctypes

import torch
from torch import Tensor

from headrace.kernels.native.library import Library, best_library

_ADDRESSES = ("gradient", "both", "weights", "of_both", "of_weights")


class _Job(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int64) for name in (*_ADDRESSES, "rows", "width")), ("limit", ctypes.c_double)]


def swiglu_gradient(
    gradient_PF: Tensor, gate_up_P2F: Tensor, weights_P: Tensor | None, limit: float, library: Library | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """Return gradients of the rows [P, 2 F] and of their weights [P]; None where there is no kernel."""
    library = library or best_library()
    given = [one for one in (gradient_PF, gate_up_P2F, weights_P) if one is not None]
    is_plain = all(one.dtype == torch.float32 and one.device.type == "cpu" for one in given)
    if library is None or not is_plain or gradient_PF.shape[1] % 16:
        return None
    gradient, both = gradient_PF.contiguous(), gate_up_P2F.contiguous()
    weights = None if weights_P is None else weights_P.contiguous()
    of_both, of_weights = torch.empty_like(both), None if weights is None else torch.empty_like(weights)
    job = _Job(
        gradient=gradient.data_ptr(),
        both=both.data_ptr(),
        weights=0 if weights is None else weights.data_ptr(),
        of_both=of_both.data_ptr(),
        of_weights=0 if of_weights is None else of_weights.data_ptr(),
        rows=gradient.shape[0],
        width=gradient.shape[1],
        limit=limit,
    )
    library.use_threads(torch.get_num_threads())
    library.function("hr_train_swiglu_back", 1)(ctypes.addressof(job))
    return of_both, of_weights
