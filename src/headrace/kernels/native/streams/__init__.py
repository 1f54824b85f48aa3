"""One half's hyper-connections in one pass: statistic, coefficients, Sinkhorn, collapse and norm; and the expansion.

`Streams.open` reads the four streams once and gives the half's input and its coefficients; `expand` reads and writes
them once; `Streams.follow` does both, row by row, between the two halves of a layer. `collapse_norm` opens without
coefficients.

Numerics: float32. Statistic and products over 4 D values: lane j of 16 sums values 16 i + j in ascending i, lanes are
added as a tree (8, 4, 2, 1 apart). Product first, then the statistic, then scale and base in one multiply-add.
Sinkhorn's sums of four are (a0 + a1) + (a2 + a3). Collapse and expansion take streams in ascending order, the half's
output last, by multiply-adds that round once; one rounding to bfloat16 each.
What bounds it: reading `fn` for one row, multiply-adds for many.
Source: spec sections 3.1, 3.2, 0.5.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.native.library import Library
from headrace.kernels.native.room import Room, Rooms

STREAMS = 4
_ADDRESSES = ("x", "pre", "fn", "base", "scale", "norm", "u", "next_pre", "post", "comb")
_COUNTS = ("rows", "width", "iterations")


class Job(ctypes.Structure):
    """Arguments of one opening."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _ADDRESSES + _COUNTS),
        ("norm_eps", ctypes.c_double),
        ("eps", ctypes.c_double),
    ]


class FollowJob(ctypes.Structure):
    """Arguments of an expansion and the opening after it; `open.x` is where the new streams go."""

    _fields_ = [("open", Job), *((name, ctypes.c_int64) for name in ("half", "x", "post", "comb"))]


@dataclass(frozen=True)
class Opened:
    """A half's input `u_TD` bfloat16, and its coefficients, float32: `pre_TM` and `post_TM` [T, 4], `comb_TMM`."""

    u_TD: Tensor
    pre_TM: Tensor
    post_TM: Tensor
    comb_TMM: Tensor

    @classmethod
    def room(cls, rooms: Rooms, part: str, width: int) -> Room["Opened"]:
        """Return the room of a half's outputs."""

        def make(rows: int) -> Opened:
            u = torch.empty((rows, width), dtype=torch.bfloat16)
            mixed = torch.empty((6, rows, STREAMS), dtype=torch.float32)
            return cls(u, mixed[0], mixed[1], mixed[2:].view(rows, STREAMS, STREAMS))

        return rooms.room(("opened", part, width), make)


class Streams:
    """The weights of one half, ready to use: `fn` [>= 24, 4 D], `base` [24], `scale` [3], `norm` [D], all float32."""

    def __init__(
        self,
        library: Library,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm: Tensor,
        *,
        iterations: int,
        norm_eps: float,
        eps: float,
    ) -> None:
        self._kept = (fn, base, scale, norm)
        self._width = norm.shape[0]
        self._opened, self._streams = _rooms(Rooms(0), "", self._width)
        self._follow_job = FollowJob()
        self._job = self._follow_job.open = Job(
            fn=fn.data_ptr(),
            base=base.data_ptr(),
            scale=scale.data_ptr(),
            norm=norm.data_ptr(),
            width=self._width,
            iterations=iterations,
            norm_eps=norm_eps,
            eps=eps,
        )
        self._job = self._follow_job.open
        self._address, self._follow_address = ctypes.addressof(self._job), ctypes.addressof(self._follow_job)
        self._run, self._run_follow = (library.function(f"hr_streams_{name}", 1) for name in ("open", "follow"))

    def in_rooms(self, rooms: Rooms, part: str) -> "Streams":
        """Write outputs to the rooms of a part from now on; returns the same object."""
        self._opened, self._streams = _rooms(rooms, part, self._width)
        return self

    def open(self, x_TMD: Tensor, pre_TM: Tensor) -> Opened:
        """Return input and coefficients of the half, given contiguous streams [T, 4, D] and the pending pre-mix."""
        opened = self._prepare(x_TMD, pre_TM)
        self._run(self._address)
        return opened

    def follow(self, half_TD: Tensor, x_TMD: Tensor, before: Opened) -> tuple[Tensor, Opened]:
        """Expand the output [T, D] of the half `before` and open this one; returns also the new streams."""
        x, job = self._streams.of(x_TMD.shape[0]), self._follow_job
        opened = self._prepare(x, before.pre_TM)
        job.half, job.x = half_TD.data_ptr(), x_TMD.data_ptr()
        job.post, job.comb = before.post_TM.data_ptr(), before.comb_TMM.data_ptr()
        self._run_follow(self._follow_address)
        return x, opened

    def _prepare(self, x_TMD: Tensor, pre_TM: Tensor) -> Opened:
        job, rows = self._job, x_TMD.shape[0]
        opened = self._opened.of(rows)
        start = opened.pre_TM.data_ptr()
        job.x, job.pre, job.u, job.rows = x_TMD.data_ptr(), pre_TM.data_ptr(), opened.u_TD.data_ptr(), rows
        job.next_pre, job.post, job.comb = start, start + 16 * rows, start + 32 * rows
        return opened


def _rooms(rooms: Rooms, part: str, width: int) -> tuple[Room[Opened], Room[Tensor]]:
    return Opened.room(rooms, part, width), streams_room(rooms, part, width)


def streams_room(rooms: Rooms, part: str, width: int) -> Room[Tensor]:
    """Return the room of streams [T, 4, D] that play a part."""
    key = ("streams", part, width)
    return rooms.room(key, lambda rows: torch.empty((rows, STREAMS, width), dtype=torch.bfloat16))


def expand(
    run: "ctypes._CFunctionType", half_TD: Tensor, x_TMD: Tensor, opened: Opened, room: Room[Tensor] | None = None
) -> Tensor:
    """Return the new streams; `run` is the library's `hr_streams_expand`."""
    rows, _, width = x_TMD.shape
    out = room.of(rows) if room else torch.empty_like(x_TMD)
    post, comb = opened.post_TM.data_ptr(), opened.comb_TMM.data_ptr()
    run(half_TD.data_ptr(), x_TMD.data_ptr(), post, comb, out.data_ptr(), rows, width)
    return out


def collapse_norm(library: Library, x_TMD: Tensor, pre_TM: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Return the normalised collapse [T, D] of streams [T, 4, D]."""
    rows, _, width = x_TMD.shape
    out = torch.empty((rows, width), dtype=torch.bfloat16)
    job = Job(
        x=x_TMD.data_ptr(),
        pre=pre_TM.data_ptr(),
        norm=norm.data_ptr(),
        u=out.data_ptr(),
        rows=rows,
        width=width,
        norm_eps=eps,
    )
    library.function("hr_streams_open", 1)(ctypes.addressof(job))
    return out
