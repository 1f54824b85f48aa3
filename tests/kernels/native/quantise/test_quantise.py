"""The quantiser against its reference, bit for bit."""

import torch

from headrace.kernels.native.library import load
from headrace.kernels.native.quantise import quantise_q8, reference
from tests.kernels.native.matrices import on_every_instruction_set


@on_every_instruction_set
def test_codes_and_scales_are_those_of_the_reference(instruction_set: str) -> None:
    sizes = torch.exp2(torch.randint(-40, 40, (67, 1)).float())
    x = (torch.randn(67, 96) * sizes).bfloat16()
    x[3], x[5, 32:64], x[7, 1] = 0, -0.0, 1e-30
    x[9, 40], x[11, 95] = float("inf"), float("nan")
    found, wanted = quantise_q8(load(instruction_set), x), reference.quantise_q8(x)
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(found[0], wanted[0])


@on_every_instruction_set
def test_every_bfloat16_magnitude_is_rounded_as_the_reference_rounds_it(instruction_set: str) -> None:
    patterns = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.zeros(0x7F80, 32, dtype=torch.bfloat16)
    x[:, 5] = patterns
    x[:, 6] = torch.where(patterns.float() > 1e-30, -patterns / 3, 0)
    found, wanted = quantise_q8(load(instruction_set), x), reference.quantise_q8(x)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
