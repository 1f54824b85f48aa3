"""Cases of the hyper-connections: opening, expansion and both in one; zero, huge and tiny streams."""

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.native.conformance import Case
from headrace.kernels.native.library import Library
from headrace.kernels.native.samples import Samples
from headrace.kernels.native.streams import Opened, Streams, collapse_norm, expand, reference

_NUMBERS: dict[str, Any] = {"iterations": 20, "norm_eps": 1e-20, "eps": 1e-6}


def cases() -> list[Case]:
    """Return the cases."""
    return [_case(Samples(rows), rows, width) for rows, width in ((1, 16), (7, 48), (5, 192), (65, 1040))]


def _case(samples: Samples, rows: int, width: int) -> Case:
    weights = (samples.normal(24, 4 * width) * 0.05, samples.normal(24), samples.positive(3), samples.positive(width))
    x, pre, half = samples.normal(rows, 4, width).bfloat16(), samples.positive(rows, 4), samples.rows(rows, width)
    if rows > 4:
        x[2], x[3], x[4] = 0, x[3] * 1e20, x[4] * 1e-18

    def run(library: Library) -> list[Tensor]:
        streams = Streams(library, *weights, **_NUMBERS)
        opened = streams.open(x, pre)
        between = expand(library.function("hr_streams_expand", 7), half, x, opened)
        together, followed = streams.follow(half, x, opened)
        alone = collapse_norm(library, x, pre, weights[3], _NUMBERS["norm_eps"])
        return [*_parts(opened), between, together, *_parts(followed), alone]

    def wanted() -> list[Tensor]:
        opened = reference.open_half(x, pre, weights, **_NUMBERS)
        between = reference.expand(half, x, opened)
        followed = reference.open_half(between, opened.pre_TM, weights, **_NUMBERS)
        return [*_parts(opened), between, between, *_parts(followed), opened.u_TD]

    return Case(f"{rows} rows of width {width}", run, wanted)


def _parts(opened: Opened) -> list[Tensor]:
    return [opened.u_TD, opened.pre_TM, opened.post_TM, torch.clone(opened.comb_TMM)]
