"""Norm, rotation and rounding of the rows that the first projection gives: query latent and window entry.

Numerics: norms as in `streams` (lane sums, one rounding); rotation of adjacent pairs in float32, products rounded
before they are added, one rounding; then Q8 over the whole entry. Stored bytes and bfloat16 values are equal.
Source: spec section 3.3, steps 1 and 3.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.native.library import Library
from headrace.kernels.native.room import Rooms

_ADDRESSES = ("y", "q_norm", "kv_norm", "cos", "sin", "latent", "values", "codes", "scales")
_COUNTS = ("rows", "latent_width", "width", "rotated")


class Job(ctypes.Structure):
    """Arguments of one call."""

    _fields_ = [*((name, ctypes.c_int64) for name in _ADDRESSES + _COUNTS), ("eps", ctypes.c_double)]


@dataclass(frozen=True)
class Finished:
    """`latent_TR` bfloat16 normalised; window entries as `values_TH` bfloat16 and as bytes `codes_TH`, `scales_TG`."""

    latent_TR: Tensor
    values_TH: Tensor
    codes_TH: Tensor
    scales_TG: Tensor


class WindowRows:
    """Norm weights of one layer, float32: `q_norm` [R], `kv_norm` [H]; `rotated` last dimensions are turned."""

    def __init__(
        self,
        library: Library,
        q_norm: Tensor,
        kv_norm: Tensor,
        *,
        rotated: int,
        eps: float,
        rooms: Rooms | None = None,
    ) -> None:
        self._kept = (q_norm, kv_norm)
        latent_width, width = q_norm.shape[0], kv_norm.shape[0]

        def make(rows: int) -> Finished:
            latent = torch.empty((rows, latent_width), dtype=torch.bfloat16)
            values = torch.empty((rows, width), dtype=torch.bfloat16)
            codes = torch.empty((rows, width), dtype=torch.uint8)
            return Finished(latent, values, codes, torch.empty((rows, width // 32), dtype=torch.uint8))

        self._finished = (rooms or Rooms(0)).room(("finished", latent_width, width), make)
        self._job = Job(
            q_norm=q_norm.data_ptr(),
            kv_norm=kv_norm.data_ptr(),
            latent_width=latent_width,
            width=width,
            rotated=rotated,
            eps=eps,
        )
        self._address = ctypes.addressof(self._job)
        self._run = library.function("hr_window_rows", 1)

    def __call__(self, y: Tensor, cos: Tensor, sin: Tensor) -> Finished:
        """Finish contiguous rows [T, R + H]; `cos` and `sin` [T, P / 2] float32."""
        job, rows = self._job, y.shape[0]
        found = self._finished.of(rows)
        job.y, job.cos, job.sin, job.rows = y.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows
        job.latent, job.values = found.latent_TR.data_ptr(), found.values_TH.data_ptr()
        job.codes, job.scales = found.codes_TH.data_ptr(), found.scales_TG.data_ptr()
        self._run(self._address)
        return found
