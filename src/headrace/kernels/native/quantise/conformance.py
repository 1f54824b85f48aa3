"""Cases of the activation quantiser: every bfloat16 magnitude, zeros of both signs, numbers that are none."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from headrace.kernels.native.conformance import Case
from headrace.kernels.native.library import Library
from headrace.kernels.native.quantise import quantise_q8, reference
from headrace.kernels.native.samples import Samples


def cases() -> list[Case]:
    """Return the cases."""
    rows = Samples(0).rows(67, 96, 40)
    rows[5, 32:64], rows[7, 1] = -0.0, 1e-30
    rows[9, 40], rows[11, 95] = float("inf"), float("nan")
    patterns = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = torch.zeros(len(patterns), 32, dtype=torch.bfloat16)
    every[:, 5] = patterns
    every[:, 6] = torch.where(patterns.float() > 1e-30, -patterns / 3, 0)
    return [
        Case(name, partial(_run, x), partial(reference.quantise_q8, x))
        for name, x in (("rows of all sizes", rows), ("every magnitude", every), ("one group", rows[:1, :32].clone()))
    ]


def _run(x: Tensor, library: Library) -> Sequence[Tensor]:
    return quantise_q8(library, x)
