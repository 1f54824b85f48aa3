"""Attention of 64 heads over a window and 512 picked entries, and the gather that several layers share."""

import numpy as np
import torch

from headrace.kernels.native.attention import Attention, Planes, entries_room, gather
from headrace.kernels.native.benchmark import Workload
from headrace.kernels.native.library import Library
from headrace.kernels.native.room import Rooms
from headrace.kernels.native.rows import Finished
from headrace.kernels.native.samples import Samples

_HEADS, _WIDTH, _WINDOW, _SLOTS, _HELD = 64, 512, 128, 512, 8192


def workloads(library: Library) -> list[Workload]:
    """Return what is timed."""
    samples = Samples(0)
    codes, scales = samples.codes(2 * _WINDOW, _WIDTH), torch.full((2 * _WINDOW, _WIDTH // 32), 120, dtype=torch.uint8)
    attention = Attention(library, samples.normal(_HEADS), width=_WIDTH, rotated=64, window=_WINDOW, scale=_WIDTH**-0.5)
    entries, picks = samples.rows(_SLOTS, _WIDTH), torch.arange(_SLOTS).view(1, -1)
    place = (0, 1, 1000, 0, codes.data_ptr(), scales.data_ptr(), 2 * _WINDOW)
    table = np.array([(*place, picks.data_ptr(), _SLOTS, entries.data_ptr(), 0)])
    new = Finished(torch.zeros(0), samples.rows(1, _WIDTH), codes[:1].clone(), scales[:1].clone())
    q, turn, keys = samples.rows(1, _HEADS * _WIDTH), samples.turn(1000, 1, 64), _WINDOW + _SLOTS
    held = samples.integers(0, 256, _HELD, _WIDTH // 2).to(torch.uint8)
    planes = Planes(held, samples.codes(_HELD, _WIDTH // 16), None, 1)
    picked = samples.integers(0, _HELD, _SLOTS).sort().values
    room = entries_room(Rooms(), 0, _WIDTH)
    work, size = _SLOTS * _WIDTH, _SLOTS * (_WIDTH // 2 + _WIDTH // 16)
    return [
        # the queries are turned in place, again and again: their bits do not matter here
        Workload(
            f"one row, {_HEADS} heads, {keys} keys",
            lambda: (attention(q, turn, new, table), codes, scales, entries, picks),
            2 * keys * _WIDTH,
            2 * _HEADS * keys * _WIDTH,
        ),
        Workload(f"gather of {_SLOTS} entries", lambda: gather(library, planes, picked, _SLOTS, room), size, work),
    ]
