"""Window rows of the released widths."""

from headrace.kernels.native.benchmark import Workload
from headrace.kernels.native.library import Library
from headrace.kernels.native.rows import WindowRows
from headrace.kernels.native.samples import Samples


def workloads(library: Library) -> list[Workload]:
    """Return what is timed."""
    samples = Samples(0)
    run = WindowRows(library, samples.positive(1280), samples.positive(512), rotated=64, eps=1e-20)
    y, turn = samples.rows(64, 1792), samples.turn(0, 64, 64)
    return [Workload("64 rows of 1280 + 512", lambda: run(y, *turn), 2 * y.numel(), 2 * y.numel())]
