"""The activation quantiser on rows of the released width."""

from headrace.kernels.native.benchmark import Workload
from headrace.kernels.native.library import Library
from headrace.kernels.native.quantise import quantise_q8
from headrace.kernels.native.samples import Samples


def workloads(library: Library) -> list[Workload]:
    """Return what is timed."""
    x = Samples(0).rows(64, 5120)
    return [Workload("64 rows of 5120", lambda: quantise_q8(library, x), 2 * x.numel(), x.numel())]
