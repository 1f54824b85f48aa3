import pytest
import torch
from torch import Tensor

from headrace.kernels.product import (
    COLUMN_TILE,
    ROW_TILE,
    grouped_linear,
    linear,
    linear_fp32,
    pad_columns,
    pad_rows,
)
from tests.kernels.number_formats import is_rounded_once

FLOAT32_STEP = 2.0**-24  # a float32 sum of K terms is at most K such parts of the sum of magnitudes off


def bound(x: Tensor, weight: Tensor) -> Tensor:
    """Return how far a float32 sum of products may be from the exact one."""
    return x.shape[1] * FLOAT32_STEP * (x.double().abs() @ weight.double().abs().T)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 40])
@pytest.mark.parametrize(("width", "columns"), [(96, 40), (33, 5), (1280, 70)])
def test_products_are_rounded_once(rows: int, width: int, columns: int) -> None:
    x, weight = torch.randn(rows, width).bfloat16(), torch.randn(columns, width).bfloat16()
    y, want, slack = linear(x, weight), exact(x, weight), bound(x, weight)
    assert y.dtype == torch.bfloat16
    assert is_rounded_once(y, want, slack)
    wide = linear(x.float(), weight.float())
    assert wide.dtype == torch.float32
    assert ((wide.double() - want).abs() <= slack).all()


def test_products_of_codes_are_exact() -> None:
    # products and sums of small whole numbers fit float32: only the last rounding is left
    x, weight = torch.randint(-8, 9, (11, 96)).bfloat16(), torch.randint(-6, 7, (24, 96)).bfloat16()
    assert torch.equal(linear(x, weight), exact(x, weight).bfloat16())
    assert torch.equal(linear_fp32(x, pad_columns(weight), 24).double(), exact(x, weight))


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 16, 65])
def test_rows_are_padded_with_zeros_to_whole_tiles(rows: int) -> None:
    x = torch.randn(rows, 5)
    padded = pad_rows(x)
    assert padded.shape == (-(-rows // ROW_TILE) * ROW_TILE, 5)
    assert torch.equal(padded[:rows], x)
    assert not padded[rows:].any()
    if rows % ROW_TILE == 0:
        assert padded is x


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 24, 64])
def test_float32_weights_are_padded_with_zero_columns(columns: int) -> None:
    weight = torch.randn(columns, 6).bfloat16()
    padded = pad_columns(weight)
    assert padded.dtype == torch.float32
    assert padded.shape == (-(-columns // COLUMN_TILE) * COLUMN_TILE, 6)
    assert torch.equal(padded[:columns], weight.float())
    assert not padded[columns:].any()


def test_float32_products_hide_the_padding_and_take_any_input() -> None:
    x, weight = torch.randn(5, 32), torch.randn(7, 32)
    y = linear_fp32(x, pad_columns(weight), 7)
    assert y.shape == (5, 7)
    assert ((y.double() - exact(x, weight)).abs() <= bound(x, weight)).all()
    assert torch.equal(
        linear_fp32(x.bfloat16(), pad_columns(weight), 7), linear_fp32(x.bfloat16().float(), pad_columns(weight), 7)
    )


def test_every_group_has_its_own_matrix() -> None:
    x, weight = torch.randn(9, 3, 40).bfloat16(), torch.randn(3, 11, 40).bfloat16()
    y = grouped_linear(x, weight)
    assert y.shape == (9, 33)
    for group in range(3):
        want, slack = exact(x[:, group], weight[group]), bound(x[:, group], weight[group])
        assert is_rounded_once(y[:, 11 * group : 11 * (group + 1)], want, slack)


def test_no_rows_give_no_rows() -> None:
    weight = torch.randn(5, 32)
    assert linear(torch.zeros(0, 32), weight).shape == (0, 5)
    assert linear_fp32(torch.zeros(0, 32), pad_columns(weight), 5).shape == (0, 5)
    assert grouped_linear(torch.zeros(0, 2, 32), torch.randn(2, 5, 32)).shape == (0, 10)


def test_inputs_are_left_alone() -> None:
    x, weight = torch.randn(3, 32), torch.randn(5, 32)
    before = x.clone(), weight.clone()
    linear(x, weight)
    pad_columns(weight)
    grouped_linear(x.view(3, 2, 16), weight[:4].reshape(2, 4, 16))
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])
