"""Cases of experts: odd numbers of them, widths at and off block borders, images, zero rows, no clamp."""

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.native.conformance import Case
from headrace.kernels.native.experts import ExpertMatrices, Experts, reference
from headrace.kernels.native.library import Library
from headrace.kernels.native.samples import Samples
from headrace.kernels.native.tiles import BF16, FP4, FP8

_SCALES = (120, 126)
_SIZES = ((5, 64, 32, 2, 9), (18, 32, 96, 3, 17), (1, 96, 64, 1, 1), (3, 256, 512, 2, 33))


def cases() -> list[Case]:
    """Return the cases."""
    return [_case(Samples(60 + place), *sizes) for place, sizes in enumerate(_SIZES)]


def _matrices(samples: Samples, count: int, width: int, hidden: int) -> ExpertMatrices:
    return ExpertMatrices(
        router=samples.matrix(BF16, count, width),
        bias=samples.normal(count),
        image_bias=samples.normal(count),
        gate=[samples.matrix(FP4, hidden, width, _SCALES) for _ in range(count)],
        up=[samples.matrix(FP4, hidden, width, _SCALES) for _ in range(count)],
        down=[samples.matrix(FP4, width, hidden, _SCALES) for _ in range(count)],
        shared_gate_up=samples.matrix(FP8, 2 * hidden, width, _SCALES),
        shared_down=samples.matrix(FP8, width, hidden, _SCALES),
    )


def _case(samples: Samples, count: int, width: int, hidden: int, per_token: int, rows: int) -> Case:
    matrices = _matrices(samples, count, width, hidden)
    u, is_image = samples.rows(rows, width, 3), torch.arange(rows) % 4 == 1
    numbers: dict[str, Any] = {"per_token": per_token, "scale": 1.5, "limit": 10.0 if count % 2 else 0.0}

    def run(library: Library) -> list[Tensor]:
        return list(Experts(library, matrices, **numbers).routed(u, is_image))

    def wanted() -> list[Tensor]:
        return list(reference.run(u, matrices, **numbers, is_image=is_image))

    return Case(f"{count} experts [{hidden}, {width}], {rows} rows", run, wanted)
