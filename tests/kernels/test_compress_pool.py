import pytest
import torch

from headrace.kernels.compress_pool import pool_pairs
from tests.kernels.number_formats import is_rounded_once

FLOAT32_NOISE = 1e-6  # relative to the two values, of exp, a division and two products


@pytest.mark.parametrize(("pairs", "width"), [(1, 1), (3, 24), (7, 512)])
def test_a_pair_is_pooled_with_a_softmax_over_each_dimension(pairs: int, width: int) -> None:
    values, gates = torch.randn(pairs, 2, width), torch.randn(pairs, 2, width) * 4
    got = pool_pairs(values, gates)
    assert got.dtype == torch.bfloat16
    want = (torch.softmax(gates.double(), 1) * values.double()).sum(1)
    slack = FLOAT32_NOISE * values.double().abs().sum(1)
    assert is_rounded_once(got, want, slack)


def test_equal_gates_average_and_a_large_gate_chooses() -> None:
    values = torch.tensor([[[2.0, 2.0, 2.0], [6.0, 6.0, 6.0]]])
    gates = torch.tensor([[[1.0, 500.0, -1e30], [1.0, -500.0, 1e30]]])
    assert pool_pairs(values, gates).tolist() == [[4.0, 2.0, 6.0]]


def test_no_pairs_give_no_rows() -> None:
    assert pool_pairs(torch.zeros(0, 2, 8), torch.zeros(0, 2, 8)).shape == (0, 8)
