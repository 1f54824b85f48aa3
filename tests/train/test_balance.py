"""Balance of the experts: exact counts, a bias without gradient, a loss that is 1 for balanced samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.core.errors import InternalError, UserError
from headrace.train.balance import LoadCounter, bias_speed, count_loads, max_violation, sequence_balance, update_bias
from headrace.train.schedule import Position


def random_routes(tokens: int, experts: int, per_token: int) -> tuple[Tensor, Tensor]:
    """Return scores [T, E] that need a gradient and the chosen experts [T, K]."""
    scores = torch.nn.functional.softplus(torch.randn(tokens, experts, dtype=torch.float64)).sqrt().requires_grad_()
    return scores, scores.detach().topk(per_token, dim=1).indices.sort(dim=1).values


def test_loads_are_counted_by_kind_and_without_padding() -> None:
    experts = torch.tensor([[0, 2], [1, 2], [0, 1], [2, 3]])
    is_image = torch.tensor([False, True, False, True])
    is_valid = torch.tensor([True, True, True, False])
    loads = count_loads(experts, 5, is_image=is_image, is_valid=is_valid)
    assert loads.text_E.tolist() == [2, 1, 1, 0, 0]
    assert loads.image_E.tolist() == [0, 1, 1, 0, 0]
    assert loads.total.tolist() == [2, 2, 2, 0, 0]


def test_every_micro_batch_is_counted_once_however_often_it_is_run() -> None:
    counter = LoadCounter(4)
    first, second = torch.tensor([[0, 1], [0, 2]]), torch.tensor([[2, 3]])
    for _ in range(2):  # activation checkpointing runs a layer again
        counter.record(0, 0, first)
    counter.record(0, 1, second)
    counter.record(1, 0, second)
    loads = counter.take()
    assert loads[0].text_E.tolist() == [2, 1, 2, 1]
    assert loads[1].text_E.tolist() == [0, 0, 1, 1]
    assert counter.take() == {}


def test_a_repetition_with_other_experts_is_an_error() -> None:
    counter = LoadCounter(4)
    counter.record(3, 0, torch.tensor([[0, 1]]))
    with pytest.raises(InternalError, match="Layer 3 chose other experts"):
        counter.record(3, 0, torch.tensor([[0, 2]]))


def test_bias_rises_for_idle_experts_and_falls_for_busy_ones() -> None:
    bias = torch.tensor([0.5, 0.0, -0.25, 0.0])
    update_bias(bias, torch.tensor([10, 2, 4, 0]), 0.125)
    assert bias.tolist() == [0.375, 0.125, -0.25, 0.125]  # the third expert has exactly the mean


@pytest.mark.parametrize("loads", [[0, 0, 0], [7, 7, 7]])
def test_bias_stays_where_nothing_or_everything_is_equal(loads: list[int]) -> None:
    bias = torch.tensor([0.1, 0.2, 0.3])
    before = bias.clone()
    update_bias(bias, torch.tensor(loads), 1e-3)
    assert torch.equal(bias, before)


def test_sign_is_exact_where_a_mean_in_float32_would_round() -> None:
    loads = torch.tensor([2**24 + 1, 2**24, 2**24 + 2])
    bias = torch.zeros(3)
    update_bias(bias, loads, 1.0)
    assert bias.tolist() == [0.0, 1.0, -1.0]


def test_text_and_image_biases_move_by_their_own_loads() -> None:
    experts = torch.tensor([[0], [0], [1], [1]])
    loads = count_loads(experts, 2, is_image=torch.tensor([False, False, True, True]))
    text, image = torch.zeros(2), torch.zeros(2)
    update_bias(text, loads.text_E, 1.0)
    update_bias(image, loads.image_E, 1.0)
    assert (text.tolist(), image.tolist()) == ([-1.0, 1.0], [1.0, -1.0])


def test_the_loop_of_bias_and_selection_balances_a_skewed_router() -> None:
    skew = torch.linspace(0.0, 0.4, 16)
    bias = torch.zeros(16)
    violations = []
    for _ in range(150):
        scores = 0.83 + 0.1 * torch.randn(256, 16) + skew
        experts = (scores + bias).topk(2, dim=1).indices
        loads = count_loads(experts, 16)
        violations.append(max_violation(loads.total))
        update_bias(bias, loads.text_E, 5e-3)
    assert violations[0] > 3.0
    assert sum(violations[-20:]) / 20 < 0.6


@pytest.mark.parametrize("speed", [-1e-3, float("nan")])
def test_a_speed_that_makes_no_sense_is_refused(speed: float) -> None:
    with pytest.raises(UserError, match="Bias speed"):
        update_bias(torch.zeros(2), torch.tensor([1, 0]), speed)


def test_speed_is_the_published_one_unless_a_short_run_asks_for_more_at_first() -> None:
    published = bias_speed(10_000)
    short = bias_speed(1_000, early=1e-2)
    at = [Position(steps=s, tokens=0) for s in (0, 99, 100, 999)]
    assert [published.at(p) for p in at] == [1e-3] * 4
    assert [short.at(p) for p in at] == [1e-2, 1e-2, 1e-3, 1e-3]


def test_a_perfectly_balanced_sample_has_loss_one() -> None:
    experts = torch.tensor([[2 * i % 16, (2 * i + 1) % 16] for i in range(8)])
    scores = torch.rand(8, 16, dtype=torch.float64) + 0.1
    loss, count = sequence_balance(scores, experts, [(0, 8)])
    assert count == 1
    assert loss.item() == pytest.approx(1.0, abs=1e-12)


def test_equal_scores_have_loss_one_and_a_collapsed_router_has_the_most() -> None:
    experts = torch.zeros(6, 1, dtype=torch.int64)
    loss, _ = sequence_balance(torch.ones(6, 5), experts, [(0, 6)])
    assert loss.item() == pytest.approx(1.0)
    collapsed = torch.full((6, 5), 1e-6)
    collapsed[:, 0] = 1.0
    assert float(sequence_balance(collapsed, experts, [(0, 6)])[0]) == pytest.approx(5.0, rel=1e-4)


def test_loss_equals_the_formula_written_out_per_sample() -> None:
    scores, experts = random_routes(30, 7, 3)
    samples = [(0, 11), (11, 12), (15, 30)]  # tokens 12 to 14 are padding
    loss, count = sequence_balance(scores, experts, samples)
    expected = 0.0
    for start, stop in samples:
        for i in range(7):
            f = 7 / (3 * (stop - start)) * sum(i in row for row in experts[start:stop].tolist())
            p = sum(float(s[i] / s.sum()) for s in scores.detach()[start:stop]) / (stop - start)
            expected += f * p
    assert count == 3
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_frequencies_are_constants_of_the_gradient() -> None:
    scores, experts = random_routes(10, 6, 2)
    loss, _ = sequence_balance(scores, experts, [(0, 10)])
    (gradient,) = torch.autograd.grad(loss, scores)
    f = 6 / (2 * 10) * torch.bincount(experts.flatten(), minlength=6).double()
    total = scores.detach().sum(1, keepdim=True)
    expected = (f - (f * scores.detach()).sum(1, keepdim=True) / total) / total / 10
    assert torch.allclose(gradient, expected, atol=1e-15)


def test_padding_has_no_gradient_and_samples_do_not_mix() -> None:
    scores, experts = random_routes(12, 6, 2)
    loss, _ = sequence_balance(scores, experts, [(0, 5), (7, 12)])
    (gradient,) = torch.autograd.grad(loss, scores)
    assert torch.equal(gradient[5:7], torch.zeros(2, 6, dtype=torch.float64))
    alone, _ = sequence_balance(scores[:5], experts[:5], [(0, 5)])
    (own,) = torch.autograd.grad(alone, scores)
    assert torch.equal(gradient[:5], own[:5])


def test_the_bias_never_gets_a_gradient() -> None:
    from headrace.kernels.route_topk import route

    bias = torch.zeros(6, requires_grad=True)
    gate = torch.randn(16, 8, requires_grad=True)
    routes = route(torch.randn(9, 8), gate, bias, count=2, scale=1.5)
    loss, _ = sequence_balance(routes.scores_TE, routes.experts_TK, [(0, 9)])
    bias_gradient, gate_gradient = torch.autograd.grad(
        loss + routes.weights_TK.square().sum(), [bias, gate], allow_unused=True
    )
    assert bias_gradient is None
    assert gate_gradient is not None
    assert gate_gradient.abs().sum() > 0


def test_empty_samples_are_left_out() -> None:
    scores, experts = random_routes(4, 6, 2)
    loss, count = sequence_balance(scores, experts, [(0, 0), (2, 2)])
    assert (loss.item(), count) == (0.0, 0)


@given(st.integers(1, 40), st.integers(2, 12), st.data())
def test_loss_is_at_least_the_share_of_what_was_chosen(tokens: int, experts: int, data: st.DataObject) -> None:
    per_token = data.draw(st.integers(1, experts))
    scores, chosen = random_routes(tokens, experts, per_token)
    loss, count = sequence_balance(scores, chosen, [(0, tokens)])
    assert count == 1
    assert 0.0 < loss.item() <= experts / per_token + 1e-9
    if per_token == experts:
        assert loss.item() == pytest.approx(1.0)


def test_max_violation_is_zero_for_equal_loads_and_without_tokens() -> None:
    assert max_violation(torch.tensor([3, 3, 3])) == 0.0
    assert max_violation(torch.tensor([0, 0])) == 0.0
    assert max_violation(torch.tensor([6, 0, 0])) == 2.0
