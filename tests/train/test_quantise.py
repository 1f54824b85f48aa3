"""Quantisers of training: the values a checkpoint stores, and gradients that pass straight through."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kernels.block_quant import (
    decode_fp8_weight,
    decode_q4i,
    decode_q8,
    fake_q4i,
    fake_q4k,
    fake_q8,
    unrounded,
)
from headrace.train.layers import LayerBuilder
from headrace.train.quantise import (
    QuantPlan,
    choose,
    encode_fp4_weight,
    encode_fp8_weight,
    encode_rows,
    fake_fp4_weight,
    fake_fp8_weight,
    fake_rows,
)
from tests.kernels.number_formats import E2M1, E4M3, nearest_code, power_at_least
from tests.train.graphs import lively_masters, micro_config

Fake = Callable[[Tensor], Tensor]
FAKES: dict[str, Fake] = {
    "FP8 weights": lambda x: fake_fp8_weight(x, 32),
    "FP4 weights": fake_fp4_weight,
    "FP8 rows": fake_rows,
    "inputs and windows": fake_q8,
    "global entries": fake_q4k,
    "index keys": fake_q4i,
}


def numbers(*shape: int) -> Tensor:
    """Return normal numbers whose rows differ in size by powers of ten."""
    return torch.randn(shape) * 10.0 ** torch.randint(-3, 3, (*shape[:-1], 1))


def nearest(groups: Tensor, grid: np.ndarray) -> Tensor:
    """Return every group [n, k] on its own grid: a power of two that covers its largest number, times `grid`."""
    values = groups.double().numpy()
    largest = np.abs(values).max(1, keepdims=True).astype(np.float32) * np.float32(1 / grid[-1])
    scale = 2.0 ** power_at_least(largest).astype(np.float64)
    return torch.from_numpy(np.sign(values) * grid[nearest_code(np.abs(values) / scale, grid)] * scale).float()


def test_fp8_weights_are_the_nearest_of_their_block() -> None:
    weight = numbers(64, 96)
    blocks = weight.unflatten(1, (3, 32)).unflatten(0, (2, 32)).permute(0, 2, 1, 3)
    wanted = nearest(blocks.reshape(6, -1), E4M3).view(2, 3, 32, 32).permute(0, 2, 1, 3).reshape(64, 96)
    assert torch.equal(fake_fp8_weight(weight, 32), wanted)


def test_fp8_blocks_at_the_edge_may_be_short() -> None:
    weight = numbers(40, 70)
    whole = torch.zeros(64, 96)
    whole[:40, :70] = weight
    assert torch.equal(fake_fp8_weight(weight, 32), fake_fp8_weight(whole, 32)[:40, :70])
    assert [part.shape for part in encode_fp8_weight(weight, 32)] == [(40, 70), (2, 3)]


def test_rows_and_fp4_weights_are_the_nearest_of_their_32_columns() -> None:
    rows, experts = numbers(7, 64), numbers(3, 5, 64)
    assert torch.equal(fake_rows(rows), nearest(rows.view(14, 32), E4M3).view(7, 64))
    assert torch.equal(fake_fp4_weight(experts), nearest(experts.view(30, 32), E2M1).view(3, 5, 64))


def test_what_is_computed_with_is_what_is_stored() -> None:
    weight, experts, rows = numbers(64, 96), numbers(3, 5, 64), numbers(7, 64)
    assert torch.equal(fake_fp8_weight(weight, 32), decode_fp8_weight(*encode_fp8_weight(weight, 32), 32).float())
    assert torch.equal(fake_fp4_weight(experts), decode_q4i(*encode_fp4_weight(experts)).float())
    assert torch.equal(fake_rows(rows), decode_q8(*encode_rows(rows)).float())


@pytest.mark.parametrize("name", FAKES)
def test_rounding_twice_is_rounding_once(name: str) -> None:
    once = FAKES[name](torch.randn(64, 96))
    assert torch.equal(FAKES[name](once), once)


@pytest.mark.parametrize("name", FAKES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_pass_straight_through(name: str, dtype: torch.dtype) -> None:
    """Also where a number is rounded to zero, and at the largest of its group."""
    x = numbers(64, 96).to(dtype).requires_grad_()
    gradient = torch.randn(64, 96).to(dtype)
    rounded = FAKES[name](x)
    assert rounded.dtype == dtype
    assert not torch.equal(rounded, x)
    assert torch.equal(torch.autograd.grad(rounded, x, gradient)[0], gradient)


@pytest.mark.parametrize("name", ["global entries", "index keys", "FP4 weights"])
def test_gradients_pass_through_numbers_that_saturate(name: str) -> None:
    # 5.99 of a largest 6 rounds to 6; with the scale of 448 * 6 the largest global entries are cut off
    x = torch.full((2, 32), 5e4 if name == "global entries" else 5.99).requires_grad_()
    rounded = FAKES[name](x)
    assert float((rounded - x).abs().max().detach()) > 0
    assert torch.equal(torch.autograd.grad(rounded.sum(), x)[0], torch.ones(2, 32))


@pytest.mark.parametrize("name", FAKES)
def test_zeros_stay_zeros(name: str) -> None:
    assert not FAKES[name](torch.zeros(32, 32)).any()


@pytest.mark.parametrize("name", FAKES)
def test_nothing_needs_a_gradient_that_the_input_does_not_need(name: str) -> None:
    assert not FAKES[name](torch.randn(32, 32)).requires_grad
    with torch.no_grad():
        assert not FAKES[name](torch.randn(32, 32, requires_grad=True)).requires_grad


def test_a_plan_switches_all_on_or_none() -> None:
    assert set(vars(QuantPlan()).values()) == {False}
    assert set(vars(QuantPlan.everything()).values()) == {True}
    x = torch.randn(2, 32)
    assert choose(False, fake_q8) is unrounded
    assert choose(True, fake_q8) is fake_q8
    assert unrounded(x) is x


@pytest.mark.parametrize("name", ["head.weight", "norm.weight", "layers.0.ffn.gate.weight"])
def test_parameters_stored_in_bfloat16_get_gradients_of_float32(name: str) -> None:
    masters = lively_masters(micro_config())
    builder = LayerBuilder(masters, QuantPlan.everything(), torch.float32)
    value = builder.wide(name)
    assert torch.equal(value, masters.parameters[name].bfloat16().float())
    gradient = torch.randn_like(value)
    assert torch.equal(torch.autograd.grad(value, masters.parameters[name], gradient)[0], gradient)
