"""Route sources in the training pass itself: choices made with older parameters, with and without recomputation."""

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.train.anticipatory import LiveRoutes, PassRouter, RouteRecord, RouteSource
from headrace.train.balance import LoadCounter
from headrace.train.graph import Document, GraphOptions, GraphOutput, TrainGraph
from headrace.train.masters import Masters, init_masters
from tests.factories import tiny_config

CONFIG = tiny_config(vision=False, draft=False, engram=False)
IDS = [np.arange(7, 26) * 11 % 250, np.arange(3, 15) * 7 % 250]
OPTIONS = GraphOptions()


def masters() -> Masters:
    return init_masters(CONFIG, seed=1)


def run(model: Masters, source: RouteSource, options: GraphOptions = OPTIONS) -> GraphOutput:
    router = PassRouter(source, CONFIG.experts_per_token, CONFIG)
    return TrainGraph(model, None).forward([Document(ids) for ids in IDS], options, router)


def gradients(model: Masters, source: RouteSource, options: GraphOptions = OPTIONS) -> dict[str, Tensor]:
    loss = run(model, source, options).logits().square().mean()
    names = [name for name in model.parameters if ".indexer." not in name]
    found = torch.autograd.grad(loss, [model.parameters[name] for name in names])
    return dict(zip(names, found, strict=True))


def test_a_pass_with_live_routes_is_the_pass_without_a_router() -> None:
    model = masters()
    plain = TrainGraph(model, None).forward([Document(ids) for ids in IDS], OPTIONS)
    assert torch.equal(run(model, LiveRoutes()).logits(), plain.logits())


def test_a_later_pass_executes_the_experts_chosen_before() -> None:
    model, record = masters(), RouteRecord()
    with torch.no_grad():
        before = [routes.experts_TK for routes in run(model, record.recorder()).routes]
        for name, parameter in model.parameters.items():
            if name.endswith("gate.weight"):
                parameter.add_(torch.randn_like(parameter))
        live = [routes.experts_TK for routes in run(model, LiveRoutes()).routes]
        cached = run(model, record.player()).routes
    assert not all(torch.equal(a, b) for a, b in zip(before, live, strict=True))
    assert all(torch.equal(a, routes.experts_TK) for a, routes in zip(before, cached, strict=True))
    counter = LoadCounter(CONFIG.num_experts)
    for layer, routes in enumerate(cached):
        counter.record(layer, 0, routes.experts_TK)
    loads = counter.take()
    assert all(torch.equal(loads[i].text_E, torch.bincount(b.flatten(), minlength=8)) for i, b in enumerate(before))


@pytest.mark.parametrize("is_cached", [False, True])
def test_recomputation_changes_no_gradient(is_cached: bool) -> None:
    model, record = masters(), RouteRecord()
    with torch.no_grad():
        run(model, record.recorder())
        for name, parameter in model.parameters.items():
            if name.endswith("gate.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    source: RouteSource = record.player() if is_cached else LiveRoutes()
    kept = gradients(model, source)
    again = gradients(model, source, GraphOptions(has_checkpoints=True))
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_the_router_of_cached_experts_still_learns() -> None:
    model, record = masters(), RouteRecord()
    with torch.no_grad():
        run(model, record.recorder())
    found = gradients(model, record.player())
    gates = [value for name, value in found.items() if name.endswith("gate.weight")]
    assert gates
    assert all(gate.abs().sum() > 0 for gate in gates)
