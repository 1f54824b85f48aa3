"""The loss of a batch: counts that are known before any pass, kinds kept apart, documents weighed alike."""

import math

import numpy as np
import pytest
import torch

from headrace.train.data.draws import Draws
from headrace.train.data.packing import IGNORE, Sample, pack_row, stack_rows
from headrace.train.graph import GraphOptions, TrainGraph
from headrace.train.index_loss import IndexLossSettings, index_loss
from headrace.train.losses import cross_entropy
from headrace.train.masters import init_masters
from headrace.train.objective import Tally, balance_of, index_rows, judge
from headrace.train.passes import Passes, plan_passes
from headrace.train.recipe import Phase, Replay
from tests.train.small_recipe import small_model

VOCAB = 50


def graph() -> TrainGraph:
    """Return an untrained model."""
    return TrainGraph(init_masters(small_model(VOCAB), 3), None)


def plan_of(lengths: list[list[int]], asked_from: float, replay: Replay, micro_batch: int = 64) -> Passes:
    """Plan rows of documents whose labels begin at a share of their lengths."""
    random = np.random.default_rng(5)
    rows = []
    for row in lengths:
        samples = []
        for place, length in enumerate(row):
            ids = random.integers(3, VOCAB, length)
            labels = np.where(np.arange(length) >= asked_from * length, np.roll(ids, -1), IGNORE)
            samples.append(Sample(token_ids=ids, labels=labels, kind=("text", "pairs")[place % 2]))
        rows.append(pack_row(samples, 64, 0))
    phase = Phase(replay=replay, exact_share=0.3)
    return plan_passes(stack_rows(rows), phase, 4, micro_batch, Draws(1))


@pytest.mark.parametrize("replay", ["off", "last-turn", "every-turn"])
@pytest.mark.parametrize("max_rows", [None, 1, 9, 40])
def test_rows_of_the_index_loss_are_known_before_any_pass(replay: Replay, max_rows: int | None) -> None:
    model = graph()
    plan = plan_of([[40, 9], [64], [3, 5, 31]], 0.5, replay)
    wanted = index_rows(plan, model.plan, model.config, max_rows)
    found = dict.fromkeys(wanted, 0)
    options = GraphOptions(has_records=True)
    for number, one in enumerate(plan.passes):
        output = model.forward(one.documents, options)
        settings = IndexLossSettings(max_rows=max_rows)
        for source, loss in index_loss(model, output, options, settings, (0, 0, number)).items():
            found[source] += loss.count
    assert found == wanted
    assert len(set(wanted.values())) > 1 or max_rows is not None, "sources of other ratios see other rows"


@pytest.mark.parametrize("asked_from", [0.0, 0.9])
def test_logits_for_the_asked_rows_only_give_the_same_loss(asked_from: float) -> None:
    model = graph()
    (one,) = plan_of([[40, 24]], asked_from, "off").passes
    output = model.forward(one.documents, GraphOptions())
    some = judge(output, one)
    every = cross_entropy(output.hidden_TD, output.head, torch.from_numpy(one.labels))
    assert some.count == every.count == one.num_labels
    assert torch.equal(some.losses_T, every.losses_T)
    assert torch.equal(some.correct_T, every.correct_T)
    torch.testing.assert_close(some.numerator, every.numerator)


def test_kinds_are_counted_apart_and_bytes_belong_to_text() -> None:
    model = graph()
    plan = plan_of([[20, 30], [10, 12]], 0.0, "off", micro_batch=64)
    bytes_V = np.arange(VOCAB)
    tally = Tally()
    losses = {"text": 0.0, "pairs": 0.0}
    num_bytes = 0
    for one in plan.passes:
        judged = judge(model.forward(one.documents, GraphOptions()), one)
        tally.count(judged, one, plan.kind_names, bytes_V)
        start = 0
        for document, kind in zip(one.documents, ("text", "pairs"), strict=True):
            part = slice(start, start + len(document.token_ids))
            losses[kind] += float(judged.losses_T[part].double().sum())
            num_bytes += int(bytes_V[one.labels[part]].sum()) if kind == "text" else 0
            start = part.stop
    assert tally.labels == {"pairs": 42, "text": 30}
    assert tally.nats == pytest.approx(losses)
    assert tally.loss == pytest.approx(sum(losses.values()) / 72)
    assert tally.bits_per_byte == pytest.approx(losses["text"] / math.log(2) / num_bytes)


def test_without_text_there_are_no_bits_per_byte() -> None:
    assert Tally().bits_per_byte is None
    assert Tally().index_loss is None
    assert Tally().index_shares == {}


@pytest.mark.parametrize("replay", ["off", "every-turn"])
def test_balance_weighs_every_document_alike_in_every_layer(replay: Replay) -> None:
    """With equal scores a layer gives 1 per document."""
    model = graph()
    (one,) = plan_of([[21, 40]], 0.6, replay).passes
    with torch.no_grad():
        for layer_id in range(3):
            model.masters.parameters[f"layers.{layer_id}.ffn.gate.weight"].zero_()
    output = model.forward(one.documents, GraphOptions())
    assert float(balance_of(output, one).detach()) == pytest.approx(2 * 3, rel=1e-5)
