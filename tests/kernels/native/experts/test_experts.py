"""Experts against their reference, bit for bit, on every instruction set."""

import pytest
import torch

from headrace.kernels.native.experts import ExpertMatrices, Experts, reference
from headrace.kernels.native.library import load
from headrace.kernels.native.tiles import BF16, FP4, FP8
from tests.kernels.native.matrices import matrix, on_every_instruction_set
from tests.kernels.rows import bits, differences

SCALES = (120, 126)


def experts(count: int, width: int, hidden: int) -> ExpertMatrices:
    return ExpertMatrices(
        router=matrix(BF16, count, width),
        bias=torch.randn(count),
        image_bias=torch.randn(count),
        gate=[matrix(FP4, hidden, width, SCALES) for _ in range(count)],
        up=[matrix(FP4, hidden, width, SCALES) for _ in range(count)],
        down=[matrix(FP4, width, hidden, SCALES) for _ in range(count)],
        shared_gate_up=matrix(FP8, 2 * hidden, width, SCALES),
        shared_down=matrix(FP8, width, hidden, SCALES),
    )


@on_every_instruction_set
@pytest.mark.parametrize(("count", "width", "hidden", "per_token"), [(5, 64, 32, 2), (18, 32, 96, 3), (1, 96, 64, 1)])
def test_experts_are_their_reference(instruction_set: str, count: int, width: int, hidden: int, per_token: int) -> None:
    matrices = experts(count, width, hidden)
    u = (torch.randn(9, width) / 8).bfloat16()
    u[3] = 0
    is_image = torch.arange(9) % 4 == 1
    numbers = {"per_token": per_token, "scale": 1.5, "limit": 10.0}
    found = Experts(load(instruction_set), matrices, **numbers).routed(u, is_image)
    wanted = reference.run(u, matrices, **numbers, is_image=is_image)
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(bits(found[0]), bits(wanted[0]))


@on_every_instruction_set
def test_equal_scores_go_to_the_lower_expert(instruction_set: str) -> None:
    matrices = experts(6, 32, 32)
    matrices.bias.zero_()
    run = Experts(load(instruction_set), matrices, per_token=4, scale=1.0, limit=0.0)
    assert run.routed(torch.zeros(2, 32).bfloat16())[1].tolist() == [[0, 1, 2, 3]] * 2


@on_every_instruction_set
def test_a_number_that_is_absent_stays_absent(instruction_set: str) -> None:
    u = torch.zeros(2, 32).bfloat16()
    u[1, 7] = float("nan")
    run = Experts(load(instruction_set), experts(4, 32, 32), per_token=2, scale=1.0, limit=10.0)
    assert run(u).isnan().any(1).tolist() == [False, True]


@on_every_instruction_set
def test_rows_alone_have_the_bits_they_have_together(instruction_set: str) -> None:
    run = Experts(load(instruction_set), experts(5, 64, 32), per_token=2, scale=1.5, limit=10.0)
    u = (torch.randn(65, 64) / 8).bfloat16()
    assert differences(lambda rows: run(u[rows].contiguous())) == []
    many = (torch.randn(600, 64) / 8).bfloat16()
    assert torch.equal(run(many)[300:310], run(many[300:310].contiguous()))
