import math

import pytest
import torch

from headrace.kernels.rope import plain_frequencies, rotate, rotation, yarn_frequencies
from tests.kernels.number_formats import is_rounded_once

RELEASED = {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_positions": 65536}
PRINTED = 6e-7  # the specification prints seven digits

# specification section 7
YARN = [
    1, 6.876560e-1, 4.728708e-1, 3.251724e-1, 2.236068e-1, 1.537646e-1, 1.057371e-1, 7.271077e-2, 5.000000e-2,
    3.438280e-2, 2.364354e-2, 1.625862e-2, 1.118034e-2, 7.688228e-3, 5.286857e-3, 3.635539e-3, 2.265625e-3, 1.396801e-3,
    8.496897e-4, 5.080820e-4, 2.969778e-4, 1.681800e-4, 9.086784e-5, 4.544423e-5, 1.953125e-5, 5.372312e-6, 3.694303e-6,
    2.540410e-6, 1.746928e-6, 1.201286e-6, 8.260713e-7, 5.680529e-7,
]  # fmt: skip


def test_released_frequencies_are_the_printed_ones() -> None:
    yarn = yarn_frequencies(64, 160000.0, **RELEASED)
    assert yarn.dtype == torch.float32
    assert yarn.tolist() == pytest.approx(YARN, rel=PRINTED)
    plain = plain_frequencies(64, 10000.0)
    assert plain.shape == (32,)
    assert plain[:5].tolist() == pytest.approx([1, 7.498942e-1, 5.623413e-1, 4.216965e-1, 3.162278e-1], rel=PRINTED)


@pytest.mark.parametrize(("rope_dim", "theta"), [(16, 160000.0), (8, 10000.0), (64, 500.0), (2, 10000.0)])
def test_stretched_frequencies_follow_the_ramp(rope_dim: int, theta: float) -> None:
    factor, fast, slow, length = 4.0, 32.0, 1.0, 64
    got = yarn_frequencies(rope_dim, theta, factor=factor, beta_fast=fast, beta_slow=slow, original_positions=length)

    def index_of(turns: float) -> float:
        return rope_dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = max(math.floor(index_of(fast)), 0), min(math.ceil(index_of(slow)), rope_dim - 1)
    for i in range(rope_dim // 2):
        base = theta ** (-2 * i / rope_dim)
        ramp = min(max((i - low) / ((high - low) or 0.001), 0), 1)
        assert got[i].item() == pytest.approx(base * (1 - ramp) + base / factor * ramp, rel=1e-6)


def test_the_angle_is_the_float32_product_of_position_and_frequency() -> None:
    # with the exact product the angle would differ by up to 0.03 rad at a million tokens
    frequencies = plain_frequencies(64, 10000.0)
    positions = torch.tensor([0, 1, 4097, 1000003, 1048575])
    cos, sin = rotation(positions, frequencies)
    for row, position in enumerate(positions.tolist()):
        for i, frequency in enumerate(frequencies.tolist()):
            angle = float(torch.tensor(float(position)) * torch.tensor(frequency))
            assert cos[row, i].item() == pytest.approx(math.cos(angle), abs=2e-7)
            assert sin[row, i].item() == pytest.approx(math.sin(angle), abs=2e-7)
    exact = 1000003 * frequencies.double()
    assert (torch.cos(exact) - cos[3].double()).abs().max() > 1e-3


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(7, 8), (7, 3, 24), (1, 2, 3, 13)])
def test_the_last_pairs_turn_as_complex_numbers(shape: tuple[int, ...], inverse: bool) -> None:
    x, frequencies = torch.randn(shape).bfloat16(), plain_frequencies(8, 10000.0)
    cos, sin = rotation(torch.arange(5, 5 + shape[0]), frequencies)
    got = rotate(x, cos, sin, inverse=inverse)
    assert torch.equal(got[..., :-8], x[..., :-8])
    pairs = torch.view_as_complex(x[..., -8:].double().unflatten(-1, (-1, 2)).contiguous())
    turn = torch.complex(cos.double(), -sin.double() if inverse else sin.double())
    turn = turn.view(shape[0], *([1] * (len(shape) - 2)), 4)
    want = torch.view_as_real(pairs * turn).flatten(-2)
    slack = 1e-6 * x[..., -8:].double().abs().amax()
    assert is_rounded_once(got[..., -8:], want, slack)


def test_neighbours_are_a_pair_and_a_quarter_turn_swaps_them() -> None:
    # interleaved pairs: (0, 1) and (2, 3), not (0, 2) and (1, 3)
    x = torch.tensor([[9.0, 1.0, 2.0, 3.0, 4.0]]).bfloat16()
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    assert rotate(x, cos, sin).tolist() == [[9, -2, 1, 3, 4]]
    assert rotate(x, cos, sin, inverse=True).tolist() == [[9, 2, -1, 3, 4]]


def test_turning_back_undoes_a_turn() -> None:
    x = torch.randn(9, 4, 24).bfloat16()
    cos, sin = rotation(torch.arange(1000000, 1000009), plain_frequencies(16, 160000.0))
    back = rotate(rotate(x, cos, sin), cos, sin, inverse=True)
    assert (back.double() - x.double()).abs().max() <= 2 * 2.0**-8 * x.double().abs().max()


def test_the_input_is_left_alone_and_position_zero_turns_nothing() -> None:
    x = torch.randn(1, 24).bfloat16()
    before = x.clone()
    cos, sin = rotation(torch.tensor([0]), plain_frequencies(8, 10000.0))
    out = rotate(x, cos, sin)
    assert torch.equal(out, before)
    out.zero_()
    assert torch.equal(x, before)
