"""Losses, hits and gradients of rows of logits in three passes; see `train/losses.py`, its reference.

Numerics: float32. Exponentials relative to the largest logit are summed: lane j of 16 sums columns 16 i + j in
ascending i, lanes are added as a tree (8, 4, 2, 1 apart). Exponential and logarithm are those of `lanes.h`. A row with
a NaN, or whose largest logit is infinite, has a NaN loss.
What bounds it: exponentials, two per logit.
Source: training.md sections 2.1 and 2.2.
"""

import ctypes

import torch
from torch import Tensor

from headrace.kernels.native.library import Library, best_library

_ADDRESSES = ("logits", "labels", "weights", "losses", "correct")
_COUNTS = ("rows", "columns", "step", "has_gradient")


class _Job(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _ADDRESSES + _COUNTS]


def judge_rows(
    logits_RV: Tensor,
    labels_R: Tensor,
    weights_R: Tensor | None,
    *,
    has_gradient: bool,
    library: Library | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return losses [R] and hits [R] bool; None where there is no kernel.

    Args:
        logits_RV: [R, V] float32, columns adjacent; with `has_gradient` they become their gradient: softmax minus one
            at the label, times the row's weight.
        labels_R: [R] int64, all of them columns.
        weights_R: [R] float32; None weighs all alike.
        has_gradient: see `logits_RV`.
        library: instruction set to use; None takes the best.
    """
    library = library or best_library()
    is_plain = logits_RV.dtype == torch.float32 and logits_RV.device.type == "cpu" and logits_RV.stride(1) == 1
    if library is None or not is_plain:
        return None
    labels = labels_R.contiguous()
    weights = None if weights_R is None else weights_R.to(torch.float32).contiguous()
    losses, correct = logits_RV.new_empty(len(labels)), torch.empty(len(labels), dtype=torch.bool)
    job = _Job(
        logits=logits_RV.data_ptr(),
        labels=labels.data_ptr(),
        weights=0 if weights is None else weights.data_ptr(),
        losses=losses.data_ptr(),
        correct=correct.data_ptr(),
        rows=len(labels),
        columns=logits_RV.shape[1],
        step=logits_RV.stride(0),
        has_gradient=has_gradient,
    )
    library.use_threads(torch.get_num_threads())
    library.function("hr_train_cross_entropy", 1)(ctypes.addressof(job))
    return losses, correct
