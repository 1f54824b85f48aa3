import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.train import losses
from headrace.train.data.packing import IGNORE
from headrace.train.losses import cross_entropy, ordered_sum
from tests.kernels.rows import bits, differences, threads
from tests.traces import same_bits


def case(rows: int = 21, width: int = 32, vocab: int = 45, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    hidden, head = torch.randn(rows, width).to(dtype), torch.randn(vocab, width) / 4
    labels = torch.randint(0, vocab, (rows,))
    labels[torch.rand(rows) < 0.3] = IGNORE
    return [hidden, head.double() if dtype == torch.float64 else head, labels]


def plain(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    logits = hidden.to(head.dtype) @ head.T
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


def with_gradients(hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    leaves = [hidden.detach().requires_grad_(), head.detach().requires_grad_()]
    found = cross_entropy(*leaves, labels)
    return found.numerator.detach(), *torch.autograd.grad(found.numerator * 0.37, leaves), found.losses_T


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_LOGITS", 48 * 8)  # eight rows at once for 45 tokens


@pytest.mark.usefixtures("small_pieces")
def test_the_loss_and_its_gradients_are_those_of_the_formula() -> None:
    hidden, head, labels = case(dtype=torch.float64)
    leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    wanted = plain(*leaves, labels)
    gradients = torch.autograd.grad(wanted * 0.37, leaves)
    found = with_gradients(hidden, head, labels)
    for one, other in zip(found, (wanted.detach(), *gradients), strict=False):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_bfloat16_rows_are_judged_in_float32() -> None:
    hidden, head, labels = case(dtype=torch.bfloat16)
    found = with_gradients(hidden, head, labels)
    wide = with_gradients(hidden.float(), head, labels)
    assert [one.dtype for one in found] == [torch.float32, torch.bfloat16, torch.float32, torch.float32]
    assert same_bits(found[0], wide[0])
    assert same_bits(found[1], wide[1].bfloat16())
    assert same_bits(found[2], wide[2])


@pytest.mark.usefixtures("small_pieces")
def test_weights_multiply_what_a_row_adds_to_the_loss_and_to_the_gradients() -> None:
    hidden, head, labels = case(dtype=torch.float64)
    weights = torch.rand(len(labels), dtype=torch.float64) + 0.5
    leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    each = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].T, labels, ignore_index=IGNORE, reduction="none")
    wanted = (each * weights).sum()
    found = cross_entropy(*leaves, labels, weights)
    torch.testing.assert_close(found.numerator, wanted)
    for one, other in zip(
        torch.autograd.grad(found.numerator, leaves), torch.autograd.grad(wanted, leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.losses_T, each.detach())


def test_rows_without_a_label_count_nothing_and_get_no_gradient() -> None:
    hidden, head, labels = case()
    found = cross_entropy(hidden, head, labels)
    is_asked = labels != IGNORE
    assert found.count == int(is_asked.sum()) == int((found.losses_T > 0).sum())
    assert not with_gradients(hidden, head, labels)[1][~is_asked].any()
    nothing = with_gradients(hidden, head, torch.full_like(labels, IGNORE))
    assert not any(part.any() for part in nothing)
    assert cross_entropy(hidden[:0], head, labels[:0]).count == 0


def test_sums_over_passes_divide_once() -> None:
    hidden, head, labels = case()
    whole = cross_entropy(hidden, head, labels)
    parts = [cross_entropy(hidden[rows], head, labels[rows]) for rows in (slice(0, 5), slice(5, 21))]
    assert sum(part.count for part in parts) == whole.count
    torch.testing.assert_close(sum(part.numerator for part in parts), whole.numerator)
    assert same_bits(torch.cat([part.losses_T for part in parts]), whole.losses_T)


def test_hits_are_rows_whose_largest_logit_is_the_labels() -> None:
    hidden, head, labels = case()
    labels[::2] = (hidden @ head.T).argmax(1)[::2]
    found = cross_entropy(hidden, head, labels).correct_T
    assert found.equal((hidden @ head.T).argmax(1) == labels)
    assert found[::2].all()
    assert not found.all()
    tie = cross_entropy(torch.ones(2, 32), torch.ones(45, 32), torch.tensor([0, 1]))
    assert tie.correct_T.tolist() == [True, False]


@pytest.mark.usefixtures("small_pieces")
def test_a_row_has_the_same_loss_and_gradient_in_any_batch() -> None:
    hidden, head, labels = case(65)

    def of_rows(rows: slice) -> tuple[Tensor, Tensor]:
        _, of_hidden, _, row_losses = with_gradients(hidden[rows], head, labels[rows])
        return of_hidden, row_losses

    assert differences(of_rows) == []


def test_threads_change_no_bit() -> None:
    hidden, head, labels = case(1100, 64, 512)
    found = []
    for count in (1, 2):
        with threads(count):
            found.append((*with_gradients(hidden, head, labels), ordered_sum(hidden)))
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5000, 70_000])
def test_an_ordered_sum_is_a_sum(count: int) -> None:
    values = torch.randn(count)
    torch.testing.assert_close(ordered_sum(values).double(), values.double().sum(), rtol=1e-5, atol=1e-3)


def test_logits_of_a_long_batch_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = losses._judge

    def judge(logits: Tensor, *rest: Tensor | None, **named: bool) -> tuple[Tensor, Tensor]:
        seen.append(logits.numel())
        return real(logits, *rest, **named)

    monkeypatch.setattr(losses, "_judge", judge)
    monkeypatch.setattr(losses, "_LOGITS", 1 << 14)
    hidden, head, labels = case(3000, 16, 500)
    cross_entropy(hidden, head, labels)
    assert max(seen) <= 1 << 14
    assert sum(seen) == -(-int((labels != losses.IGNORE).sum()) // 8) * 8 * 500


def test_nothing_is_computed_for_gradients_that_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, labels = case()
    monkeypatch.setattr(losses, "product", None)  # used by gradients alone
    monkeypatch.setattr(losses, "add_over_rows", None)
    cross_entropy(hidden, head, labels)
    with torch.no_grad():
        cross_entropy(hidden.requires_grad_(), head.requires_grad_(), labels)


@pytest.mark.parametrize("wrong", [np.array([45]), np.array([-1]), np.array([1, 2])])
def test_labels_that_are_no_tokens_are_refused(wrong: np.ndarray) -> None:
    hidden, head, _ = case(1)
    with pytest.raises(InternalError, match="labels"):
        cross_entropy(hidden, head, torch.from_numpy(wrong))
