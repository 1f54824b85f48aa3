"""V4's stages: dense attention without an indexer, the indexer alone, both; and its update rules on this graph."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.models.deepseek_v41.load import load_model
from headrace.train.anticipatory import RollbackSettings
from headrace.train.export import export_masters
from headrace.train.graph import Document, GraphOptions, TrainGraph
from headrace.train.loop import Trainer
from headrace.train.masters import Masters
from headrace.train.recipe import LossSettings, Phase, Recipe, StabilitySettings
from headrace.train.recipes.tiny_v4 import tiny_v4
from headrace.train.schedule import Constant, LearningRate, Staircase, Warmup
from tests.traces import same_bits
from tests.train.graphs import token_ids
from tests.train.small_recipe import new_trainer, small_recipe
from tests.train.test_loop import changed, copy_of, steps

WARM_UP, SPARSE = 3, 33
INDEXER = ".attn.indexer."
OPTIONS = GraphOptions()
SLOTS = 5e-6  # float32 sums over other numbers of slots, most of them empty


def v4_recipe(sparse_start: int = SPARSE) -> Recipe:
    """Return the stages of tiny-v4, a few steps each, on three layers."""
    recipe = small_recipe()
    assert recipe.model is not None
    dense, warm_up, sparse = tiny_v4().phases
    return replace(
        recipe,
        family="v4",
        model=replace(recipe.model, candidate_source=None),
        duration=sparse_start + 2,
        learning_rate=LearningRate(warmup=Warmup(steps=1), parts=(Constant(value=1e-2, until=1),)),
        sequence_length=Staircase(starts=(0,), values=(45,)),
        losses=LossSettings(index_rows=None, index_pool="picked"),
        phases=(dense, replace(warm_up, start=WARM_UP), replace(sparse, start=sparse_start)),
        stability=StabilitySettings(rollback=RollbackSettings(snapshot_every=4)),
    )


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    """Return a run that the tests below take through its stages in their order."""
    return new_trainer(v4_recipe())


def graph_of(trainer: Trainer, phase: Phase) -> TrainGraph:
    return trainer._graph(phase)


def hidden(graph: TrainGraph, seed: int = 3) -> torch.Tensor:
    with torch.no_grad():
        return graph.forward(
            [Document(token_ids(45, seed, 0, 20)), Document(token_ids(9, 8, 0, 20))], OPTIONS
        ).hidden_TD


def with_another_indexer(graph: TrainGraph) -> TrainGraph:
    """Return the same model with noise for the indexer's parameters."""
    parameters = {
        name: torch.nn.Parameter(torch.randn_like(value)) if INDEXER in name else value
        for name, value in graph.masters.parameters.items()
    }
    return TrainGraph(Masters(graph.config, parameters, graph.masters.buffers), graph.addressing)


def test_dense_attention_sees_every_visible_entry_whatever_the_indexer_says(trainer: Trainer) -> None:
    dense = graph_of(trainer, v4_recipe().phases[0])
    output = dense.forward([Document(token_ids(45, 3, 0, 20))], OPTIONS)
    for source, ratio in ((0, 2), (1, 1), (2, 1)):
        for position, picked in enumerate(output.published[source][0]):
            visible = (position + 1) // ratio
            assert sorted(picked[picked >= 0].tolist()) == list(range(visible))
    assert same_bits(hidden(with_another_indexer(dense)), hidden(dense))
    wide = TrainGraph(
        Masters(replace(dense.config, index_topk=64), dense.masters.parameters, dense.masters.buffers), None
    )
    torch.testing.assert_close(hidden(wide), hidden(dense), rtol=0, atol=SLOTS)
    sparse = graph_of(trainer, v4_recipe().phases[2])
    assert not torch.equal(hidden(with_another_indexer(sparse)), hidden(sparse))
    assert not torch.equal(hidden(sparse), hidden(dense))


def test_the_dense_stage_moves_everything_but_the_indexer(trainer: Trainer) -> None:
    before = copy_of(trainer).tensors
    records = [trainer.step() for _ in range(WARM_UP)]
    masters = {name for name in before if name.startswith("master/")}
    moved = changed(before, trainer.snapshot().tensors) & masters
    assert moved == {name for name in masters if INDEXER not in name}
    assert [record.index_loss for record in records] == [None] * WARM_UP
    assert not any(INDEXER in name for name in trainer.state.optimizer.owners)


def test_the_warm_up_moves_the_indexer_alone_and_its_loss_falls(trainer: Trainer) -> None:
    """Nothing else changes by a bit: no weight decay, no routing bias, no place of anything but the data."""
    assert trainer.position.steps == WARM_UP
    before = copy_of(trainer).tensors
    records = [trainer.step() for _ in range(SPARSE - WARM_UP)]
    after = trainer.snapshot().tensors
    kept = {name for name in before if name.startswith(("master/", "buffer/"))}
    assert changed(before, after) & kept == {name for name in kept if INDEXER in name}
    assert [name for name in after if name.startswith("optimizer/") and INDEXER not in name] == []
    assert all(record.index_shares["kept"] == pytest.approx(1.0) for record in records), "attention is still dense"
    losses = [record.index_loss or 0.0 for record in records]
    assert np.mean(losses[-3:]) < 0.7 * np.mean(losses[:3])


def test_the_sparse_stage_moves_both(trainer: Trainer) -> None:
    assert trainer.position.steps == SPARSE
    before = copy_of(trainer).tensors
    record = trainer.step()
    masters = {name for name in before if name.startswith("master/")}
    assert changed(before, trainer.snapshot().tensors) & masters == masters
    assert record.index_loss
    assert record.index_shares["kept"] < 0.99, "attention picks now"


def test_queries_are_whole_matrices_and_embeddings_adamws(trainer: Trainer) -> None:
    owners = trainer.state.optimizer.owners
    assert owners.keys() == trainer.masters.parameters.keys()
    assert {owners[name].update for name in ("embed.weight", "head.weight")} == {"adamw"}
    assert [(owners["embed.weight"].decay, owners["layers.1.attn.wq_b.weight"].matrices)] == [(0.1, 1)]
    assert not any(owner.update == "sinkhorn" for owner in owners.values())


@pytest.mark.parametrize("cut", [3, 4, 6, 7])
def test_a_run_resumes_bit_for_bit_at_the_borders_of_stages(cut: int) -> None:
    recipe = v4_recipe(sparse_start=6)
    whole, part = new_trainer(recipe), new_trainer(recipe)
    steps(whole, 8)
    steps(part, cut)
    resumed = new_trainer(recipe)
    resumed.restore(copy_of(part))
    steps(resumed, 8 - cut)
    assert changed(whole.snapshot().tensors, resumed.snapshot().tensors) == set()


def test_its_checkpoint_is_served(trainer: Trainer, tmp_path: Path) -> None:
    export_masters(trainer.masters, tmp_path / "out", None)
    assert load_model(tmp_path / "out").model.config.candidate_source is None


def test_the_recipe_has_the_stages_and_answers_spikes() -> None:
    recipe = tiny_v4()
    assert [(phase.attention, phase.trains) for phase in recipe.phases] == [
        ("dense", "backbone"),
        ("dense", "indexer"),
        ("sparse", "all"),
    ]
    assert recipe.stability is not None
    assert recipe.model is not None
    assert (recipe.model.engram, recipe.model.candidate_source) == (None, None)
    config, length = recipe.model, recipe.sequence_length.values[1]
    assert recipe.sequence_length.starts[1] == recipe.phases[1].start
    assert length > config.window + max(config.compress_ratios) * config.index_topk, "rows see more than they pick"
