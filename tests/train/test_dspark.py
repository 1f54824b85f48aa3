"""Draft losses: the trained block is the served block, and the backbone stays as it is."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.draft import Drafter
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.trace import TraceOptions, trace
from headrace.train.anchors import Anchors, draw_anchors
from headrace.train.data.draws import Draws
from headrace.train.data.packing import text_sample
from headrace.train.draft_recipe import DraftLossWeights
from headrace.train.dspark import DraftTrainer, backbone_digest
from headrace.train.export import export_masters
from headrace.train.graph import Document, GraphOptions, TrainGraph
from headrace.train.masters import Masters, init_masters
from headrace.train.quantise import QuantPlan
from tests.factories import tiny_checkpoint, tiny_config

OPTIONS = GraphOptions(dtype=torch.bfloat16, quant=QuantPlan.everything())


def documents(vocab_size: int) -> list[Document]:
    random = np.random.default_rng(7)
    return [Document(random.integers(0, vocab_size, length)) for length in (37, 64)]


def anchors_of(texts: list[Document], per_document: int, seed: int, block: int) -> list[Anchors]:
    return draw_anchors([text_sample(text.token_ids) for text in texts], 2 * per_document, block, Draws(seed))


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> tuple[Masters, TrainGraph, Path]:
    folder = tmp_path_factory.mktemp("draft")
    config = tiny_config(streams=3, vision=False)
    masters = init_masters(config, 0)
    tokenizer = (tiny_checkpoint(folder, config, 0) / "tokenizer.json").read_bytes()
    export_masters(masters, folder / "exported", tokenizer)
    addressing = load_model(folder / "exported").model.addressing
    return masters, TrainGraph(masters, addressing), folder / "exported"


def test_confidences_in_training_are_those_of_the_served_draft(setup: tuple[Masters, TrainGraph, Path]) -> None:
    masters, graph, folder = setup
    block = masters.config.draft.block_size
    texts = documents(masters.config.vocab_size)
    anchors = anchors_of(texts, 6, 0, block)
    loss = DraftTrainer(graph).loss(texts, anchors, OPTIONS)
    model = load_model(folder, LoadOptions(has_draft=True)).model
    drafter = Drafter(model.config, model.parameters, model.frequencies.plain)
    first = texts[0].token_ids
    taps = trace(model, first, TraceOptions(mode="full"))["main_hidden"][0]
    for row, position in enumerate(anchors[0].positions):
        state = model.new_state()
        drafter.observe(state, 0, taps[: position + 1])
        served = drafter.propose(state, int(first[position + 1]))
        assert torch.equal(served.confidence[0], loss.logits_AX[row, 0])


def test_only_the_draft_learns_and_its_loss_falls(setup: tuple[Masters, TrainGraph, Path]) -> None:
    shared, graph, _ = setup
    masters = init_masters(shared.config, 0)
    graph = TrainGraph(masters, graph.addressing)
    before = backbone_digest(masters)
    texts = documents(masters.config.vocab_size)
    trainer = DraftTrainer(graph)
    drafts = {name: tensor for name, tensor in masters.parameters.items() if name.startswith("mtp.")}
    optimizer = torch.optim.Adam(drafts.values(), lr=3e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = trainer.loss(texts, anchors_of(texts, 8, 1, masters.config.draft.block_size), OPTIONS)
        loss.total.backward()
        optimizer.step()
        losses.append(loss.total.item())
    assert losses[-1] < 0.95 * losses[0]
    assert all(tensor.grad is not None for tensor in drafts.values())
    assert all(tensor.grad is None for name, tensor in masters.parameters.items() if name not in drafts)
    assert backbone_digest(masters) == before


def test_greedy_drafts_in_training_are_those_of_the_served_draft(setup: tuple[Masters, TrainGraph, Path]) -> None:
    masters, graph, folder = setup
    texts = documents(masters.config.vocab_size)
    anchors = anchors_of(texts, 6, 2, masters.config.draft.block_size)
    trainer = DraftTrainer(graph)
    drafts = trainer.propose(trainer.run(texts, anchors, OPTIONS))
    model = load_model(folder, LoadOptions(has_draft=True)).model
    drafter = Drafter(model.config, model.parameters, model.frequencies.plain)
    row = 0
    for one in anchors:
        ids = texts[one.document].token_ids
        taps = trace(model, ids, TraceOptions(mode="full"))["main_hidden"][0]
        for position in one.positions:
            state = model.new_state()
            drafter.observe(state, 0, taps[: position + 1])
            served = drafter.propose(state, int(ids[position + 1]))
            assert torch.equal(served.ids, drafts.ids_AX[row])
            assert torch.equal(served.confidence, drafts.confidence_AX[row])
            row += 1


def test_losses_are_those_of_the_formulas(setup: tuple[Masters, TrainGraph, Path]) -> None:
    """Cross entropy, twice the total variation and the confidence's entropy from a run's logits, draft by draft."""
    masters, graph, _ = setup
    block = masters.config.draft.block_size
    texts = documents(masters.config.vocab_size)
    (anchors,) = anchors_of(texts[:1], 2, 5, block)
    valid = np.array([[True, True, False], [True, False, False], [True, True, True], [True, True, False]])
    anchors = Anchors(anchors.document, anchors.positions, valid)
    trainer = DraftTrainer(graph, DraftLossWeights(cross_entropy=0.2, variation=0.7, confidence=0.5, decay=2.0))
    run = trainer.run(texts, [anchors], OPTIONS)
    loss = trainer.judge(run, [anchors])
    target = graph.forward(texts, OPTIONS).logits().softmax(-1)
    bias, _ = trainer._markov(run, run.known_AK[:, :-1].flatten())
    logits = (trainer._base_logits(run) + bias).view(4, block, -1)
    sums, total = torch.zeros(3, dtype=torch.float64), 0.0
    for row, position in enumerate(anchors.positions.tolist()):
        for place in range(block):
            if not valid[row, place]:
                continue
            weight = float(np.exp(-place / 2.0))
            drafted = logits[row, place].double().softmax(-1)
            distance = (drafted - target[position + 1 + place].double()).abs().sum()
            chance = 1 - distance / 2
            sure = torch.sigmoid(loss.logits_AX[row, place].double())
            entropy = -(chance * sure.log() + (1 - chance) * (1 - sure).log())
            known = int(texts[0].token_ids[position + 2 + place])
            sums += weight * torch.stack([-drafted[known].log(), distance, entropy]).detach()
            total += weight
    found = [loss.cross_entropy, loss.variation, loss.confidence]
    assert found == pytest.approx((sums / total).tolist(), rel=1e-4)
    assert loss.total.item() == pytest.approx(float(sums @ torch.tensor([0.2, 0.7, 0.5]).double()) / total, rel=1e-4)


def test_parts_of_a_batch_add_up_to_the_whole(setup: tuple[Masters, TrainGraph, Path]) -> None:
    masters, graph, _ = setup
    texts = documents(masters.config.vocab_size)
    anchors = anchors_of(texts, 5, 4, masters.config.draft.block_size)
    trainer = DraftTrainer(graph)
    weight = float(trainer.position_weights(anchors).sum())
    parts = [
        trainer.loss([texts[one.document]], [Anchors(0, one.positions, one.valid)], OPTIONS, weight) for one in anchors
    ]
    whole = trainer.loss(texts, anchors, OPTIONS)
    assert len(parts) == 2
    assert sum(part.total.item() for part in parts) == pytest.approx(whole.total.item(), rel=1e-5)


def test_documents_too_short_to_draft_are_refused(setup: tuple[Masters, TrainGraph, Path]) -> None:
    _, graph, _ = setup
    with pytest.raises(UserError, match="nothing can be drafted"):
        DraftTrainer(graph).loss([Document(np.array([1, 2, 3]))], [], OPTIONS)
