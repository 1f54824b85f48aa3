"""The training graph: documents stay apart, streams mix as the report says, bits are kept, recomputation is free."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.block import half_mixes
from headrace.models.deepseek_v41.plan import build_plan
from headrace.train.balance import count_loads
from headrace.train.graph import Document, GraphOptions, Segment
from headrace.train.layers import LayerBuilder
from headrace.train.masters import Masters, init_masters
from headrace.train.quantise import QuantPlan
from tests.architecture.tree import ROOT
from tests.traces import differing, same_bits
from tests.train.graphs import (
    EXACT,
    SERVED,
    gradients_of,
    lively_graph,
    lively_masters,
    micro_config,
    next_tokens,
    run_pass,
    token_ids,
    with_quant,
)

DTYPES = [torch.float32, torch.bfloat16]
ODD, EVEN = 37, 26
EMBEDDING = "embed.weight"
# documents of different tokens: a row of the embedding's gradient belongs to one of them
LOW, HIGH = (0, 128), (128, 256)
SUM_ORDER = 1e-12  # float64 sums over the same terms in another order


def low_document(count: int, seed: int = 1) -> Document:
    return Document(token_ids(count, seed, *LOW))


def high_document(count: int = EVEN, seed: int = 2) -> Document:
    return Document(token_ids(count, seed, *HIGH))


# ------------------------------------------------------------------------------------------------ packed documents


@pytest.mark.parametrize("options", SERVED.values(), ids=lambda options: str(options.dtype))
def test_packed_documents_have_the_losses_they_have_apart(options: GraphOptions) -> None:
    graph = lively_graph(micro_config())
    documents = [low_document(ODD), high_document(), low_document(1), low_document(70, 3)]
    together = run_pass(graph, documents, options)
    apart = [run_pass(graph, [document], options) for document in documents]
    assert same_bits(together.judged.losses_T, torch.cat([one.judged.losses_T for one in apart]))
    assert same_bits(together.output.hidden_TD, torch.cat([one.output.hidden_TD for one in apart]))
    assert together.judged.count == sum(one.judged.count for one in apart) == ODD + EVEN + 70 - 3


def test_packed_documents_have_the_gradients_they_have_apart() -> None:
    graph = lively_graph(micro_config(), dtype=torch.float64)
    documents = [low_document(ODD), high_document(), low_document(70, 3)]
    together = run_pass(graph, documents, EXACT).gradients
    apart = [run_pass(graph, [document], EXACT).gradients for document in documents]
    for name, gradient in together.items():
        wanted = sum(one[name] for one in apart)
        error = (gradient - wanted).norm() / wanted.norm()
        assert error < SUM_ORDER, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", [low_document(ODD, 5), low_document(ODD + 10, 6), low_document(1)], ids=repr)
def test_no_bit_of_a_document_comes_from_another(other: Document, dtype: torch.dtype) -> None:
    graph = lively_graph(micro_config())
    rows = slice(*HIGH)
    before = run_pass(graph, [low_document(ODD), high_document()], SERVED[dtype])
    after = run_pass(graph, [other, high_document()], SERVED[dtype])
    last_to_first = run_pass(graph, [high_document(), other], SERVED[dtype])
    losses = before.judged.losses_T[-EVEN:]
    assert same_bits(after.judged.losses_T[-EVEN:], losses)
    assert same_bits(last_to_first.judged.losses_T[:EVEN], losses)
    gradient = before.gradients[EMBEDDING][rows]
    assert gradient.any()
    assert same_bits(after.gradients[EMBEDDING][rows], gradient)
    assert same_bits(last_to_first.gradients[EMBEDDING][rows], gradient)


def test_a_loss_on_one_document_moves_nothing_of_another() -> None:
    graph = lively_graph(micro_config())
    documents = [low_document(ODD), high_document()]
    labels = next_tokens(documents)
    labels[ODD:] = -100
    gradient = run_pass(graph, documents, SERVED[torch.float32], labels).gradients[EMBEDDING]
    assert gradient[slice(*LOW)].any()
    assert not gradient[slice(*HIGH)].any()


def test_a_loss_at_a_position_moves_nothing_behind_it() -> None:
    """The last tokens of a document are of their own range, and no earlier row may depend on them."""
    graph = lively_graph(micro_config())
    ids = np.concatenate([token_ids(30, 1, *LOW), token_ids(9, 2, *HIGH)])
    labels = next_tokens([Document(ids)])
    labels[30:] = -100
    gradient = run_pass(graph, [Document(ids)], SERVED[torch.float32], labels).gradients[EMBEDDING]
    assert gradient[slice(*LOW)].any()
    assert not gradient[slice(*HIGH)].any()


# ------------------------------------------------------------------------------------------------------- segments


def test_overlapping_segments_have_the_gradients_of_separate_passes() -> None:
    graph = lively_graph(micro_config(), dtype=torch.float64)
    ids = token_ids(60, 4)
    segments = (Segment(4, 24, 4), Segment(16, 40, 16), Segment(32, 60, 32))
    together = run_pass(graph, [Document(ids, segments), low_document(9)], EXACT)
    apart = [run_pass(graph, [Document(ids, (one,))], EXACT) for one in segments]
    apart.append(run_pass(graph, [low_document(9)], EXACT))
    wanted = torch.cat([one.judged.losses_T for one in apart])
    torch.testing.assert_close(together.judged.losses_T, wanted, rtol=SUM_ORDER, atol=SUM_ORDER)
    for name, gradient in together.gradients.items():
        wanted = sum(one.gradients[name] for one in apart)
        assert (gradient - wanted).norm() / wanted.norm() < SUM_ORDER, name


@pytest.mark.parametrize(
    ("count", "segments"),
    [(0, None), (5, ()), (5, (Segment(0, 6),)), (5, (Segment(3, 3, 3),)), (5, (Segment(2, 5, 0),))],
)
def test_a_document_that_no_pass_could_run_is_refused(count: int, segments: tuple[Segment, ...] | None) -> None:
    with pytest.raises(UserError, match="document"):
        Document(token_ids(count), segments)


# -------------------------------------------------------------------------------------------------------- streams


# Twenty steps end on columns; how near the rows are depends on how peaked the matrices are.
COLUMN_ERROR = 1e-5
ROW_ERRORS = {init_masters: 2e-3, lively_masters: 2e-2}


@pytest.mark.parametrize("make", ROW_ERRORS)
@pytest.mark.parametrize("streams", [2, 3, 4])
def test_streams_are_mixed_by_doubly_stochastic_matrices(streams: int, make: Callable[..., Masters]) -> None:
    config = micro_config(streams)
    ones, slack = torch.ones(200, streams), 1 + ROW_ERRORS[make]
    x, probe = torch.randn(200, streams, config.hidden_size), torch.randn(200, streams, 5)
    builder = LayerBuilder(make(config, 0), QuantPlan(), torch.float32)
    assert config.sinkhorn_iterations == 20
    product = torch.eye(streams).expand(200, -1, -1)
    for plan in build_plan(config):
        layer = builder.layer(plan, f"layers.{plan.id}")
        for weights in (layer.attn_mix, layer.ffn_mix):
            mix = half_mixes(x, weights, config)
            assert (mix.comb_TMM > 0).all()
            torch.testing.assert_close(mix.comb_TMM.sum(1), ones, rtol=0, atol=COLUMN_ERROR)
            torch.testing.assert_close(mix.comb_TMM.sum(2), ones, rtol=0, atol=ROW_ERRORS[make])
            assert ((mix.pre_TM > 0) & (mix.pre_TM < 1 + 2 * config.hc_eps)).all()
            assert ((mix.post_TM > 0) & (mix.post_TM < 2)).all()
            mixed = torch.bmm(mix.comb_TMM.transpose(1, 2), probe)
            assert (mixed.norm(dim=1) <= probe.norm(dim=1) * slack).all()
            product = torch.bmm(product, mix.comb_TMM)
    mixed = torch.bmm(product.transpose(1, 2), probe)
    assert (mixed.norm(dim=1) <= probe.norm(dim=1) * slack).all(), "fourteen mixes together enlarged a vector"
    torch.testing.assert_close(product.sum(1), ones, rtol=0, atol=14 * COLUMN_ERROR)


# ----------------------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_gradients_are_the_same_bits_in_every_run_and_for_two_threads(dtype: str) -> None:
    """In a process of its own, whose idle threads sleep: spinning ones take minutes on a busy machine."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    script = [sys.executable, "-m", "tests.train.gradient_threads", dtype]
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], []]


@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputation_changes_no_bit_and_counts_no_token_twice(dtype: torch.dtype) -> None:
    config = micro_config()
    graph = lively_graph(config)
    documents = [Document(token_ids(40, 1)), Document(token_ids(60, 2), (Segment(10, 50, 10), Segment(40, 60, 40)))]
    kept = run_pass(graph, documents, SERVED[dtype])
    recomputed = run_pass(graph, documents, replace(SERVED[dtype], has_checkpoints=True))
    assert same_bits(recomputed.judged.losses_T, kept.judged.losses_T)
    assert differing(recomputed.gradients, kept.gradients) == []
    for one, other in zip(recomputed.output.routes, kept.output.routes, strict=True):
        loads = [count_loads(routes.experts_TK, config.num_experts).total for routes in (one, other)]
        assert loads[0].equal(loads[1])
    rows = [routes.experts_TK.shape[0] for routes in recomputed.output.routes]
    assert rows == [100] * config.cut + [100] * (config.num_layers - config.cut)


def test_routes_of_a_recomputed_pass_have_gradients() -> None:
    graph = lively_graph(micro_config())
    found = []
    for has_checkpoints in (False, True):
        output = graph.forward([low_document(ODD)], replace(SERVED[torch.float32], has_checkpoints=has_checkpoints))
        found.append(gradients_of(sum(routes.scores_TE.square().sum() for routes in output.routes), graph))
    assert differing(*found) == []
    assert found[0]["layers.6.ffn.gate.weight"].any()


@pytest.mark.parametrize("flag", list(vars(QuantPlan())))
def test_every_quantiser_can_be_switched_off_alone(flag: str) -> None:
    graph = lively_graph(micro_config())
    alone, none = with_quant(GraphOptions(), **{flag: True}), GraphOptions()
    others, everything = with_quant(SERVED[torch.float32], **{flag: False}), SERVED[torch.float32]
    # rows of a table pass the quantiser of inputs, whose groups are the same, so only one of the two shows
    pairs = [(alone, none)] if flag == "tables" else [(alone, none), (others, everything)]
    for one, other in pairs:
        hidden = [graph.forward([low_document(ODD)], options).hidden_TD for options in (one, other)]
        assert not torch.equal(*hidden)
