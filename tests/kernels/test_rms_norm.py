import pytest
import torch
from torch import Tensor

from headrace.kernels.rms_norm import rms_norm
from tests.kernels.number_formats import is_rounded_once

FLOAT32_NOISE = 4e-7  # relative, of the few float32 roundings before the last one


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return weight.double() * (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt())


@pytest.mark.parametrize("width", [1, 5, 96, 512, 5120])
@pytest.mark.parametrize("eps", [1e-20, 1e-6])
def test_rows_are_divided_by_their_root_mean_square_and_rounded_once(width: int, eps: float) -> None:
    x, weight = torch.randn(9, width).bfloat16(), torch.randn(width)
    want = formula(x, weight, eps)
    got = rms_norm(x, weight, eps)
    assert got.dtype == torch.bfloat16
    assert is_rounded_once(got, want, FLOAT32_NOISE * want.abs())


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e-8, 1.0, 1e15])
def test_the_size_of_a_row_falls_out(scale: float) -> None:
    # squares of the smallest and of the largest stay inside float32 only just: 1e-60 underflows, 1e30 fits
    x, weight = torch.randn(3, 64), torch.ones(64)
    row = (x * scale).bfloat16()
    want = formula(row, weight, 1e-20)
    assert ((rms_norm(row, weight, 1e-20).double() - want).abs() <= 0.01 * want.abs() + 1e-20).all()


def test_a_row_of_zeros_gives_zeros() -> None:
    out = rms_norm(torch.zeros((2, 32), dtype=torch.bfloat16), torch.randn(32), 1e-20)
    assert torch.equal(out, torch.zeros((2, 32), dtype=torch.bfloat16))


def test_the_weight_is_used_as_it_is() -> None:
    # no "1 +": a weight of zero silences a column
    weight = torch.ones(32)
    weight[3] = 0
    x = torch.randn(4, 32).bfloat16()
    out = rms_norm(x, weight, 1e-20)
    assert not out[:, 3].any()
    assert (out[:, :3] != 0).all()


def test_leading_dimensions_stay_and_no_rows_give_no_rows() -> None:
    x, weight = torch.randn(2, 3, 32).bfloat16(), torch.randn(32)
    out = rms_norm(x, weight, 1e-20)
    assert torch.equal(out[1, 2], rms_norm(x[1, 2], weight, 1e-20))
    assert rms_norm(x[:0], weight, 1e-20).shape == (0, 3, 32)


def test_nan_stays_nan() -> None:
    x = torch.ones((2, 32), dtype=torch.bfloat16)
    x[0, 4] = float("nan")
    out = rms_norm(x, torch.ones(32), 1e-20)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
