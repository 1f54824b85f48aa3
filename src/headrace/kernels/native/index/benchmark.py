"""A query of 32 heads over 65,536 keys: top-512, with and without block maxima."""

import numpy as np
import torch

from headrace.kernels.native.benchmark import Workload
from headrace.kernels.native.index import Index, Shape
from headrace.kernels.native.library import Library
from headrace.kernels.native.samples import Samples

_KEYS, _HEADS, _WIDTH = 65_536, 32, 128


def workloads(library: Library) -> list[Workload]:
    """Return what is timed."""
    return [_workload(library, writes_pool=writes_pool) for writes_pool in (False, True)]


def _workload(library: Library, *, writes_pool: bool) -> Workload:
    samples = Samples(0)
    codes = samples.integers(0, 256, _KEYS, _WIDTH // 2).to(torch.uint8)
    scales = samples.integers(120, 130, _KEYS, _WIDTH // 32).to(torch.uint8)
    shape = Shape(_HEADS, _WIDTH, 64, 1, 512, 2048 if writes_pool else 0, 8 if writes_pool else 1, writes_pool)
    index = Index(library, shape)
    picks, pool = (torch.zeros((1, count), dtype=torch.int64) for count in (512, 2048))
    place = (0, 1, _KEYS - 1, codes.data_ptr(), scales.data_ptr(), 0, 1, picks.data_ptr(), pool.data_ptr())
    table, turn = np.array([place]), samples.turn(_KEYS - 1, 1, 64)
    q, weights = samples.rows(1, _HEADS * _WIDTH), samples.normal(1, _HEADS).abs().bfloat16()
    name = f"one row, {_HEADS} heads, {_KEYS:,} keys{', block maxima' if writes_pool else ''}"

    def run() -> object:
        return index((q.clone(), weights, *turn), table), codes, scales, picks, pool

    return Workload(name, run, _KEYS * (_WIDTH // 2 + _WIDTH // 32), _KEYS * _HEADS * _WIDTH)
