"""Experts against loops over tokens; inputs are small whole numbers: float32 sums are exact, and bits can match."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kernels import grouped_experts as ge
from headrace.kernels.block_quant import fake_q8
from headrace.kernels.grouped_experts import (
    DenseExperts,
    Expert,
    PackedExperts,
    PackedMatrix,
    routed_experts,
    shared_expert,
)
from headrace.kernels.route_topk import Routes
from headrace.kernels.swiglu import clamped_swiglu
from tests.kernels import number_formats as nf

WIDTH, HIDDEN, EXPERTS = 96, 64, 5


def packed(rows: int, width: int) -> PackedMatrix:
    scales = torch.randint(124, 129, (rows, width // 32), dtype=torch.uint8)
    return PackedMatrix(torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8), scales)


def matrix(stored: PackedMatrix) -> Tensor:
    values = np.concatenate([nf.E2M1, -nf.E2M1])[nf.unpack(stored.packed)]
    return torch.from_numpy(values * np.repeat(2.0 ** (stored.scales.double().numpy() - 127), 32, axis=1))


def make_experts(count: int = EXPERTS, width: int = WIDTH, hidden: int = HIDDEN) -> list[Expert]:
    return [Expert(packed(hidden, width), packed(hidden, width), packed(width, hidden)) for _ in range(count)]


def make_routes(rows: int, per_token: int, experts: int = EXPERTS) -> Routes:
    picked = torch.stack([torch.randperm(experts)[:per_token].sort().values for _ in range(rows)])
    return Routes(picked, torch.rand(rows, per_token) + 0.1, torch.rand(rows, experts))


def whole_numbers(rows: int, width: int = WIDTH) -> Tensor:
    return torch.randint(-3, 4, (rows, width)).bfloat16()


def quantised(hidden: Tensor) -> Tensor:
    return torch.from_numpy(nf.q8(hidden.double().view(-1, 32).numpy())[2]).view(hidden.shape)


def one_expert(x_D: Tensor, gate: Tensor, up: Tensor, down: Tensor, weight: float | None, limit: float) -> Tensor:
    """Return one expert's output for one token, rounded where the model rounds."""
    g, u = (gate @ x_D.double()).bfloat16().float(), (up @ x_D.double()).bfloat16().float()
    if limit > 0:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    hidden = g / (1.0 + torch.exp(-g)) * u
    if weight is not None:
        hidden = hidden * weight
    return (down @ quantised(hidden.bfloat16())).bfloat16()


def by_hand(x: Tensor, routes: Routes, experts: Sequence[Expert], limit: float) -> Tensor:
    out = torch.zeros(x.shape)
    for row in range(x.shape[0]):
        total = torch.zeros(x.shape[1])
        for e, weight in zip(routes.experts_TK[row].tolist(), routes.weights_TK[row].tolist(), strict=True):
            parts = matrix(experts[e].gate), matrix(experts[e].up), matrix(experts[e].down)
            total = total + one_expert(x[row], *parts, weight, limit).float()
        out[row] = total
    return out


@pytest.mark.parametrize("limit", [10.0, 0.0])
@pytest.mark.parametrize(("rows", "per_token"), [(1, 1), (1, 3), (2, 2), (9, 2), (7, 5)])
def test_every_token_gets_the_weighted_sum_of_its_experts(rows: int, per_token: int, limit: float) -> None:
    x, routes, experts = whole_numbers(rows), make_routes(rows, per_token), make_experts()
    got = routed_experts(x, routes, PackedExperts(experts), limit)
    assert got.dtype == torch.float32
    assert torch.equal(got, by_hand(x, routes, experts, limit))


def test_matrices_decoded_a_few_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, routes, experts = whole_numbers(9), make_routes(9, 3), make_experts()
    want = by_hand(x, routes, experts, 10.0)
    for elements in (1, 3 * 2 * HIDDEN * WIDTH, 1 << 30):
        monkeypatch.setattr(ge, "_DECODE_ELEMENTS", elements)
        assert torch.equal(routed_experts(x, routes, PackedExperts(experts), 10.0), want)


@pytest.mark.parametrize("at_once", [1, 4, 27])
def test_hidden_values_in_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    x, routes, experts = whole_numbers(9), make_routes(9, 3), make_experts()
    monkeypatch.setattr(ge, "_HIDDEN_ROWS", at_once)
    got = routed_experts(x, routes, PackedExperts(experts), 10.0)
    assert torch.equal(got, by_hand(x, routes, experts, 10.0))


def test_only_selected_experts_are_read() -> None:
    asked: set[int] = set()

    class Watched(PackedExperts):
        def gate_up(self, experts: Sequence[int]) -> Tensor:
            asked.update(experts)
            return super().gate_up(experts)

    for rows in (1, 6):
        held = Watched(make_experts())
        asked.clear()
        routes = Routes(torch.tensor([[1, 4]]).repeat(rows, 1), torch.ones(rows, 2), torch.ones(rows, EXPERTS))
        routed_experts(whole_numbers(rows), routes, held, 10.0)
        assert asked == {1, 4}


def test_dense_experts_are_the_same_experts() -> None:
    x, routes, experts = whole_numbers(7), make_routes(7, 2), make_experts()
    gate_up = torch.stack([torch.cat([matrix(e.gate), matrix(e.up)]) for e in experts]).bfloat16()
    dense = DenseExperts(gate_up, torch.stack([matrix(e.down) for e in experts]).bfloat16())
    assert (dense.count, dense.elements) == (EXPERTS, 2 * HIDDEN * WIDTH)
    for rows in (slice(0, 1), slice(0, 7)):
        some = Routes(routes.experts_TK[rows], routes.weights_TK[rows], routes.scores_TE[rows])
        want = routed_experts(x[rows], some, PackedExperts(experts), 10.0)
        assert torch.equal(routed_experts(x[rows], some, dense, 10.0), want)


def test_the_weight_multiplies_before_the_down_product() -> None:
    # a weight that is no power of two moves the rounding steps of the down product's input: after it, bits differ
    x, experts = whole_numbers(20), make_experts(1)
    every = torch.zeros(20, 1, dtype=torch.int64)
    scores = torch.ones(20, 1)
    weighted = routed_experts(x, Routes(every, torch.full((20, 1), 1.3), scores), PackedExperts(experts), 10.0)
    plain = routed_experts(x, Routes(every, torch.ones(20, 1), scores), PackedExperts(experts), 10.0)
    assert not torch.equal(weighted, (plain * 1.3).bfloat16().float())
    assert torch.equal(weighted, by_hand(x, Routes(every, torch.full((20, 1), 1.3), scores), experts, 10.0))


@pytest.mark.parametrize("rows", [1, 6])
def test_the_shared_expert_has_weight_one_and_the_same_clamps(rows: int) -> None:
    x = whole_numbers(rows)
    gate, up, down = (torch.randint(-4, 5, shape).bfloat16() for shape in ((40, WIDTH), (40, WIDTH), (WIDTH, 40)))
    gate, up = torch.cat([gate, gate[:24]]), torch.cat([up, up[:24]])  # 64 hidden columns
    down = torch.cat([down, down[:, :24]], 1)
    got = shared_expert(x, torch.cat([gate, up]), down, 10.0)
    assert got.dtype == torch.bfloat16
    want = [one_expert(x[row], gate.double(), up.double(), down.double(), None, 10.0) for row in range(rows)]
    assert torch.equal(got, torch.stack(want))


def test_quantisers_can_be_exchanged() -> None:
    x, routes, held = whole_numbers(4), make_routes(4, 2), PackedExperts(make_experts())
    seen: list[Tensor] = []

    def watch(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return fake_q8(hidden)

    assert torch.equal(routed_experts(x, routes, held, 10.0, watch), routed_experts(x, routes, held, 10.0))
    assert [tuple(hidden.shape) for hidden in seen] == [(8, HIDDEN)]
    gate_up, down = whole_numbers(2 * HIDDEN), whole_numbers(WIDTH, HIDDEN)
    assert torch.equal(shared_expert(x, gate_up, down, 10.0, watch), shared_expert(x, gate_up, down, 10.0))
    assert seen[1].shape == (4, HIDDEN)


def test_the_gate_is_clamped_above_and_the_other_half_on_both_sides() -> None:
    gate = torch.tensor([20.0, -20.0, 2.0, 2.0]).bfloat16()
    up = torch.tensor([1.0, 1.0, 30.0, -30.0]).bfloat16()
    silu = [v / (1 + np.exp(-v)) for v in (10.0, -20.0, 2.0, 2.0)]
    want = [silu[0], silu[1], 10 * silu[2], -10 * silu[3]]
    assert clamped_swiglu(gate, up, 10.0).tolist() == pytest.approx(want, rel=1e-6)
    assert clamped_swiglu(gate, up, 0.0).tolist()[0] == pytest.approx(20.0, rel=1e-6)
    assert clamped_swiglu(gate, up, 0.0).tolist()[3] == pytest.approx(-30 * silu[3], rel=1e-6)
