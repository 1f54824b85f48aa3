"""Choice of 6 of 384 experts."""

from headrace.kernels.native.benchmark import Workload
from headrace.kernels.native.library import Library
from headrace.kernels.native.router import route
from headrace.kernels.native.samples import Samples

_ROWS, _EXPERTS = 64, 384


def workloads(library: Library) -> list[Workload]:
    """Return what is timed."""
    samples = Samples(0)
    z, bias = samples.normal(_ROWS, _EXPERTS), samples.normal(_EXPERTS)
    name = f"{_ROWS} rows, 6 of {_EXPERTS}"
    return [Workload(name, lambda: route(library, z, bias, per_token=6, scale=1.5), 4 * z.numel(), 6 * z.numel())]
