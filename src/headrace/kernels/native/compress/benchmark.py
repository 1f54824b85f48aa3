"""New entries of the released widths, pooled from pairs."""

import torch

from headrace.kernels.native.benchmark import Workload
from headrace.kernels.native.compress import Compressor, NewRows, Places
from headrace.kernels.native.library import Library
from headrace.kernels.native.samples import Samples
from headrace.kernels.native.tiles import BF16

_WIDTH, _KEY, _ENTRIES = 512, 128, 32


def workloads(library: Library) -> list[Workload]:
    """Return what is timed."""
    samples = Samples(0)
    key = samples.matrix(BF16, _KEY, _WIDTH)
    run = Compressor(library, samples.positive(_WIDTH), key, samples.positive(_KEY), rotated=64, eps=1e-20)
    values, gates = samples.normal(2 * _ENTRIES, _WIDTH), samples.normal(2 * _ENTRIES, _WIDTH)
    widths = (_WIDTH // 2, _WIDTH // 16, _KEY // 2, _KEY // 32)
    places = Places(tuple(torch.zeros((_ENTRIES, width), dtype=torch.uint8) for width in widths), None, 1)
    new = NewRows(values, gates, torch.zeros(2, 2, _WIDTH), 0, 0, _ENTRIES, 0)
    turn = samples.turn(0, _ENTRIES, 64)
    size, work = 8 * values.numel() + key.nbytes, _ENTRIES * _WIDTH * _KEY
    return [Workload(f"{_ENTRIES} entries of {_WIDTH} and {_KEY}", lambda: run(new, turn, places), size, work)]
