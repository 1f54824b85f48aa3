"""The vocabulary head: a quarter of the released vocabulary, one row."""

from headrace.kernels.native.benchmark import Workload
from headrace.kernels.native.head import Head
from headrace.kernels.native.library import Library
from headrace.kernels.native.samples import Samples
from headrace.kernels.native.tiles import BF16

_SIZE, _WIDTH = 32_320, 5120


def workloads(library: Library) -> list[Workload]:
    """Return what is timed."""
    samples = Samples(0)
    matrix = samples.matrix(BF16, _SIZE, _WIDTH)
    head = Head(library, matrix, samples.positive(_WIDTH), eps=1e-20)
    x, pre = samples.normal(1, 4, _WIDTH).bfloat16(), samples.positive(1, 4)
    return [Workload(f"one row, {_SIZE:,} tokens", lambda: head(x, pre), matrix.nbytes, _SIZE * _WIDTH)]
