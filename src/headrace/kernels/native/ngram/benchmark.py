"""The n-gram gate at the released width."""

import torch

from headrace.kernels.native.benchmark import Workload
from headrace.kernels.native.library import Library
from headrace.kernels.native.ngram import NgramGate
from headrace.kernels.native.samples import Samples

_WIDTH = 5120


def workloads(library: Library) -> list[Workload]:
    """Return what is timed."""
    samples = Samples(0)
    gate = NgramGate(library, samples.normal(4, _WIDTH), samples.normal(4, _WIDTH), eps=1e-20)
    x, kv = samples.normal(1, 4, _WIDTH).bfloat16(), samples.rows(1, 5 * _WIDTH)
    is_dead = torch.zeros(1, dtype=torch.bool)
    return [Workload(f"one row of 4 x {_WIDTH}", lambda: gate(x, kv, is_dead), 2 * (32 + 9 + 4) * _WIDTH, 16 * _WIDTH)]
