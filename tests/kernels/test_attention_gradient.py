"""Gradients of attention against the library's own differentiation of the formula, in float64."""

import pytest
import torch
from torch import Tensor

from headrace.kernels import attention_gradient
from headrace.kernels.sparse_attention import SelectedEntries, WindowKeys, attend
from tests.kernels.number_formats import same_bits
from tests.kernels.rows import threads

HEADS, WIDTH, WINDOW, ENTRIES = 3, 20, 24, 37


def leaves_of(rows: int, first: int, floor: int) -> list[Tensor]:
    """Return queries, window entries, sinks and global entries."""
    low = max(floor, first - WINDOW + 1)
    shapes = [(rows, HEADS, WIDTH), (first + rows - low, WIDTH), (HEADS,), (ENTRIES, WIDTH)]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def picks_of(kind: str, rows: int, slots: int) -> Tensor | None:
    """Return no picks, slot after slot as far as rows see, ascending picks, or some entries twice."""
    if kind == "none":
        return None
    picked = torch.full((rows, slots), -1)
    for row in range(rows):
        count = min(row, slots)
        chosen = torch.arange(count) if kind == "all" else torch.randperm(ENTRIES)[:count].sort().values
        picked[row, :count] = chosen // 2 if kind == "twice" else chosen
    return picked


def attended(leaves: list[Tensor], picked: Tensor | None, first: int, floor: int) -> Tensor:
    q, keys, sink, entries = leaves
    selected = None
    if picked is not None:
        selected = SelectedEntries(picked, lambda rows_RK: entries.detach()[rows_RK.clamp_min(0)], entries)
    low = max(floor, first - WINDOW + 1)
    return attend(q, first, WindowKeys(keys, low, floor), selected, sink, window=WINDOW, scale=0.3)


def by_formula(leaves: list[Tensor], picked: Tensor | None, first: int, floor: int) -> Tensor:
    q, keys, sink, entries = leaves
    low, out = max(floor, first - WINDOW + 1), []
    for row in range(q.shape[0]):
        begin = max(floor, first + row - WINDOW + 1)
        seen = keys[begin - low : first + row + 1 - low]
        if picked is not None:
            seen = torch.cat([seen, entries[picked[row][picked[row] >= 0]]])
        scores = torch.cat([q[row] @ seen.t() * 0.3, sink.unsqueeze(1)], 1)
        out.append(torch.softmax(scores, 1)[:, :-1] @ seen)
    return torch.stack(out)


def gradients(value: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    probe = torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(5))
    return list(torch.autograd.grad((value * probe).sum(), leaves, allow_unused=True))


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("kind", ["none", "all", "some", "twice"])
@pytest.mark.parametrize(("first", "floor", "rows"), [(0, 0, 1), (0, 0, 64), (0, 0, 150), (70, 0, 9), (41, 41, 90)])
def test_gradients_are_those_of_the_formula(
    is_dense: bool, kind: str, first: int, floor: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_gradient, "_DENSE_SHARE", 100 if is_dense else 0)
    leaves, picked = leaves_of(rows, first, floor), picks_of(kind, rows, 11)
    got = attended(leaves, picked, first, floor)
    want = by_formula(leaves, picked, first, floor)
    torch.testing.assert_close(got, want)
    for one, other in zip(gradients(got, leaves), gradients(want, leaves), strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("share", [0, 100])
@pytest.mark.parametrize("kind", ["all", "some"])
def test_a_document_in_tiles_has_the_same_gradients(share: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, picked = leaves_of(130, 0, 0), picks_of(kind, 130, 20)
    monkeypatch.setattr(attention_gradient, "_DENSE_SHARE", share)
    whole = gradients(attended(leaves, picked, 0, 0), leaves)
    monkeypatch.setattr(attention_gradient, "_TILE_VALUES", 1)
    for one, other in zip(gradients(attended(leaves, picked, 0, 0), leaves), whole, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("share", [0, 100])
@pytest.mark.parametrize("kind", ["none", "all", "some"])
def test_threads_change_no_bit(share: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_gradient, "_DENSE_SHARE", share)
    leaves = [leaf.detach().float().requires_grad_() for leaf in leaves_of(600, 0, 0)]
    picked = picks_of(kind, 600, 32)
    alone = gradients(attended(leaves, picked, 0, 0), leaves)
    with threads(2):
        together = gradients(attended(leaves, picked, 0, 0), leaves)
    for one, other in zip(together, alone, strict=True):
        assert (one is None and other is None) or same_bits(one, other)
