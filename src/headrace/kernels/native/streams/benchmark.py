"""What lies between the two halves of a layer, at the released width."""

from functools import partial

from headrace.kernels.native.benchmark import Workload
from headrace.kernels.native.library import Library
from headrace.kernels.native.samples import Samples
from headrace.kernels.native.streams import Streams

_WIDTH = 5120


def workloads(library: Library) -> list[Workload]:
    """Return what is timed."""
    samples = Samples(0)
    fn, found = samples.normal(24, 4 * _WIDTH) * 0.01, []
    weights = (fn, samples.normal(24), samples.positive(3), samples.positive(_WIDTH))
    streams = Streams(library, *weights, iterations=20, norm_eps=1e-20, eps=1e-6)
    for count in (1, 64):
        x, half = samples.normal(count, 4, _WIDTH).bfloat16(), samples.rows(count, _WIDTH)
        before = streams.open(x, samples.positive(count, 4))
        size = 4 * fn.numel() + 2 * (2 * x.numel() + 2 * half.numel())
        found.append(
            Workload(
                f"expand and open, {count} x 4 x {_WIDTH}",
                partial(streams.follow, half, x, before),
                size,
                count * _WIDTH * (4 * 25 + 20),
            )
        )
    return found
