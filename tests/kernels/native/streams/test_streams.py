"""Hyper-connections against their reference, bit for bit, on every instruction set."""

import pytest
import torch
from torch import Tensor

from headrace.kernels import stream_mix
from headrace.kernels.native import lanes_reference as lanes
from headrace.kernels.native.library import load
from headrace.kernels.native.streams import Streams, collapse_norm, expand, reference
from headrace.kernels.product import pad_columns
from headrace.kernels.rms_norm import rms_norm
from tests.kernels.native.matrices import on_every_instruction_set
from tests.kernels.rows import bits, differences

NUMBERS = {"iterations": 20, "norm_eps": 1e-20, "eps": 1e-6}


def half(width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return pad_columns(torch.randn(24, 4 * width) * 0.05), torch.randn(24), torch.rand(3) + 0.5, torch.rand(width) + 0.5


@on_every_instruction_set
@pytest.mark.parametrize("width", [16, 48, 192])
def test_a_half_is_its_reference(instruction_set: str, width: int) -> None:
    library, weights = load(instruction_set), half(width)
    x, pre = torch.randn(7, 4, width).bfloat16(), torch.rand(7, 4)
    x[2] = 0
    x[3] *= 1e20
    x[4] *= 1e-18
    found, wanted = (
        Streams(library, *weights, **NUMBERS).open(x, pre),
        reference.open_half(x, pre, weights, **NUMBERS),
    )
    for name in ("u_TD", "pre_TM", "post_TM", "comb_TMM"):
        assert torch.equal(bits(getattr(found, name)), bits(getattr(wanted, name))), name
    out = torch.randn(7, width).bfloat16()
    run = library.function("hr_streams_expand", 7)
    assert torch.equal(bits(expand(run, out, x, found)), bits(reference.expand(out, x, wanted)))


@on_every_instruction_set
def test_a_half_is_close_to_the_pytorch_kernels(instruction_set: str) -> None:
    library, weights = load(instruction_set), half(64)
    x, pre = torch.randn(9, 4, 64).bfloat16(), torch.rand(9, 4)
    found = Streams(library, *weights, **NUMBERS).open(x, pre)
    wanted = stream_mix.mixes(x, *weights[:3], **NUMBERS)
    for name in ("pre_TM", "post_TM", "comb_TMM"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-5, atol=1e-6)
    u = rms_norm(stream_mix.collapse(x, pre), weights[3], 1e-20)
    torch.testing.assert_close(found.u_TD, u, rtol=2**-7, atol=0)
    torch.testing.assert_close(collapse_norm(library, x, pre, weights[3], 1e-20), u, rtol=2**-7, atol=0)


@on_every_instruction_set
def test_rows_alone_have_the_bits_they_have_together(instruction_set: str) -> None:
    streams = Streams(load(instruction_set), *half(48), **NUMBERS)
    x, pre = torch.randn(65, 4, 48).bfloat16(), torch.rand(65, 4)

    def compute(rows: slice) -> list[Tensor]:
        found = streams.open(x[rows].contiguous(), pre[rows].contiguous())
        return [found.u_TD, found.pre_TM, found.post_TM, found.comb_TMM]

    assert differences(compute) == []


def test_the_lanes_functions_are_accurate() -> None:
    x = torch.linspace(-87, 88, 20001)
    torch.testing.assert_close(lanes.exp(x).double(), x.double().exp(), rtol=3e-7, atol=0)
    y = torch.linspace(-30, 30, 20001)
    torch.testing.assert_close(lanes.softplus(y).double(), torch.nn.functional.softplus(y.double()), rtol=1e-6, atol=0)
