"""Gradients of the draft losses against finite differences, in float64 with the quantisers off."""

import re
from functools import cache

import numpy as np
import pytest
import torch

from headrace.train.anchors import draw_anchors
from headrace.train.data.draws import Draws
from headrace.train.data.packing import IGNORE, Sample
from headrace.train.dspark import DraftLossWeights, DraftTrainer
from headrace.train.graph import Document, TrainGraph
from tests.factories import tiny_config
from tests.train.graphs import EXACT, MICRO, lively_masters, own_addressing, token_ids

STEP, TOLERANCE, FLOOR = 1e-7, 2e-5, 1e-4  # a short step: the variation has a kink wherever two distributions meet
DOCUMENTS = [Document(token_ids(41, 1)), Document(token_ids(23, 2))]
DISTRIBUTIONS = DraftLossWeights(cross_entropy=1.0, variation=1.0, confidence=0.0)
CONFIDENCE = DraftLossWeights(cross_entropy=0.0, variation=0.0, confidence=1.0)
ATTENTION = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
PATTERNS = (
    r"mtp\.0\.main_proj\.weight",
    r"mtp\.0\.main_norm\.weight",
    r"mtp\.\d\.norm\.weight",
    r"mtp\.\d\.markov_head\.(embed|head)\.weight",
    *(rf"mtp\.\d\.attn\.{part}\.weight" for part in ATTENTION),
    r"mtp\.\d\.attn\.attn_sink",
    r"mtp\.\d\.attn\.(q|kv)_norm\.weight",
    r"mtp\.\d\.(attn|ffn)_norm\.weight",
    r"mtp\.\d\.hc_(attn|ffn)_(fn|base|scale)",
    r"mtp\.\d\.ffn\.gate\.weight",
    r"mtp\.\d\.ffn\.experts\.w[123]",
    r"mtp\.\d\.ffn\.shared_experts\.w[123]\.weight",
)


@cache
def graph() -> TrainGraph:
    config = tiny_config(3, vision=False, **MICRO)
    return TrainGraph(lively_masters(config, 0, torch.float64), own_addressing(config))


def total(weights: DraftLossWeights) -> torch.Tensor:
    config = graph().config
    assert config.draft is not None
    samples = [
        Sample(token_ids=one.token_ids, labels=np.append(one.token_ids[1:], IGNORE), kind="text") for one in DOCUMENTS
    ]
    anchors = draw_anchors(samples, 10, config.draft.block_size, Draws(0, "anchors"))
    return DraftTrainer(graph(), weights).loss(DOCUMENTS, anchors, EXACT).total


@cache
def gradients(weights: DraftLossWeights) -> dict[str, torch.Tensor]:
    parameters = graph().masters.parameters
    found = torch.autograd.grad(total(weights), list(parameters.values()), allow_unused=True)
    return {name: one for name, one in zip(parameters, found, strict=True) if one is not None}


@torch.no_grad()
def moved(weights: DraftLossWeights, directions: dict[str, torch.Tensor], step: float) -> float:
    parameters = graph().masters.parameters
    before = {name: parameters[name].clone() for name in directions}
    try:
        for name, direction in directions.items():
            parameters[name] += step * direction
        return float(total(weights))
    finally:
        for name, kept in before.items():
            parameters[name].copy_(kept)


def check(weights: DraftLossWeights, pattern: str) -> None:
    names = [name for name in graph().masters.parameters if re.fullmatch(pattern, name)]
    values = {name: graph().masters.parameters[name].detach() for name in names}
    directions = {name: torch.randn_like(value) * value.square().mean().sqrt() for name, value in values.items()}
    expected = sum(float((gradients(weights)[name] * direction).sum()) for name, direction in directions.items())
    difference = moved(weights, directions, STEP) - moved(weights, directions, -STEP)
    assert abs(expected) > FLOOR
    assert difference / (2 * STEP) == pytest.approx(expected, rel=TOLERANCE, abs=1e-8)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_gradient_of_cross_entropy_and_variation_is_that_of_finite_differences(pattern: str) -> None:
    check(DISTRIBUTIONS, pattern)


def test_the_gradient_of_the_confidence_loss_is_that_of_finite_differences() -> None:
    """Of the head alone: the acceptance it learns is a constant of the gradient and depends on all other parameters."""
    check(CONFIDENCE, r"mtp\.\d\.confidence_head\.proj\.weight")


def test_every_draft_parameter_has_a_case_and_the_backbone_has_no_gradient() -> None:
    patterns = (*PATTERNS, r"mtp\.\d\.confidence_head\.proj\.weight")
    drafts = {name for name in graph().masters.parameters if name.startswith("mtp.")}
    assert {name for name in drafts if any(re.fullmatch(pattern, name) for pattern in patterns)} == drafts
    assert set(gradients(DISTRIBUTIONS)) | set(gradients(CONFIDENCE)) == drafts
