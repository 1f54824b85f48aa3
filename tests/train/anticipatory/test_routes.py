"""Route sources: live, cached and replayed choices give the model the experts they say, with today's weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.kernels.grouped_experts import DenseExperts
from headrace.kernels.product import pad_columns
from headrace.models.deepseek_v41.block import live_router
from headrace.models.deepseek_v41.parameters import MoeWeights
from headrace.train.anticipatory import LiveRoutes, PassRouter, RouteRecord
from tests.factories import tiny_config

CONFIG = tiny_config()
COUNT = CONFIG.experts_per_token


def moe_weights(seed: int = 0) -> MoeWeights:
    generator = torch.Generator().manual_seed(seed)
    gate = torch.randn(CONFIG.num_experts, CONFIG.hidden_size, generator=generator)
    none: Any = torch.zeros(1)
    return MoeWeights(
        gate=pad_columns(gate).requires_grad_(),
        bias=torch.randn(CONFIG.num_experts, generator=generator) * 0.1,
        bias_vl=None,
        experts=DenseExperts(none, none),
        shared_gate_up=none,
        shared_down=none,
    )


def rows(count: int = 9) -> Tensor:
    return torch.randn(count, CONFIG.hidden_size)


def test_live_routes_are_the_bits_of_the_models_own_router() -> None:
    u, weights = rows(), moe_weights()
    ours = PassRouter(LiveRoutes(), COUNT, CONFIG)(u, weights, None)
    theirs = live_router(COUNT, CONFIG)(u, weights, None)
    assert torch.equal(ours.experts_TK, theirs.experts_TK)
    assert torch.equal(ours.weights_TK, theirs.weights_TK)


def test_a_recorded_pass_played_back_with_the_same_parameters_gives_the_same_bits() -> None:
    u, layers = rows(), [moe_weights(seed) for seed in range(3)]
    record = RouteRecord()
    router = PassRouter(record.recorder(), COUNT, CONFIG)
    live = [router(u, weights, None) for weights in layers]
    player = PassRouter(record.player(), COUNT, CONFIG)
    for weights, expected in zip(layers, live, strict=True):
        routes = player(u, weights, None)
        assert routes.experts_TK.dtype == torch.int64
        assert torch.equal(routes.experts_TK, expected.experts_TK)
        assert torch.equal(routes.weights_TK, expected.weights_TK)
    assert all(kept.dtype == torch.int16 for kept in record.experts.values())


def test_cached_experts_are_weighted_by_todays_scores_and_keep_their_gradient() -> None:
    u, weights = rows(), moe_weights()
    live = live_router(COUNT, CONFIG)(u, weights, None)
    worst = live.scores_TE.topk(COUNT, dim=1, largest=False).indices.sort(dim=1).values  # no longer selected at all
    record = RouteRecord({(0, 0): worst.to(torch.int16)})
    routes = PassRouter(record.player(), COUNT, CONFIG)(u, weights, None)
    assert torch.equal(routes.experts_TK, worst)
    picked = live.scores_TE.gather(1, worst)
    assert torch.allclose(routes.weights_TK, picked / picked.sum(1, keepdim=True) * CONFIG.route_scale)
    (gradient,) = torch.autograd.grad(routes.weights_TK[:, 0].sum(), weights.gate)
    assert all(gradient[expert].abs().sum() > 0 for expert in worst.flatten().unique().tolist())


def test_layers_run_again_in_any_order_keep_their_places() -> None:
    u, layers = rows(), [moe_weights(seed) for seed in range(4)]
    record = RouteRecord()
    router = PassRouter(record.recorder(), COUNT, CONFIG)
    first = [router(u, weights, None).experts_TK for weights in layers]
    kept = {key: value.clone() for key, value in record.experts.items()}
    for weights, expected in reversed(list(zip(layers, first, strict=True))):  # as a backward pass does
        assert torch.equal(router(u, weights, None).experts_TK, expected)
    assert record.experts.keys() == kept.keys() == {(0, layer) for layer in range(4)}
    assert all(torch.equal(record.experts[key], kept[key]) for key in kept)


def test_micro_batches_have_records_of_their_own() -> None:
    record, weights = RouteRecord(), moe_weights()
    inputs = [rows(5), rows(7)]
    live = [
        PassRouter(record.recorder(micro), COUNT, CONFIG)(u, weights, None).experts_TK for micro, u in enumerate(inputs)
    ]
    for micro, u in enumerate(inputs):
        routes = PassRouter(record.player(micro, "replay"), COUNT, CONFIG)(u, weights, None)
        assert torch.equal(routes.experts_TK, live[micro])


def test_a_record_survives_saving() -> None:
    record = RouteRecord({(0, 3): torch.tensor([[0, 5], [2, 7]], dtype=torch.int16), (2, 0): torch.tensor([[1, 4]])})
    again = RouteRecord.from_state(record.state(), 8)
    assert again.experts.keys() == record.experts.keys()
    assert all(torch.equal(again.experts[key], record.experts[key].to(torch.int16)) for key in record.experts)


@pytest.mark.parametrize(
    ("name", "experts", "part"),
    [
        ("first", torch.tensor([[0, 1]]), "part named 'first'"),
        ("0/0", torch.tensor([0, 1]), "are \\[2\\]"),
        ("0/0", torch.tensor([[0.0, 1.0]]), "torch.float32"),
        ("0/0", torch.tensor([[1, 0]]), "distinct ascending"),
        ("0/0", torch.tensor([[1, 1]]), "distinct ascending"),
        ("0/0", torch.tensor([[0, 8]]), "from 0 to 7"),
        ("0/0", torch.tensor([[-1, 0]]), "from 0 to 7"),
    ],
)
def test_records_that_are_none_are_refused(name: str, experts: Tensor, part: str) -> None:
    with pytest.raises(UserError, match=part):
        RouteRecord.from_state({name: experts}, 8)


def test_a_record_of_another_batch_is_refused() -> None:
    record = RouteRecord({(0, 0): torch.tensor([[0, 1]], dtype=torch.int16)})
    with pytest.raises(UserError, match=r"are for \[1, 2\] tokens and experts; this pass has \[9, 2\]"):
        PassRouter(record.player(), COUNT, CONFIG)(rows(), moe_weights(), None)
    with pytest.raises(UserError, match="lack layer 0 of micro-batch 1"):
        PassRouter(record.player(1), COUNT, CONFIG)(rows(), moe_weights(), None)
