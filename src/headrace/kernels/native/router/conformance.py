"""Cases of the router: odd numbers of experts, ties, scores of every size, numbers that are none."""

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.native.conformance import Case
from headrace.kernels.native.router import reference, route
from headrace.kernels.native.samples import Samples


def cases() -> list[Case]:
    """Return the cases."""
    samples = Samples(50)
    found = [
        _case(f"{count} experts, {picked} for a row", samples.normal(9, count) * 4, samples.normal(count), picked)
        for count, picked in ((1, 1), (5, 2), (18, 3), (33, 6), (384, 6))
    ]
    wide = torch.linspace(-100, 100, 7 * 17).view(7, 17).contiguous()
    ties = torch.zeros(3, 19)
    ties[1, 4] = float("nan")
    return [
        *found,
        _case("scores of every size", wide, samples.normal(17), 4),
        _case("ties, and a score that is none", ties, torch.zeros(19), 4),
    ]


def _case(name: str, z: Tensor, bias: Tensor, per_token: int) -> Case:
    numbers: dict[str, Any] = {"per_token": per_token, "scale": 1.5}
    return Case(name, lambda library: route(library, z, bias, **numbers), lambda: reference.route(z, bias, **numbers))
