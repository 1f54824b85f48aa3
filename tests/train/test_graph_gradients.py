"""Gradients of every mechanism against finite differences, in float64 with the quantisers off.

One derivative per kind of parameter, over all layers at once, along a random direction.
"""

import re
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kernels import swiglu
from headrace.kernels.swiglu import clamped_swiglu, weighted_swiglu
from headrace.train.graph import Document, GraphOutput, TrainGraph
from headrace.train.losses import cross_entropy
from headrace.train.objective import balance_of
from headrace.train.passes import Pass
from tests.train.graphs import EXACT, gradients_of, lively_graph, micro_config, next_tokens, run_pass, token_ids

STEP = 1e-7  # the loss has kinks (clamps, ReLU-like gates), so a step is short
TOLERANCE = 1e-5  # rounding of the loss, about 1e-13, over the step, about 1e-6 of derivatives around 1
FLOOR = 1e-2  # a derivative must be larger to say something; a missing gradient is 0

# Layer 0 sees its window only, layers 1 to 3 pick from entries of pairs, layers 4 to 6 from entries of single tokens.
ATTENTION = ("wq_a.weight", "wq_b.weight", "wkv.weight", "wo_a.weight", "wo_b.weight", "attn_sink")
MECHANISMS: dict[str, tuple[str, ...]] = {
    "embedding and head": (r"embed\.weight", r"head\.weight"),
    "window attention with a sink": tuple(rf"layers\.0\.attn\.{re.escape(part)}" for part in ATTENTION),
    "attention to picked pairs": tuple(rf"layers\.[123]\.attn\.{re.escape(part)}" for part in ATTENTION),
    "attention to picked tokens": tuple(rf"layers\.[456]\.attn\.{re.escape(part)}" for part in ATTENTION),
    "compressor of pairs": tuple(rf"layers\.[13]\.attn\.compressor\.{p}\.weight" for p in ("wkv", "wgate", "norm")),
    "compressor of tokens": tuple(rf"layers\.4\.attn\.compressor\.{p}\.weight" for p in ("wkv", "norm")),
    "streams": tuple(rf"layers\.\d\.hc_{half}_{p}" for half in ("attn", "ffn") for p in ("fn", "base", "scale")),
    "experts": (
        r".*\.ffn\.gate\.weight",
        *(rf".*\.ffn\.experts\.{part}" for part in ("w1", "w2", "w3")),
        *(rf".*\.shared_experts\.{part}\.weight" for part in ("w1", "w2", "w3")),
    ),
    "n-gram memory": tuple(rf".*\.engram\.{p}" for p in (r"embed\.weight", r"wkv\.weight", "q_weight", "k_weight")),
    "norms": (
        r"norm\.weight",
        *(rf"layers\.\d\.{part}_norm\.weight" for part in ("attn", "ffn")),
        *(rf"layers\.\d\.attn\.{part}_norm\.weight" for part in ("q", "kv")),
    ),
}
CASES = [(mechanism, pattern) for mechanism, patterns in MECHANISMS.items() for pattern in patterns]


@cache
def graph() -> TrainGraph:
    return lively_graph(micro_config(), dtype=torch.float64)


DOCUMENTS = [Document(token_ids(69, 1)), Document(token_ids(7, 2))]  # the first is longer than a tile of queries


@cache
def gradients() -> dict[str, Tensor]:
    return run_pass(graph(), DOCUMENTS, EXACT).gradients


def choices(output: GraphOutput) -> list[Tensor]:
    picks = [one for parts in output.published.values() for one in parts]
    return picks + [routes.experts_TK for routes in output.routes]


@torch.no_grad()
def loss_and_choices(names: list[str], directions: list[Tensor], step: float) -> tuple[float, list[Tensor]]:
    parameters = graph().masters.parameters
    before = [parameters[name].clone() for name in names]
    try:
        for name, direction in zip(names, directions, strict=True):
            parameters[name] += step * direction
        output = graph().forward(DOCUMENTS, EXACT)
        judged = cross_entropy(output.hidden_TD, output.head, next_tokens(DOCUMENTS))
        return float(judged.numerator), choices(output)
    finally:
        for name, kept in zip(names, before, strict=True):
            parameters[name].copy_(kept)


def matching(pattern: str) -> list[str]:
    return [name for name in graph().masters.parameters if re.fullmatch(pattern, name)]


@pytest.mark.parametrize(("mechanism", "pattern"), CASES, ids=[f"{m}: {p}" for m, p in CASES])
def test_the_gradient_is_that_of_finite_differences(mechanism: str, pattern: str) -> None:
    names = matching(pattern)
    parameters = [graph().masters.parameters[name].detach() for name in names]
    directions = [torch.randn_like(one) * one.square().mean().sqrt() for one in parameters]
    expected = sum(float((gradients()[n] * d).sum()) for n, d in zip(names, directions, strict=True))
    above, choices_above = loss_and_choices(names, directions, STEP)
    below, choices_below = loss_and_choices(names, directions, -STEP)
    assert all(one.equal(other) for one, other in zip(choices_above, choices_below, strict=True)), "a choice flipped"
    assert abs(expected) > FLOOR
    assert (above - below) / (2 * STEP) == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


def test_every_parameter_but_the_indexers_has_a_case() -> None:
    names = set(graph().masters.parameters)
    found = [name for _, pattern in CASES for name in matching(pattern)]
    assert sorted(found) == sorted(name for name in names if ".indexer." not in name)
    assert sorted(gradients()) == sorted(found)


def test_the_model_that_is_checked_uses_every_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    clamped = []

    def counting(gate: Tensor, up: Tensor, limit: float) -> Tensor:
        clamped.append(float(((gate > limit) | (up.abs() > limit)).double().mean()))
        return clamped_swiglu(gate, up, limit)

    monkeypatch.setattr(swiglu, "clamped_swiglu", counting)
    output = graph().forward(DOCUMENTS, EXACT)
    assert 0.001 < min(clamped) < max(clamped) < 0.5
    plans = graph().plan
    assert {plan.role for plan in plans} == {"window", "full", "reindex", "reuse"}
    for parts in output.published.values():
        visible, picked = parts[0].shape[1], int((parts[0][-1] >= 0).sum())
        assert picked == visible == graph().config.index_topk < 69 // 2, "a document must leave entries unpicked"
    assert (output.pools[0][-1] >= 0).all(), "the pool must leave entries out"
    assert all(len(routes.experts_TK.unique()) == graph().config.num_experts for routes in output.routes)


BALANCED = (r".*\.ffn\.gate\.weight", r"embed\.weight", r"layers\.\d\.attn\.wo_b\.weight")


@pytest.mark.parametrize("pattern", BALANCED)
def test_the_gradient_of_the_balance_loss_is_that_of_finite_differences(pattern: str) -> None:
    """Which experts run is fixed, so that only their scores move."""
    count = sum(len(document.token_ids) for document in DOCUMENTS)
    whole = Pass(tuple(DOCUMENTS), np.zeros(count, np.int64), np.zeros(count, np.int64), np.ones(count))

    def balance() -> tuple[Tensor, list[Tensor]]:
        output = graph().forward(DOCUMENTS, EXACT)
        return balance_of(output, whole), choices(output)

    names, step = matching(pattern), 1e-6
    directions = [
        torch.randn_like(p) * p.detach().square().mean().sqrt() for p in map(graph().masters.parameters.get, names)
    ]
    found = gradients_of(balance()[0], graph())
    expected = sum(float((found[n] * d).sum()) for n, d in zip(names, directions, strict=True))
    moved = []
    for sign in (1, -1):
        with torch.no_grad():
            before = [graph().masters.parameters[name].clone() for name in names]
            for name, direction in zip(names, directions, strict=True):
                graph().masters.parameters[name] += sign * step * direction
            moved.append(balance())
            for name, kept in zip(names, before, strict=True):
                graph().masters.parameters[name].copy_(kept)
    (above, one), (below, other) = moved
    assert all(a.equal(b) for a, b in zip(one, other, strict=True)), "a choice flipped"
    assert abs(expected) > 1e-3
    assert float(above - below) / (2 * step) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_clamped_activations_get_no_gradient() -> None:
    gate = torch.tensor([-3.0, 0.5, 0.71, 5.0], dtype=torch.float64, requires_grad=True)
    up = torch.tensor([-0.8, -0.6, 0.1, 0.9], dtype=torch.float64, requires_grad=True)
    rows = torch.stack([gate, up], 1)  # a gate and its partner in each
    of_gate, of_up = torch.autograd.grad(weighted_swiglu(rows, None, 0.7).sum(), [gate, up])
    assert (of_gate != 0).tolist() == [True, True, False, False]
    assert (of_up != 0).tolist() == [False, True, True, False]
