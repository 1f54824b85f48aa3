"""Draft losses: the trained block is the served block, and the backbone stays as it is."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.draft import Drafter
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.trace import TraceOptions, trace
from headrace.train.dspark import DraftTrainer, backbone_digest, sample_anchors
from headrace.train.export import export_masters
from headrace.train.graph import Document, GraphOptions, TrainGraph
from headrace.train.masters import Masters, init_masters
from headrace.train.quantise import QuantPlan
from tests.factories import tiny_checkpoint, tiny_config

OPTIONS = GraphOptions(dtype=torch.bfloat16, quant=QuantPlan.everything())


def documents(vocab_size: int) -> list[Document]:
    random = np.random.default_rng(7)
    return [Document(random.integers(0, vocab_size, length)) for length in (37, 64)]


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
    anchors = sample_anchors(texts, 6, block, seed=0)
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
    masters, graph, _ = setup
    before = backbone_digest(masters)
    texts = documents(masters.config.vocab_size)
    trainer = DraftTrainer(graph)
    drafts = {name: tensor for name, tensor in masters.parameters.items() if name.startswith("mtp.")}
    optimizer = torch.optim.Adam(drafts.values(), lr=3e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = trainer.loss(texts, sample_anchors(texts, 8, masters.config.draft.block_size, seed=1), OPTIONS)
        loss.total.backward()
        optimizer.step()
        losses.append(loss.total.item())
    assert losses[-1] < 0.95 * losses[0]
    assert all(tensor.grad is not None for tensor in drafts.values())
    assert all(tensor.grad is None for name, tensor in masters.parameters.items() if name not in drafts)
    assert backbone_digest(masters) == before


def test_anchors_leave_room_for_the_block_and_repeat_with_their_seed() -> None:
    texts = documents(100)
    for anchors, text in zip(sample_anchors(texts, 50, 5, seed=3), texts, strict=True):
        assert anchors.positions.max() + 5 + 1 < len(text.token_ids)
        assert len(set(anchors.positions.tolist())) == len(anchors.positions)
    again = sample_anchors(texts, 50, 5, seed=3)
    assert all(
        np.array_equal(a.positions, b.positions)
        for a, b in zip(again, sample_anchors(texts, 50, 5, seed=3), strict=True)
    )


def test_documents_too_short_to_draft_are_refused(setup: tuple[Masters, TrainGraph, Path]) -> None:
    _, graph, _ = setup
    with pytest.raises(UserError, match="nothing can be drafted"):
        DraftTrainer(graph).loss([Document(np.array([1, 2, 3]))], [], OPTIONS)
