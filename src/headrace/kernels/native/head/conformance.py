"""Cases of the vocabulary head: vocabularies of odd size, one row and more than a piece, zero rows."""

from torch import Tensor

from headrace.kernels.native.conformance import Case
from headrace.kernels.native.head import Head, reference
from headrace.kernels.native.library import Library
from headrace.kernels.native.samples import Samples
from headrace.kernels.native.tiles import BF16


def cases() -> list[Case]:
    """Return the cases."""
    sizes = ((1, 37, 64), (67, 16, 32), (5, 1, 96), (130, 3, 1056))
    return [_case(Samples(30 + size), rows, size, width) for rows, size, width in sizes]


def _case(samples: Samples, rows: int, size: int, width: int) -> Case:
    matrix, norm = samples.matrix(BF16, size, width), samples.positive(width)
    x, pre = samples.normal(rows, 4, width).bfloat16(), samples.positive(rows, 4)
    x[rows // 2] = 0

    def run(library: Library) -> list[Tensor]:
        head = Head(library, matrix, norm, eps=1e-20)
        return [head(x, pre), *head.with_hidden(x, pre)]

    def wanted() -> list[Tensor]:
        logits, hidden = reference.logits(x, pre, matrix, norm, 1e-20)
        return [logits, logits, hidden]

    return Case(f"{rows} rows, {size} tokens, width {width}", run, wanted)
