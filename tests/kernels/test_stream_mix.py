import math

import pytest
import torch
from torch import Tensor

from headrace.kernels.product import pad_columns
from headrace.kernels.sinkhorn import sinkhorn
from headrace.kernels.stream_mix import Mixes, collapse, expand, mixes
from tests.kernels.number_formats import is_rounded_once

FLOAT32_NOISE = 2e-5  # relative, of a float32 product over the streams and twenty normalisations
PRINTED = 5e-7


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def sinkhorn_by_hand(logits: list[list[float]], iterations: int, eps: float) -> list[list[float]]:
    size = range(len(logits))
    a = [[math.exp(v - max(row)) for v in row] for row in logits]
    a = [[v / sum(row) + eps for v in row] for row in a]
    for turn in range(iterations):
        if turn:
            a = [[v / (sum(row) + eps) for v in row] for row in a]
        columns = [sum(a[i][j] for i in size) + eps for j in size]
        a = [[a[i][j] / columns[j] for j in size] for i in size]
    return a


def mixes_by_hand(x_MD: Tensor, fn: Tensor, base: list[float], scale: list[float], iterations: int) -> list[Tensor]:
    m = x_MD.shape[0]
    flat = x_MD.double().flatten()
    c = (fn.double() @ flat * (flat.square().mean() + 1e-20).rsqrt()).tolist()
    pre = [sigmoid(c[i] * scale[0] + base[i]) + 1e-6 for i in range(m)]
    post = [2 * sigmoid(c[m + i] * scale[1] + base[m + i]) for i in range(m)]
    logits = [[c[2 * m + m * i + j] * scale[2] + base[2 * m + m * i + j] for j in range(m)] for i in range(m)]
    return [torch.tensor(v, dtype=torch.float64) for v in (pre, post, sinkhorn_by_hand(logits, iterations, 1e-6))]


def near(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got.double(), want.double(), rtol=FLOAT32_NOISE, atol=1e-7)


@pytest.mark.parametrize(
    ("count", "width", "iterations"), [(1, 32, 3), (2, 32, 20), (3, 40, 20), (4, 96, 1), (7, 32, 5)]
)
@pytest.mark.parametrize("size", [1e-12, 1.0, 300.0])
def test_coefficients_follow_the_equations(count: int, width: int, iterations: int, size: float) -> None:
    x = (torch.randn(5, count, width) * size).bfloat16()
    fn = torch.randn((2 + count) * count, count * width) / (count * width) ** 0.5
    base, scale = torch.randn((2 + count) * count), torch.tensor([0.7, 1.3, 1.9])
    got = mixes(x, pad_columns(fn), base, scale, norm_eps=1e-20, iterations=iterations, eps=1e-6)
    for row in range(5):
        pre, post, comb = mixes_by_hand(x[row], fn, base.tolist(), scale.tolist(), iterations)
        assert near(got.pre_TM[row], pre)
        assert near(got.post_TM[row], post)
        assert near(got.comb_TMM[row], comb)


def test_coefficients_are_the_printed_ones() -> None:
    # specification section 7, mHC: streams of ones have a mean square of 1, so that column 0 of `fn` gives c itself
    fn = torch.zeros(24, 4 * 32)
    fn[:, 0] = torch.tensor([0.1 * i - 1.1 for i in range(24)])
    base = torch.tensor([0.05 * ((7 * i) % 11) - 0.2 for i in range(24)])
    x = torch.ones((1, 4, 32), dtype=torch.bfloat16)
    scale = torch.tensor([0.5, 0.25, 2.0])
    got = mixes(x, pad_columns(fn), base, scale, norm_eps=1e-20, iterations=20, eps=1e-6)
    assert got.pre_TM[0].tolist() == pytest.approx([0.3208223, 0.4133835, 0.3775417, 0.4750218], abs=PRINTED)
    assert got.post_TM[0].tolist() == pytest.approx([0.9625176, 0.8756470, 1.0624188, 0.9750053], abs=PRINTED)
    rows = [
        [0.224978, 0.293206, 0.256836, 0.224978],
        [0.256836, 0.193120, 0.293206, 0.256836],
        [0.224978, 0.293206, 0.256836, 0.224978],
        [0.293206, 0.220467, 0.193120, 0.293206],
    ]
    for got_row, row in zip(got.comb_TMM[0].tolist(), rows, strict=True):
        assert got_row == pytest.approx(row, abs=PRINTED)


def test_the_matrix_ends_on_columns() -> None:
    comb = sinkhorn(torch.randn(50, 3, 3) * 3, 2, 1e-6)
    assert (comb.sum(1) - 1).abs().max() < 3e-6
    assert (comb.sum(2) - 1).abs().max() > 1e-3
    assert (comb > 0).all()


def test_streams_of_zeros_give_the_coefficients_of_the_base() -> None:
    base = torch.randn(15)
    x = torch.zeros((2, 3, 32), dtype=torch.bfloat16)
    scale = torch.ones(3)
    got = mixes(x, pad_columns(torch.randn(15, 96)), base, scale, norm_eps=1e-20, iterations=20, eps=1e-6)
    pre, post, comb = mixes_by_hand(x[0], torch.zeros(15, 96), base.tolist(), [1.0, 1.0, 1.0], 20)
    assert near(got.pre_TM[1], pre)
    assert near(got.post_TM[1], post)
    assert near(got.comb_TMM[1], comb)


@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_collapse_sums_in_stream_order_and_rounds_once(count: int) -> None:
    x, pre = torch.randn(5, count, 40).bfloat16(), torch.rand(5, count)
    total = torch.zeros(5, 40)
    for stream in range(count):
        total = total + x[:, stream].float() * pre[:, stream, None]
    got = collapse(x, pre)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, total.bfloat16())


@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_expand_sums_over_the_source_stream_and_rounds_once(count: int) -> None:
    x, out = torch.randn(5, count, 40).bfloat16(), torch.randn(5, 40).bfloat16()
    mix = Mixes(torch.rand(5, count), torch.rand(5, count) * 2, torch.rand(5, count, count))
    want = mix.post_TM.double()[:, :, None] * out.double()[:, None]
    want = want + torch.einsum("tij,tid->tjd", mix.comb_TMM.double(), x.double())
    size = torch.einsum("tij,tid->tjd", mix.comb_TMM.double(), x.double().abs()) + 2 * out.double().abs()[:, None]
    got = expand(out, x, mix)
    assert got.dtype == torch.bfloat16
    assert is_rounded_once(got, want, 1e-6 * size)


def test_a_cyclic_matrix_moves_streams_forward() -> None:
    # field report A5: a transposed matrix moves them backward; with two streams the difference cannot be seen
    x = torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1).bfloat16()
    comb = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]])  # source 0 goes to stream 1, ...
    mix = Mixes(torch.zeros(1, 3), torch.tensor([[0.0, 2.0, 0.0]]), comb)
    moved = expand(torch.tensor([[0.5]]).bfloat16(), x, mix)
    assert moved.flatten().tolist() == [100, 2, 10]


def test_no_rows_give_no_rows() -> None:
    x, fn = torch.zeros((0, 3, 32), dtype=torch.bfloat16), pad_columns(torch.randn(15, 96))
    mix = mixes(x, fn, torch.zeros(15), torch.ones(3), norm_eps=1e-20, iterations=20, eps=1e-6)
    assert mix.comb_TMM.shape == (0, 3, 3)
    assert collapse(x, mix.pre_TM).shape == (0, 32)
    assert expand(torch.zeros((0, 32), dtype=torch.bfloat16), x, mix).shape == (0, 3, 32)
