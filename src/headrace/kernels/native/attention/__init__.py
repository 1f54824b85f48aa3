"""Attention with a sink over the window and selected entries; gather of FP4 entries; store of the new window rows.

One call serves all rows of a batch in one layer: it rotates the queries, reads the older window rows from the rings,
attends, turns the result back and stores the new rows. A draft block sees the window before it and all of itself, and
is not stored. `gather` decodes entries once for all layers that share them.

Numerics: float32 scores: lane j of 16 takes columns 32 i + 2 j + 1, then 32 i + 2 j, in ascending i by multiply-adds
that round once, lanes are added as a tree, then the scale. Keys stand in the order window positions, then picks, both
ascending. Weights are relative to the largest score, or to the sink's where there is none; their total is a lane sum
over the keys' places plus the sink's; bfloat16-rounded weights multiply values in the order of keys; the sum is divided
by the total and rounded, turned back and rounded. Numbers below 2 ** -126 count as zero.
What bounds it: reading the entries.
Source: spec section 3.3, steps 2 and 4 to 6; section 4.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels.native.library import Library
from headrace.kernels.native.room import Room, Rooms
from headrace.kernels.native.rows import Finished

SEGMENT_FIELDS = (
    *("offset", "count", "first", "floor", "ring_codes", "ring_scales", "depth"),
    *("picks", "slots", "entries", "is_by_slot"),
)
"""Columns of the table of segments, int64 each; addresses among them."""

_ADDRESSES = ("q", "cos", "sin", "sink", "values", "codes", "scales", "out", "segments")
_COUNTS = ("num_segments", "heads", "width", "rotated", "window", "is_block")


_MOST_ENTRIES = 64
ENTRIES = 256
"""Rooms of entries are made for multiples of so many: a store that grows needs no new one for every token."""


def entries_room(rooms: Rooms, place: int, width: int) -> Room[Tensor]:
    """Return the room for the decoded entries of the sequence at a place of the batch."""
    key = ("entries", place, width)
    return rooms.room(key, lambda rows: torch.empty((rows, width), dtype=torch.bfloat16), scale=_MOST_ENTRIES)


class Job(ctypes.Structure):
    """Arguments of one call."""

    _fields_ = [*((name, ctypes.c_int64) for name in _ADDRESSES + _COUNTS), ("scale", ctypes.c_double)]


class GatherJob(ctypes.Structure):
    """Arguments of one gather."""

    _fields_ = [
        (name, ctypes.c_int64) for name in ("codes", "scales", "blocks", "picks", "out", "count", "width", "per_block")
    ]


class Attention:
    """Attention of one layer: `sink` [Q] float32; `is_block` for a draft layer."""

    def __init__(
        self,
        library: Library,
        sink: Tensor,
        *,
        width: int,
        rotated: int,
        window: int,
        scale: float,
        is_block: bool = False,
        rooms: Rooms | None = None,
    ) -> None:
        self._sink = sink
        self._out = (rooms or Rooms(0)).tensor("value", sink.shape[0] * width, torch.bfloat16)
        shape = {"heads": sink.shape[0], "width": width, "rotated": rotated, "window": window}
        self._job = Job(sink=sink.data_ptr(), scale=scale, is_block=int(is_block), **shape)
        self._address = ctypes.addressof(self._job)
        self._run = library.function("hr_attend", 1)

    def __call__(self, q: Tensor, turn: tuple[Tensor, Tensor], rows: Finished, segments: np.ndarray) -> Tensor:
        """Attend and store.

        Args:
            q: [T, Q * H] bfloat16, contiguous, not yet rotated; rotated in place.
            turn: cosines and sines [T, P / 2] float32.
            rows: the new window entries.
            segments: [S, 11] int64, columns as `SEGMENT_FIELDS`.

        Returns:
            [T, Q * H] bfloat16, turned back.

        Raises:
            InternalError: there is no memory left.

        State: writes the rings that the segments name, unless the rows are draft blocks.
        """
        job, out = self._job, self._out.of(q.shape[0])
        job.q, job.cos, job.sin, job.out = q.data_ptr(), turn[0].data_ptr(), turn[1].data_ptr(), out.data_ptr()
        job.values, job.codes = rows.values_TH.data_ptr(), rows.codes_TH.data_ptr()
        job.scales, job.segments, job.num_segments = rows.scales_TG.data_ptr(), segments.ctypes.data, len(segments)
        if self._run(self._address):
            raise InternalError("there is no memory left for the rows of attention")
        return out


@dataclass(frozen=True)
class Planes:
    """Where entries lie: planes of codes [*, H / 2] and scales [*, H / 16], block numbers int64 (None: in order)."""

    codes: Tensor
    scales: Tensor
    blocks: Tensor | None
    per_block: int


def gather(
    library: Library, planes: Planes, picks: Tensor | None, count: int, room: Room[Tensor] | None = None
) -> Tensor:
    """Decode entries to bfloat16 [>= count, H]: those picked (int64, -1 leaves a row as it is), or the first ones.

    With a room the rows beyond `count` are whatever they were.
    """
    width = 2 * planes.codes.shape[1]
    out = room.of(count + -count % ENTRIES) if room else torch.empty((count, width), dtype=torch.bfloat16)
    job = GatherJob(
        codes=planes.codes.data_ptr(),
        scales=planes.scales.data_ptr(),
        blocks=0 if planes.blocks is None else planes.blocks.data_ptr(),
        picks=0 if picks is None else picks.data_ptr(),
        out=out.data_ptr(),
        count=count,
        width=width,
        per_block=planes.per_block,
    )
    library.function("hr_gather", 1)(ctypes.addressof(job))
    return out
