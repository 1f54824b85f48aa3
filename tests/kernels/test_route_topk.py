import math

import pytest
import torch
from torch import Tensor

from headrace.kernels.product import pad_columns
from headrace.kernels.route_topk import route, weigh

FLOAT32_NOISE = 3e-6  # relative, of softplus, a root, a short sum and a division in float32
IDENTITY = 64  # routes of an identity matrix: the router's input is its logits


def score(z: float) -> float:
    return math.sqrt(z if z > 20 else math.log1p(math.exp(z)))


def routed_by_hand(logits: list[float], bias: list[float], count: int, scale: float) -> tuple[list[int], list[float]]:
    scores = [score(z) for z in logits]
    ranked = sorted(range(len(scores)), key=lambda e: (-(scores[e] + bias[e]), e))
    picked = sorted(ranked[:count])
    total = sum(scores[e] for e in picked) + 1e-20
    return picked, [scores[e] / total * scale for e in picked]


def from_logits(logits: Tensor, bias: Tensor, count: int, scale: float = 1.5) -> "tuple[list[list[int]], Tensor]":
    experts = logits.shape[1]
    routes = route(logits, pad_columns(torch.eye(experts)), bias, count=count, scale=scale)
    assert routes.experts_TK.dtype == torch.int64
    assert routes.weights_TK.dtype == torch.float32
    return routes.experts_TK.tolist(), routes.weights_TK


def test_scores_are_the_printed_ones() -> None:
    # specification section 7
    _, weights = from_logits(torch.tensor([[-3.0, 0.0, 2.0]]), torch.zeros(3), count=3, scale=1.0)
    printed = torch.tensor([0.2204254, 0.8325546, 1.4583992])
    assert torch.allclose(weights[0], printed / printed.sum(), atol=1e-6)


@pytest.mark.parametrize(("experts", "count"), [(8, 1), (8, 3), (24, 6), (383, 5), (384, 6), (385, 129), (16, 16)])
def test_experts_are_picked_by_biased_score_and_weighted_by_plain_score(experts: int, count: int) -> None:
    # logits and biases on a coarse grid: the picks do not hang on the last bit of a score, and ties occur
    logits, bias = torch.randint(-24, 25, (40, experts)) / 8, torch.randint(-4, 5, (experts,)) / 4
    picked, weights = from_logits(logits, bias, count)
    for row in range(40):
        want_picked, want_weights = routed_by_hand(logits[row].tolist(), bias.tolist(), count, 1.5)
        assert weights[row].tolist() == pytest.approx(want_weights, rel=FLOAT32_NOISE)
        assert picked[row] == want_picked


def test_real_numbers_go_through_the_gate_matrix() -> None:
    x, gate = torch.randn(20, 96).bfloat16(), torch.randn(12, 96)
    bias = torch.randn(12) * 0.2
    routes = route(x, pad_columns(gate), bias, count=4, scale=2.5)
    for row in range(20):
        logits = (gate.double() @ x[row].double()).tolist()
        picked, weights = routed_by_hand(logits, bias.tolist(), 4, 2.5)
        assert routes.experts_TK[row].tolist() == picked
        assert routes.weights_TK[row].tolist() == pytest.approx(weights, rel=1e-4)


def test_equal_scores_go_to_the_lower_expert() -> None:
    picked, weights = from_logits(torch.zeros(1, IDENTITY), torch.zeros(IDENTITY), count=6)
    assert picked == [[0, 1, 2, 3, 4, 5]]
    assert torch.allclose(weights, torch.full((1, 6), 0.25))
    bias = torch.zeros(IDENTITY)
    bias[[9, 33, 60]] = 1.0
    picked, _ = from_logits(torch.zeros(1, IDENTITY), bias, count=4)
    assert picked == [[0, 9, 33, 60]]


def test_a_small_gap_decides() -> None:
    # field report A24: gaps of 1e-6 between scores of about 1
    logits = torch.full((1, IDENTITY), 1.0)
    logits[0, 50] += 4e-6
    logits[0, 7] -= 4e-6
    picked, _ = from_logits(logits, torch.zeros(IDENTITY), count=63)
    assert 7 not in picked[0]
    picked, _ = from_logits(logits, torch.zeros(IDENTITY), count=2)
    assert picked == [[0, 50]]


def test_every_row_may_have_its_own_bias() -> None:
    # tokens inside an image select with another bias; their weights come from the same plain scores
    logits = torch.zeros(2, 8)
    bias = torch.zeros(2, 8)
    bias[1, 6] = 5.0
    picked, weights = from_logits(logits, bias, count=2)
    assert picked == [[0, 1], [0, 6]]
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("filling", [float("nan"), -1e4, 1e4])
def test_odd_rows_still_pick_different_experts(filling: float) -> None:
    # field report A16: NaN scores must not pick one expert several times
    logits = torch.randn(3, IDENTITY)
    logits[1] = filling
    picked, weights = from_logits(logits, torch.randn(IDENTITY) * 0.1, count=6)
    assert len(set(picked[1])) == 6
    assert all(0 <= expert < IDENTITY for expert in picked[1])
    if math.isnan(filling):
        assert weights[1].isnan().all()  # loud
    else:
        assert weights[1].isfinite().all()
    alone, _ = from_logits(logits[[0, 2]], torch.zeros(IDENTITY), count=6)
    assert alone == from_logits(logits, torch.zeros(IDENTITY), count=6)[0][::2]


def test_padding_columns_are_never_picked() -> None:
    # 3 experts are padded to 16 columns whose logits of 0 would beat these
    picked, _ = from_logits(torch.full((1, 3), -50.0), torch.zeros(3), count=3)
    assert picked == [[0, 1, 2]]


def test_given_experts_are_weighted_by_their_share() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0, 10.0], [4.0, 4.0, 4.0, 4.0]])
    routes = weigh(scores, torch.tensor([[0, 2], [1, 3]]), 3.0)
    assert routes.weights_TK.tolist() == [[0.75, 2.25], [1.5, 1.5]]
    assert torch.equal(routes.scores_TE, scores)
