"""Sums have one order whatever the number of threads, and the right value."""

import pytest
import torch

from headrace.train.optim.reduction import column_sums, square_sum, total


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 70_001, 3_000_000])
def test_sums_are_right_for_any_length(count: int) -> None:
    values = torch.randn(count)
    assert float(total(values)) == pytest.approx(float(values.double().sum()), abs=1e-6)
    assert float(square_sum(values)) == pytest.approx(float(values.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 64, 1001])
def test_column_sums_are_right_for_any_number_of_rows(rows: int) -> None:
    values = torch.randn(rows, 5, dtype=torch.float64)
    before = values.clone()
    assert torch.allclose(column_sums(values), values.sum(0))
    assert torch.equal(values, before)


def test_two_threads_give_the_bits_of_one() -> None:
    values = torch.randn(3_000_001) * torch.logspace(-8, 8, 3_000_001)
    matrix = torch.randn(70_000, 33)
    one = total(values), square_sum(values), column_sums(matrix)
    torch.set_num_threads(2)
    try:
        two = total(values), square_sum(values), column_sums(matrix)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_what_is_not_finite_stays_so() -> None:
    for bad in (float("nan"), float("inf")):
        values = torch.zeros(5000)
        values[4999] = bad
        assert not torch.isfinite(square_sum(values))
