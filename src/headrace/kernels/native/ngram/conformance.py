"""Cases of the n-gram gate: zero streams, zero keys, tiny numbers, dead rows."""

import torch
from torch import Tensor

from headrace.kernels.native.conformance import Case
from headrace.kernels.native.library import Library
from headrace.kernels.native.ngram import NgramGate, reference
from headrace.kernels.native.samples import Samples


def cases() -> list[Case]:
    """Return the cases."""
    return [_case(Samples(20 + width), rows, width) for rows, width in ((9, 48), (1, 16), (65, 1040))]


def _case(samples: Samples, rows: int, width: int) -> Case:
    weights = samples.normal(4, width), samples.normal(4, width)
    x, kv = samples.normal(rows, 4, width).bfloat16(), samples.normal(rows, 5 * width).bfloat16()
    if rows > 3:
        x[1], kv[2], x[3, 2] = 0, 0, x[3, 2] * 1e-18
        weights[0][0] = 0  # the first stream's product is zero, its gate is not half
    is_dead = torch.arange(rows) % 5 == 4

    def run(library: Library) -> list[Tensor]:
        found = x.clone()
        NgramGate(library, *weights, eps=1e-20)(found, kv, is_dead)
        return [found]

    return Case(f"{rows} rows of width {width}", run, lambda: [reference.inject(x, kv, weights, is_dead, 1e-20)])
