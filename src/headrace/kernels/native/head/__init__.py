"""Vocabulary head in one call: last collapse of the streams, norm, product with the vocabulary's matrix.

Numerics: collapse and norm as in `streams`, the product as in `product` over bfloat16 weights; logits are float32 sums
that are never rounded. Nothing depends on the number of rows.
What bounds it: reading the matrix for few rows.
Source: spec section 3.0, step 4; of a draft block, section 3.11, step 3.
"""

import ctypes

import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels.native.library import Library
from headrace.kernels.native.tiles import Matrix

_ADDRESSES = ("x", "pre", "norm", "matrix", "logits", "collapsed")


class Job(ctypes.Structure):
    """Arguments of one call."""

    _fields_ = [*((name, ctypes.c_int64) for name in (*_ADDRESSES, "rows", "width")), ("eps", ctypes.c_double)]


class Head:
    """A head: `matrix` bfloat16 [V, D] in tiles, `norm` [D] float32."""

    def __init__(self, library: Library, matrix: Matrix, norm: Tensor, *, eps: float) -> None:
        self._kept = (matrix, norm)
        self._job = Job(matrix=matrix.address, norm=norm.data_ptr(), width=matrix.width, eps=eps)
        self._address = ctypes.addressof(self._job)
        self._run = library.function("hr_head", 1)

    def __call__(self, x_TMD: Tensor, pre_TM: Tensor) -> Tensor:
        """Return float32 logits [T, V] of contiguous streams [T, 4, D] and their pending pre-mix [T, 4].

        Raises:
            InternalError: there is no memory left.
        """
        return self._logits(x_TMD, pre_TM, None)

    def with_hidden(self, x_TMD: Tensor, pre_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Return also the collapse before its norm, bfloat16 [T, D]."""
        hidden = torch.empty((x_TMD.shape[0], self._kept[0].width), dtype=torch.bfloat16)
        return self._logits(x_TMD, pre_TM, hidden), hidden

    def _logits(self, x_TMD: Tensor, pre_TM: Tensor, hidden: Tensor | None) -> Tensor:
        job, rows = self._job, x_TMD.shape[0]
        logits = torch.empty((rows, self._kept[0].rows), dtype=torch.float32)
        job.x, job.pre, job.logits, job.rows = x_TMD.data_ptr(), pre_TM.data_ptr(), logits.data_ptr(), rows
        job.collapsed = 0 if hidden is None else hidden.data_ptr()
        if self._run(self._address):
            raise InternalError("there is no memory left for the rows of a head")
        return logits
