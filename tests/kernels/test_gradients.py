"""Gradients of operations: right, and the same bits in any piece and with any number of threads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.kernels.block_quant import unrounded
from headrace.kernels.grouped_experts import DenseExperts, routed_experts
from headrace.kernels.product import GRADIENT_ROWS, grouped_linear, linear, pad_columns
from headrace.kernels.route_topk import Routes
from headrace.kernels.stream_mix import mixes
from tests.kernels.rows import bits, differences, numbers, threads

Product = Callable[[Tensor, Tensor], Tensor]

# bfloat16 weight gradients whose inner dimension the library splits between two threads if it is left to it
SPLIT = [(2048, 32, 512), (4096, 32, 16), (2048, 32, 1280)]


def gradients(product: Product, x: Tensor, weight: Tensor, of_out: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    return torch.autograd.grad(product(*leaves), leaves, of_out)


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def plain_grouped(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([x[:, group] @ weight[group].T for group in range(weight.shape[0])], 1)


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, GRADIENT_ROWS, 2 * GRADIENT_ROWS + 3])
def test_gradients_are_those_of_the_formula(rows: int) -> None:
    x, weight, of_out = (torch.randn(shape).double() for shape in ((rows, 12), (5, 12), (rows, 5)))
    for found, wanted in zip(gradients(linear, x, weight, of_out), gradients(plain, x, weight, of_out), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    x, weight, of_out = (torch.randn(shape).double() for shape in ((rows, 3, 12), (3, 5, 12), (rows, 15)))
    found, wanted = gradients(grouped_linear, x, weight, of_out), gradients(plain_grouped, x, weight, of_out)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_side_that_needs_no_gradient_gets_none() -> None:
    x, weight = torch.randn(9, 12), torch.randn(5, 12)
    for product, one, other in ((linear, x, weight), (grouped_linear, x.view(9, 2, 6), torch.randn(2, 5, 6))):
        for needed in ((True, False), (False, True)):
            leaves = [
                side.clone().requires_grad_(is_needed) for side, is_needed in zip((one, other), needed, strict=True)
            ]
            product(*leaves).sum().backward()
            assert tuple(leaf.grad is not None for leaf in leaves) == needed
    with torch.no_grad():
        assert not linear(x, weight.requires_grad_()).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "columns"), [(96, 40), (32, 33), (128, 3), (96, 512)])
def test_the_gradient_of_a_row_does_not_depend_on_the_others(width: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, of_out = (numbers(*shape, dtype=dtype) for shape in ((65, width), (columns, width), (65, columns)))
    assert differences(lambda rows: gradients(linear, x[rows], weight, of_out[rows])[0]) == []
    x, weight = numbers(65, 2, width, dtype=dtype), numbers(2, columns, width, dtype=dtype)
    of_out = numbers(65, 2 * columns, dtype=dtype)
    assert differences(lambda rows: gradients(grouped_linear, x[rows], weight, of_out[rows])[0]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "columns"), SPLIT)
def test_threads_change_no_bit_of_a_weight_gradient(rows: int, width: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, of_out = (numbers(*shape, dtype=dtype) for shape in ((rows, width), (columns, width), (rows, columns)))
    check_threads(lambda: gradients(linear, x, weight, of_out))


def check_threads(compute: Callable[[], tuple[Tensor, ...]]) -> None:
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(compute())
    for other in found[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found[0], other, strict=True))


def test_threads_change_no_bit_of_the_gradients_of_stream_mixes() -> None:
    x, fn, base, scale = torch.randn(4100, 3, 32), torch.randn(15, 96) / 10, torch.randn(15), torch.rand(3)

    def compute() -> tuple[Tensor, ...]:
        leaves = [leaf.detach().requires_grad_() for leaf in (x, pad_columns(fn), base, scale)]
        found = mixes(*leaves, norm_eps=1e-6, iterations=1, eps=1e-6)
        of_comb = torch.linspace(-1, 1, found.comb_TMM.numel()).view_as(found.comb_TMM)
        outputs, of_outputs = (found.pre_TM, found.post_TM, found.comb_TMM), (found.pre_TM, found.post_TM, of_comb)
        return torch.autograd.grad(outputs, leaves, [one.detach() for one in of_outputs])

    check_threads(compute)


def test_threads_change_no_bit_of_the_gradients_of_experts() -> None:
    x, gate_up, down = torch.randn(1200, 64), torch.randn(5, 2 * 32, 64) / 8, torch.randn(5, 64, 32) / 8
    weights, experts = torch.rand(1200, 4), torch.rand(1200, 5).argsort(1)[:, :4].sort(1).values

    def compute() -> tuple[Tensor, ...]:
        leaves = [leaf.detach().requires_grad_() for leaf in (x, weights, gate_up, down)]
        routes = Routes(experts, leaves[1], torch.zeros(1200, 5))
        found = routed_experts(leaves[0], routes, DenseExperts(*leaves[2:]), 1.0, unrounded)
        return torch.autograd.grad(found, leaves, torch.cos(found.detach() * 9))

    check_threads(compute)
