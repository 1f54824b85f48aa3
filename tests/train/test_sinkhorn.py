"""The Sinkhorn-balanced update against a plain float64 version; its row mask, fresh start and small-batch option."""

from collections.abc import Callable
from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.core.errors import UserError
from headrace.train.optim import sinkhorn
from headrace.train.optim.ownership import Owner
from headrace.train.optim.parameter import Owned
from headrace.train.optim.sinkhorn import Mixture, Sinkhorn, SinkhornSettings, balance, row_norms

RATE = 1e-2
PLAIN = SinkhornSettings()


def owned(tensor: Tensor, rate: float = 1.0) -> Owned:
    return Owned("table", tensor, Owner(group="g", update="sinkhorn", matrices=1, rate=rate, decay=0.0))


def naive_update(n: Tensor, threshold: float = 1e-3) -> Tensor:
    """Return U of the report's algorithm, written down in float64 with the whole matrix in every pass."""
    u = n.double().clone()
    norms = u.norm(dim=1)
    u[norms <= threshold * norms.mean()] = 0.0
    for k in range(1, 12):
        axis = 1 if k % 2 else 0
        u = u / (u.norm(dim=axis, keepdim=True) + 1e-20)
    return u


def update_of(n: Tensor, settings: SinkhornSettings = PLAIN) -> Tensor:
    """Return U for N itself: with no momentum, N is the gradient."""
    table = torch.zeros_like(n)
    parameter = owned(table)
    table.grad = n
    settings = SinkhornSettings(
        momentum=0.0, threshold=settings.threshold, touched_window=settings.touched_window, rms=settings.rms
    )
    Sinkhorn([parameter], settings).step(RATE, 1.0)
    return -table / (RATE * 0.18 * sqrt(n.shape[1]))


def skewed(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a matrix with rows and columns of very different sizes and a third of its rows zero."""
    x = torch.randn(rows, columns, dtype=torch.float64)
    x *= torch.logspace(-2, 2, rows, dtype=torch.float64)[torch.randperm(rows), None]
    x *= torch.logspace(-1, 1, columns, dtype=torch.float64)
    x[::3] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (40, 24), (300, 32), (5, 64)])
def test_factored_update_equals_the_plain_one_in_float64(shape: tuple[int, int]) -> None:
    n = skewed(*shape) if shape[0] > 1 else torch.tensor([[3.0]], dtype=torch.float64)
    assert torch.allclose(update_of(n), naive_update(n), atol=1e-12)


def test_factored_update_in_float32_stays_close_to_the_plain_one() -> None:
    n = skewed(200, 48, torch.float32)
    assert torch.allclose(update_of(n).double(), naive_update(n), atol=2e-6)


@pytest.mark.parametrize("block_values", [1, 100, 1000])
def test_blocks_of_any_size_give_the_same_update(monkeypatch: pytest.MonkeyPatch, block_values: int) -> None:
    n = skewed(90, 20)
    whole = update_of(n)
    monkeypatch.setattr(sinkhorn, "_BLOCK_VALUES", block_values)
    assert torch.allclose(update_of(n), whole, atol=1e-13)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e17])
def test_update_does_not_depend_on_the_size_of_the_gradient(scale: float) -> None:
    n = skewed(60, 16, torch.float32)
    eps = 1e-60 if scale < 1e-20 else 1e-20  # at the report's eps, gradients below 1e-20 count as small
    table = torch.zeros_like(n)
    table.grad = n * scale
    Sinkhorn([owned(table)], SinkhornSettings(momentum=0.0, eps=eps)).step(RATE, 1.0)
    assert torch.allclose(-table / (RATE * 0.18 * 4.0), update_of(n), atol=1e-5)


def test_row_mask_counts_zero_rows_in_the_mean() -> None:
    """N = [1, 1999, 0, 0] has mean norm 500, so the threshold is 0.5 and the first row survives."""
    n = torch.tensor([[1.0], [1999.0], [0.0], [0.0]])
    assert row_norms(Mixture(n, n, 0.0, 1.0)).mean() == 500.0
    u = update_of(n)
    assert u[0].abs() > 0.1
    assert u[2:].tolist() == [[0.0], [0.0]]
    without_zero_rows = update_of(n[:2])  # mean 1000, threshold 1: a row of norm 1 is masked
    assert without_zero_rows[0].item() == 0.0


def test_a_row_exactly_at_the_threshold_is_masked() -> None:
    n = torch.tensor([[0.5], [1999.5], [0.0], [0.0]])
    assert update_of(n)[0].item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unmasked_rows_have_a_root_mean_square_of_one_before_scaling(dtype: torch.dtype) -> None:
    n = skewed(80, 24, dtype)
    delta = update_of(n) * sqrt(24)
    rms = delta.double().square().mean(1).sqrt()
    unmasked = n.norm(dim=1) > 1e-3 * n.norm(dim=1).mean()
    assert rms[unmasked].tolist() == pytest.approx(
        [1.0] * int(unmasked.sum()), abs=1e-6 if dtype == torch.float32 else 1e-14
    )
    assert torch.equal(delta[~unmasked], torch.zeros_like(delta[~unmasked]))


def test_columns_are_balanced() -> None:
    norms = update_of(skewed(400, 16)).norm(dim=0)
    assert norms.max() / norms.min() < 1.05
    assert skewed(400, 16).norm(dim=0).max() / skewed(400, 16).norm(dim=0).min() > 20


def test_a_column_of_zeros_stays_zero() -> None:
    n = skewed(20, 6)
    n[:, 2] = 0.0
    u = update_of(n)
    assert torch.equal(u[:, 2], torch.zeros(20, dtype=torch.float64))
    assert torch.allclose(u, naive_update(n), atol=1e-12)


def test_nothing_moves_without_a_gradient() -> None:
    table = torch.randn(5, 4)
    before = table.clone()
    table.grad = torch.zeros(5, 4)
    Sinkhorn([owned(table)], PLAIN).step(RATE, 1.0)
    assert torch.equal(table, before)


def test_every_step_starts_from_its_own_matrix() -> None:
    """The update depends on N alone: vectors of an earlier, very different step leave no trace."""
    table = torch.zeros(30, 8, dtype=torch.float64)
    rule = Sinkhorn([owned(table)], PLAIN)
    momentum = torch.zeros_like(table)
    for _ in range(4):
        gradient = skewed(30, 8)
        before = table.clone()
        table.grad = gradient
        rule.step(RATE, 1.0)
        momentum = 0.95 * momentum + 0.05 * gradient
        expected = RATE * 0.18 * sqrt(8) * naive_update(0.95 * momentum + 0.05 * gradient)
        assert torch.allclose(before - table, expected, atol=1e-14)


def test_factors_of_rate_and_clipping_are_applied() -> None:
    gradient = skewed(30, 8)
    tables = [torch.zeros(30, 8, dtype=torch.float64) for _ in range(2)]
    tables[0].grad, tables[1].grad = gradient, gradient
    Sinkhorn([owned(tables[0])], PLAIN).step(RATE, 1.0)
    rule = Sinkhorn([owned(tables[1], rate=5.0)], PLAIN)
    rule.step(RATE, 0.5)
    assert torch.allclose(tables[1], 5.0 * tables[0], atol=1e-15)
    assert torch.allclose(rule.state()["table/sinkhorn.momentum"], 0.05 * 0.5 * gradient)


def test_vectors_reproduce_the_update_they_stand_for() -> None:
    n = skewed(25, 7)
    mixture = Mixture(n, torch.zeros_like(n), 1.0, 0.0)
    norms = row_norms(mixture)
    ids = (norms > 1e-3 * norms.mean()).nonzero().flatten()
    r, c = balance(mixture, ids, norms[ids], float(norms.mean()), PLAIN)
    assert torch.allclose(r[:, None] * n[ids] / norms.mean() * c, naive_update(n)[ids], atol=1e-12)


def steps_that_move(table_rows: Tensor, rule: Sinkhorn, row: int, steps: int) -> list[int]:
    """Hit every row of a table once and `row` never again; return the later steps in which `row` moves."""
    moving = []
    for step in range(steps):
        gradient = torch.randn_like(table_rows)
        if step:
            gradient[row] = 0.0
        before = table_rows[row].clone()
        table_rows.grad = gradient
        rule.step(RATE, 1.0)
        if not torch.equal(before, table_rows[row]):
            moving.append(step)
    return moving


def test_a_row_hit_once_goes_on_moving_for_some_135_steps() -> None:
    table = torch.zeros(16, 8)
    moving = steps_that_move(table, Sinkhorn([owned(table)], PLAIN), row=3, steps=200)
    assert moving[:100] == list(range(100))
    assert 105 < moving[-1] < 160


@pytest.mark.parametrize("window", [1, 2, 16])
def test_touched_window_stops_a_stale_row(window: int) -> None:
    table = torch.zeros(16, 8)
    rule = Sinkhorn([owned(table)], SinkhornSettings(touched_window=window))
    assert steps_that_move(table, rule, row=3, steps=40) == list(range(window))


def test_touched_window_changes_nothing_where_all_rows_are_touched() -> None:
    tables = [torch.zeros(20, 8), torch.zeros(20, 8)]
    rules = [Sinkhorn([owned(t)], s) for t, s in zip(tables, (PLAIN, SinkhornSettings(touched_window=3)), strict=True)]
    for _ in range(3):
        gradient = torch.randn(20, 8)
        for table, rule in zip(tables, rules, strict=True):
            table.grad = gradient
            rule.step(RATE, 1.0)
    assert torch.equal(*tables)


def test_two_threads_give_the_bits_of_one() -> None:
    def run(threads: int) -> Tensor:
        torch.set_num_threads(threads)
        try:
            generator = torch.Generator().manual_seed(5)
            table = torch.zeros(20_000, 24)
            rule = Sinkhorn([owned(table)], PLAIN)
            gradient = torch.randn(table.shape, generator=generator)
            gradient[::2] = 0.0
            table.grad = gradient
            rule.step(RATE, 1.0)
        finally:
            torch.set_num_threads(1)
        return table

    assert torch.equal(run(1), run(2))


@given(
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(0, 2**31 - 1),
    st.floats(-12, 12),
)
def test_any_matrix_gives_a_finite_update_of_unit_rows(rows: int, columns: int, seed: int, power: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = torch.randn(rows, columns, generator=generator) * 10.0**power
    n *= torch.randint(0, 2, (rows, 1), generator=generator)
    n *= torch.randint(0, 2, (rows, columns), generator=generator)
    u = update_of(n)
    assert torch.isfinite(u).all()
    norms = u.norm(dim=1)
    assert ((norms - 1.0).abs() < 1e-4)[norms > 0].all()
    assert torch.allclose(u.double(), naive_update(n), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda: SinkhornSettings(momentum=1.0), "momentum is 1.0"),
        (lambda: SinkhornSettings(passes=10), "passes is 10"),
        (lambda: SinkhornSettings(threshold=1.0), "threshold is 1.0"),
        (lambda: SinkhornSettings(eps=0.0), "eps is 0.0"),
        (lambda: SinkhornSettings(rms=float("inf")), "rms is inf"),
        (lambda: SinkhornSettings(touched_window=0), "touched_window is 0"),
    ],
)
def test_constants_outside_their_range_are_refused(change: Callable[[], SinkhornSettings], part: str) -> None:
    with pytest.raises(UserError, match=part):
        change()
