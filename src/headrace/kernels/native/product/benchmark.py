"""Products of one row and of many with matrices of the released sizes."""

from functools import partial

from headrace.kernels.native.benchmark import Workload
from headrace.kernels.native.library import Library
from headrace.kernels.native.product import Product
from headrace.kernels.native.samples import KINDS, Samples
from headrace.kernels.native.tiles import BF16

_ROWS, _WIDTH = 2304, 5120


def workloads(library: Library) -> list[Workload]:
    """Return what is timed."""
    samples, found = Samples(0), []
    for name, kind in KINDS.items():
        matrix = samples.matrix(kind, _ROWS, _WIDTH)
        product = Product(library, matrix, is_quantised=kind != BF16)
        for count in (1, 8, 64):
            x = samples.rows(count, _WIDTH)
            title = f"{name} [{_ROWS}, {_WIDTH}], {count} row{'s' if count > 1 else ''}"
            work = count * _ROWS * _WIDTH
            found.append(Workload(title, partial(product, x), matrix.nbytes, work))
    return found
