import pytest
import torch
from torch.nn import functional

from headrace.kernels.activation import sigmoid, silu, softplus

FLOAT32_NOISE = 5e-7  # relative, of exp and a division in float32

POINTS = torch.cat([torch.linspace(-30, 30, 601), torch.tensor([0.0, -0.0, 1e-7, -1e-7, 20.0, 20.000002, 90.0, -87.0])])


@pytest.mark.parametrize(
    ("own", "library"), [(sigmoid, torch.sigmoid), (silu, functional.silu), (softplus, functional.softplus)]
)
def test_values_are_those_of_the_formula(own: "type[torch.Tensor]", library: "type[torch.Tensor]") -> None:
    want = library(POINTS.double())
    assert ((own(POINTS).double() - want).abs() <= FLOAT32_NOISE * want.abs() + 1e-37).all()


def test_far_arguments_saturate_without_nan() -> None:
    far = torch.tensor([1e4, -1e4, 3e38, -3e38])
    assert sigmoid(far).tolist() == [1, 0, 1, 0]
    assert silu(far)[[0, 2]].tolist() == far[[0, 2]].tolist()
    assert silu(far)[[1, 3]].tolist() == [0, 0]
    assert softplus(far).tolist() == [1e4, 0, far[2].item(), 0]


def test_softplus_above_twenty_is_its_argument() -> None:
    above = torch.tensor([20.000002, 25.0, 100.0])
    assert torch.equal(softplus(above), above)


@pytest.mark.parametrize("own", [sigmoid, silu, softplus])
def test_nan_stays_nan_and_strided_input_is_read_in_order(own: "type[torch.Tensor]") -> None:
    assert own(torch.tensor([float("nan"), 1.0]))[0].isnan()
    x = torch.randn(6, 4)
    before = x.clone()
    assert torch.equal(own(x[:, ::2]), own(x[:, ::2].clone()))
    assert torch.equal(own(x.T), own(x).T)
    assert torch.equal(x, before)
