"""Training kernels: forward parts have PyTorch's bits; gradients are right, and the same bits however they are made."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from headrace.kernels import rope, sinkhorn, sparse_attention, stream_mix, swiglu
from headrace.kernels.native.attention_gradient import Attended, attention_gradients
from headrace.kernels.native.cross_entropy import judge_rows
from headrace.kernels.native.library import available, load
from headrace.kernels.native.rotation import rotate_heads
from headrace.kernels.native.streams_gradient import StreamGradients
from headrace.kernels.native.swiglu_gradient import swiglu_gradient
from headrace.kernels.native.weight_gradient import add_weight_gradient
from headrace.kernels.product import pad_columns
from headrace.kernels.sparse_attention import SelectedEntries, WindowKeys, attend
from tests.kernels.native.matrices import on_every_instruction_set
from tests.kernels.rows import bits, threads

ROWS, WIDTH = 37, 48
NUMBERS = stream_mix.Numbers(streams=4, norm_eps=1e-6, iterations=20, eps=1e-6)

pytestmark = pytest.mark.skipif(not available(), reason="the kernel library was not built")


def half(rows: int = ROWS) -> list[Tensor]:
    """Return streams, pre-mix, a half's output, and weights of the coefficients."""
    fn, base, scale = torch.randn(24, 4 * WIDTH) * 0.1, torch.randn(24), torch.rand(3) + 0.5
    return [torch.randn(rows, 4, WIDTH), torch.rand(rows, 4), torch.randn(rows, WIDTH), fn, base, scale]


def run_half(x: Tensor, pre: Tensor, out: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> list[Tensor]:
    streams, collapsed, mix = stream_mix.open_half(x, pre, pad_columns(fn), base, scale, NUMBERS)
    return [stream_mix.expand(out, streams, mix), collapsed, mix.pre_TM]


def gradients(compute: Callable[..., list[Tensor]], given: list[Tensor]) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in given]
    found = compute(*leaves)
    probes = [torch.randn(one.shape, generator=torch.Generator().manual_seed(7)).to(one.dtype) for one in found]
    return list(torch.autograd.grad(found, leaves, probes))


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * scale)


def same(results: list[list[Tensor]]) -> None:
    for one, other in pairwise(results):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("rows", [1, 16, 37])
def test_streams_have_the_bits_of_pytorch(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = half(rows)
    found = run_half(*given)
    logits = torch.randn(rows, 4, 4) * 5
    normal = sinkhorn.sinkhorn(logits, 20, 1e-6)
    monkeypatch.setattr(stream_mix, "stream_gradients", lambda _x: None)
    monkeypatch.setattr(sinkhorn, "native_gradients", lambda: None)
    same([found, run_half(*given)])
    same([[normal], [sinkhorn.sinkhorn(logits, 20, 1e-6)]])


@pytest.mark.parametrize("rows", [1, 8, 37])
def test_gradients_of_a_half_are_those_of_float64(rows: int) -> None:
    given = half(rows)
    close(gradients(run_half, given), gradients(run_half, [one.double() for one in given]))


def test_gradients_of_streams_do_not_depend_on_instructions_threads_and_rows() -> None:
    x, pre, out, fn, *_ = half()
    comb, post = torch.rand(ROWS, 4, 4), torch.rand(ROWS, 4)
    of_x, share, product = torch.randn_like(x), torch.randn(ROWS, 1), torch.randn(ROWS, 24)

    def compute(kernels: StreamGradients, rows: slice) -> list[Tensor]:
        mine = [one[rows] for one in (of_x, out, x, pre, product, share)]
        normal, divisors = kernels.sinkhorn(comb[rows].permute(1, 2, 0).contiguous(), 39, 1e-6)
        back = kernels.sinkhorn_gradient(comb[rows], normal, divisors)
        return [
            *kernels.expand_gradient(of_x[rows], out[rows], x[rows], post[rows], comb[rows]),
            *kernels.open_gradient(*mine, fn),
            *(one.permute(2, 0, 1) for one in back),
        ]

    results = []
    for name in available():
        for count in (1, 2, 3):
            with threads(count):
                results.append(compute(StreamGradients(load(name)), slice(None)))
    same(results)
    for row in (0, 9, ROWS - 1):
        alone = compute(StreamGradients(load()), slice(row, row + 1))
        same([alone, [one[row : row + 1] for one in results[0]]])


def attention(
    heads: int, width: int, rows: int, first: int, kind: str
) -> tuple[list[Tensor], Callable[..., list[Tensor]]]:
    """Return leaves and what computes attention from them, window 24, at most 11 of 30 entries."""
    window, low = 24, max(0, first - 23)
    picked = torch.full((rows, 11), -1)
    for row in range(rows):
        chosen = torch.randperm(30)[: min(row, 11)].sort().values
        picked[row, : len(chosen)] = chosen // 2 if kind == "twice" else chosen

    def compute(q: Tensor, keys: Tensor, sink: Tensor, entries: Tensor) -> list[Tensor]:
        def gather(rows_RK: Tensor) -> Tensor:
            return entries.detach()[rows_RK.clamp_min(0)]

        selected = None if kind == "none" else SelectedEntries(picked, gather, entries)
        value = attend(q, first, WindowKeys(keys, low, low), selected, sink, window=window, scale=0.3)
        return [value, entries.sum(0)]

    shapes = [(rows, heads, width), (first + rows - low, width), (heads,), (30, width)]
    return [torch.randn(shape) for shape in shapes], compute


@pytest.mark.parametrize("kind", ["none", "some", "twice"])
@pytest.mark.parametrize(
    ("heads", "width", "rows", "first"), [(1, 16, 1, 0), (3, 16, 90, 41), (2, 64, 260, 0), (5, 32, 515, 7)]
)
def test_gradients_of_attention_are_those_of_float64(heads: int, width: int, rows: int, first: int, kind: str) -> None:
    leaves, compute = attention(heads, width, rows, first, kind)
    close(gradients(compute, leaves), gradients(compute, [one.double() for one in leaves]))


def test_gradients_of_attention_do_not_depend_on_instructions_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, compute = attention(3, 32, 530, 7, "some")
    results = []

    def keep(given: Attended) -> object:
        for name in available():
            for count in (1, 2, 3):
                with threads(count):
                    found = attention_gradients(given, load(name))
                assert found is not None
                assert found.of_entries is not None
                results.append([found.of_q, found.of_weight, found.of_rows, found.of_entries])
        return attention_gradients(given)

    monkeypatch.setattr(sparse_attention, "attention_gradients", keep)
    gradients(compute, leaves)
    assert len(results) == 3 * len(available())
    same(results)


@on_every_instruction_set
@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 1, 1), (300, 50, 41), (513, 12, 32), (700, 37, 530)])
def test_a_weight_gradient_is_added_in_one_order(instruction_set: str, rows: int, columns: int, width: int) -> None:
    gradient, x = torch.randn(rows, columns + 3)[:, :columns], torch.randn(rows, width)
    results = []
    for count in (1, 2, 3):
        total = torch.ones(columns, width)
        with threads(count):
            assert add_weight_gradient(gradient, x, total, load(instruction_set))
        results.append([total])
    same(results)
    close(results[0], [gradient.double().t() @ x.double() + 1.0])
    portable = torch.ones(columns, width)
    add_weight_gradient(gradient, x, portable, load(available()[0]))
    same([results[0], [portable]])


@on_every_instruction_set
@pytest.mark.parametrize("limit", [0.0, 2.0])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_gradients_of_swiglu_are_those_of_float64(instruction_set: str, is_weighted: bool, limit: float) -> None:
    rows, weights = torch.randn(ROWS, 2 * WIDTH) * 3, torch.rand(ROWS) if is_weighted else None
    gradient = torch.randn(ROWS, WIDTH)
    found = swiglu_gradient(gradient, rows, weights, limit, load(instruction_set))
    assert found is not None
    leaves = [one.double().requires_grad_() for one in (rows, weights) if one is not None]
    value = swiglu.weighted_swiglu(leaves[0], leaves[1] if is_weighted else None, limit)
    wanted = torch.autograd.grad(value, leaves, gradient.double())
    close([one for one in found if one is not None], list(wanted))
    with threads(3):
        again = swiglu_gradient(gradient, rows, weights, limit, load(available()[0]))
    assert again is not None
    same([[one for one in pair if one is not None] for pair in (found, again)])


@on_every_instruction_set
@pytest.mark.parametrize("columns", [1, 15, 16, 83])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_losses_are_those_of_float64(instruction_set: str, is_weighted: bool, columns: int) -> None:
    logits, labels = torch.randn(ROWS, columns + 5) * 9, torch.randint(0, columns, (ROWS,))
    logits[3] = 1.0  # every logit is the largest; the first one counts
    weights = torch.rand(ROWS) if is_weighted else None
    wide = logits[:, :columns].double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
    (of_logits,) = torch.autograd.grad((losses * (weights if is_weighted else 1.0)).sum(), wide)
    hits = logits[:, :columns].argmax(1) == labels
    results = []
    for name, count in ((instruction_set, 1), (instruction_set, 3), (available()[0], 1)):
        rows = logits.clone()
        with threads(count):
            found = judge_rows(rows[:, :columns], labels, weights, has_gradient=True, library=load(name))
        assert found is not None
        assert torch.equal(found[1], hits)
        assert torch.equal(rows[:, columns:], logits[:, columns:])
        results.append([found[0], rows[:, :columns]])
    same(results)
    torch.testing.assert_close(results[0][0].double(), losses, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(results[0][1].double(), of_logits, rtol=1e-5, atol=1e-6)
    rows = logits[:, :columns].clone()
    judge_rows(rows, labels, weights, has_gradient=False, library=load(instruction_set))
    assert torch.equal(rows, logits[:, :columns])


@on_every_instruction_set
@pytest.mark.parametrize("columns", [5, 16, 83])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_a_logit_that_is_no_number_has_a_loss_that_is_none(
    instruction_set: str, columns: int, bad: float
) -> None:
    logits = torch.randn(columns + 1, columns)
    logits[torch.arange(columns), torch.arange(columns)] = bad  # each column once, and a row without
    found = judge_rows(
        logits, torch.zeros(columns + 1, dtype=torch.int64), None, has_gradient=True, library=load(instruction_set)
    )
    assert found is not None
    assert found[0][:-1].isnan().all()
    assert logits[:-1].isnan().all()
    assert found[0][-1].isfinite()
    assert logits[-1].isfinite().all()


@on_every_instruction_set
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("heads", "width", "pairs"), [(1, 6, 3), (3, 40, 8), (2, 64, 32)])
def test_a_rotation_has_the_bits_of_pytorch(
    instruction_set: str, heads: int, width: int, pairs: int, inverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, turn = torch.randn(ROWS, heads, width), rope.rotation(torch.arange(ROWS), torch.rand(pairs))
    found = rotate_heads(x, *turn, inverse=inverse, library=load(instruction_set))
    assert found is not None
    monkeypatch.setattr(rope, "rotate_heads", lambda *_given, **_named: None)
    same([[found], [rope.rotate(x, *turn, inverse=inverse)]])
    leaf, probe = x.double().requires_grad_(), torch.randn(x.shape).double()
    (back,) = torch.autograd.grad(rope.rotate(leaf, *turn, inverse=inverse), leaf, probe)
    torch.testing.assert_close(
        (back * x.double()).sum(), (probe * rope.rotate(x.double(), *turn, inverse=inverse)).sum()
    )
