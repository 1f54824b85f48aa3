"""Window rows against their reference, bit for bit, on every instruction set."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.native.library import load
from headrace.kernels.native.rows import WindowRows, reference
from headrace.kernels.rope import plain_frequencies, rotation
from tests.kernels.native.matrices import on_every_instruction_set
from tests.kernels.rows import bits, differences


@on_every_instruction_set
@pytest.mark.parametrize(("latent", "width", "rotated"), [(32, 64, 16), (96, 32, 32), (16, 96, 2)])
def test_rows_are_their_reference(instruction_set: str, latent: int, width: int, rotated: int) -> None:
    q_norm, kv_norm = torch.rand(latent) + 0.5, torch.rand(width) + 0.5
    y = torch.randn(9, latent + width).bfloat16()
    y[4], y[5], y[6, 3] = 0, y[5] * 1e15, float("nan")
    turn = rotation(torch.arange(7, 16), plain_frequencies(rotated, 10000.0))
    run = WindowRows(load(instruction_set), q_norm, kv_norm, rotated=rotated, eps=1e-20)
    found, wanted = run(y, *turn), reference.finish(y, q_norm, kv_norm, turn, 1e-20)
    for name in ("latent_TR", "values_TH", "codes_TH", "scales_TG"):
        assert torch.equal(bits(getattr(found, name))[:6], bits(getattr(wanted, name))[:6]), name
    assert found.latent_TR[6].isnan().all() and found.latent_TR[7:].equal(wanted.latent_TR[7:])


@on_every_instruction_set
def test_rows_alone_have_the_bits_they_have_together(instruction_set: str) -> None:
    run = WindowRows(load(instruction_set), torch.rand(32), torch.rand(64), rotated=16, eps=1e-20)
    y, turn = torch.randn(65, 96).bfloat16(), rotation(torch.arange(65), plain_frequencies(16, 10000.0))

    def compute(rows: slice) -> list[Tensor]:
        found = run(y[rows].contiguous(), *(part[rows].contiguous() for part in turn))
        return [found.latent_TR, found.values_TH, found.codes_TH, found.scales_TG]

    assert differences(compute) == []
