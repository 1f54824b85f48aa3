"""Mixture of experts of one layer in one call: router, routed FP4 experts grouped by expert, shared FP8 expert.

Numerics: float32 router product over bfloat16 weights, choice and weights as in `router`. Gate and up products are
rounded to bfloat16 and clamped; silu(gate) * up * weight is rounded once and quantised for the down product, whose rows
are rounded to bfloat16 and added per token in ascending order of experts, starting from zero, the shared expert's last,
in float32; one rounding. Products as in `product`.
What bounds it: reading the selected experts for few rows, multiply-adds for many.
Source: spec section 3.8.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels.native.library import Library
from headrace.kernels.native.room import Rooms
from headrace.kernels.native.tiles import CMatrix, Matrix

_ADDRESSES = (
    *("u", "out", "router", "bias", "image_bias", "is_image", "gate", "up", "down", "shared_gate_up", "shared_down"),
    "picked",
)
_COUNTS = ("rows", "width", "hidden", "count", "per_token")


class Job(ctypes.Structure):
    """Arguments of one call."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _ADDRESSES + _COUNTS),
        ("scale", ctypes.c_double),
        ("limit", ctypes.c_double),
    ]


@dataclass(frozen=True)
class ExpertMatrices:
    """Matrices of one layer: `router` bfloat16 [E, D]; per expert `gate`, `up` [F, D], `down` [D, F]; the shared two.

    `bias` [E] float32 selects; `image_bias` does so for image rows, None where there are none.
    """

    router: Matrix
    bias: Tensor
    image_bias: Tensor | None
    gate: Sequence[Matrix]
    up: Sequence[Matrix]
    down: Sequence[Matrix]
    shared_gate_up: Matrix
    shared_down: Matrix


class Experts:
    """The experts of one layer, ready to run."""

    def __init__(
        self,
        library: Library,
        matrices: ExpertMatrices,
        *,
        per_token: int,
        scale: float,
        limit: float,
        rooms: Rooms | None = None,
    ) -> None:
        rooms = rooms or Rooms(0)
        self._matrices = matrices
        self._lists = [_seen(part) for part in (matrices.gate, matrices.up, matrices.down)]
        gate, up, down = (ctypes.addressof(part) for part in self._lists)
        self._width = matrices.router.width
        self._out = rooms.tensor("expert sums", self._width, torch.bfloat16)
        self._picked = rooms.tensor("experts", per_token, torch.int64)
        self._job = Job(
            router=matrices.router.address,
            bias=matrices.bias.data_ptr(),
            image_bias=0 if matrices.image_bias is None else matrices.image_bias.data_ptr(),
            gate=gate,
            up=up,
            down=down,
            shared_gate_up=matrices.shared_gate_up.address,
            shared_down=matrices.shared_down.address,
            width=self._width,
            hidden=matrices.gate[0].rows,
            count=len(matrices.gate),
            per_token=per_token,
            scale=scale,
            limit=limit,
        )
        self._address = ctypes.addressof(self._job)
        self._run = library.function("hr_experts", 1)

    def __call__(self, u_TD: Tensor, is_image: Tensor | None = None) -> Tensor:
        """Return [T, D] bfloat16 for contiguous bfloat16 rows [T, D]; `is_image` [T] bool marks image rows.

        Raises:
            InternalError: there is no memory left.
        """
        return self.routed(u_TD, is_image)[0]

    def routed(self, u_TD: Tensor, is_image: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return also the selected experts [T, K] int64."""
        rows, job = u_TD.shape[0], self._job
        out, picked = self._out.of(rows), self._picked.of(rows)
        job.u, job.out, job.picked, job.rows = u_TD.data_ptr(), out.data_ptr(), picked.data_ptr(), rows
        job.is_image = 0 if is_image is None else is_image.data_ptr()
        if self._run(self._address):
            raise InternalError("there is no memory left for the rows of experts")
        return out, picked


def _seen(matrices: Sequence[Matrix]) -> ctypes.Array[CMatrix]:
    return (CMatrix * len(matrices))(*(matrix.seen for matrix in matrices))
