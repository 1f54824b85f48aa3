"""Six of 16 experts of the released size and the shared one: one row, and rows that share experts."""

from functools import partial

from headrace.kernels.native.benchmark import Workload
from headrace.kernels.native.experts import ExpertMatrices, Experts
from headrace.kernels.native.library import Library
from headrace.kernels.native.samples import Samples
from headrace.kernels.native.tiles import BF16, FP4, FP8

_COUNT, _WIDTH, _HIDDEN, _PICKED = 16, 5120, 2304, 6


def workloads(library: Library) -> list[Workload]:
    """Return what is timed."""
    samples = Samples(0)
    gate, up = ([samples.matrix(FP4, _HIDDEN, _WIDTH) for _ in range(_COUNT)] for _ in range(2))
    matrices = ExpertMatrices(
        router=samples.matrix(BF16, _COUNT, _WIDTH),
        bias=samples.normal(_COUNT),
        image_bias=None,
        gate=gate,
        up=up,
        down=[samples.matrix(FP4, _WIDTH, _HIDDEN) for _ in range(_COUNT)],
        shared_gate_up=samples.matrix(FP8, 2 * _HIDDEN, _WIDTH),
        shared_down=samples.matrix(FP8, _WIDTH, _HIDDEN),
    )
    run = Experts(library, matrices, per_token=_PICKED, scale=1.5, limit=10.0)
    shared, found = matrices.shared_gate_up.nbytes + matrices.shared_down.nbytes, []
    for count in (1, 64):
        u, read = samples.rows(count, _WIDTH), min(_COUNT, count * _PICKED)
        size = shared + read * 3 * gate[0].nbytes
        work = count * (_PICKED + 1) * 3 * _WIDTH * _HIDDEN
        title = f"{_PICKED} of {_COUNT} [{_HIDDEN}, {_WIDTH}] and the shared one, {count} row{'s' if count > 1 else ''}"
        found.append(Workload(title, partial(run, u), size, work))
    return found
