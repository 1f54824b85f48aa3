"""Products of rows with FP4, FP8 and bfloat16 matrices that keep their stored bits.

`x` [T, K] bfloat16 is rounded to Q8 on the way in (FP8 and FP4 linears) or taken as it is (bfloat16 linears, the
grouped output projection, router, vocabulary head). A decoded weight lives in a register only.

Numerics: products are exact in float32. A value is the sum over groups of 32 columns, ascending, of factor times group
sum; the factor is the product of the activation's and the weight's power of two (one where nothing is scaled). A group
sum starts at zero and takes column pairs in ascending order, of each pair the odd column first: that is the order of
the AVX-512 bfloat16 dot instruction. Every step is a multiply-add that rounds once; numbers below 2 ** -126 count as
zero in FP8 and bfloat16 products. One rounding at the end where the result is bfloat16. Nothing depends on T.
What bounds it: reading the matrix for one row, multiply-adds from about 16 rows on.
Source: spec section 0.4.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels.native.library import Library
from headrace.kernels.native.room import Room
from headrace.kernels.native.tiles import CMatrix, Matrix

_FIELDS = (
    "matrix",
    "x",
    "out",
    "rows",
    "x_stride",
    "out_stride",
    "is_quantised",
    "result",
    "count",
    "x_step",
    "out_step",
)


class Job(ctypes.Structure):
    """Arguments of one product; addresses as integers, strides in elements."""

    _fields_ = [(name, ctypes.c_int64) for name in _FIELDS]


class Product:
    """One matrix, ready to multiply, or several of one shape that take neighbouring columns each.

    Made once per matrix and used at every step. What it returns lies in `room`, or is new without one.
    """

    def __init__(
        self,
        library: Library,
        matrices: Matrix | Sequence[Matrix],
        *,
        is_quantised: bool,
        is_float: bool = False,
        room: Room[Tensor] | None = None,
    ) -> None:
        self._matrices = (matrices,) if isinstance(matrices, Matrix) else tuple(matrices)
        first, count = self._matrices[0], len(self._matrices)
        self._seen = (CMatrix * count)(*(matrix.seen for matrix in self._matrices))
        self.rows, self.width = count * first.rows, count * first.width
        self._job = Job(
            matrix=ctypes.addressof(self._seen),
            is_quantised=is_quantised,
            result=int(is_float),
            out_stride=self.rows,
            count=count,
            x_step=first.width,
            out_step=first.rows,
        )
        dtype = torch.float32 if is_float else torch.bfloat16
        self._new = room.of if room else lambda rows: torch.empty((rows, self.rows), dtype=dtype)
        self._address = ctypes.addressof(self._job)
        self._run = library.function("hr_product", 1)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply bfloat16 `x` [T, K], whose columns are contiguous, by the matrix; returns [T, N].

        Raises:
            InternalError: the dtype, the layout or the width is another, or there is no memory left.
        """
        if x.dtype != torch.bfloat16 or x.shape[1] != self.width or x.stride(1) != 1:
            raise InternalError(f"rows to multiply are {x.dtype} {list(x.shape)}; bfloat16 [T, {self.width}] is wanted")
        job, out = self._job, self._new(x.shape[0])
        job.x, job.x_stride, job.rows, job.out = x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr()
        if self._run(self._address):
            raise InternalError("there is no memory left for the rows of a product")
        return out
