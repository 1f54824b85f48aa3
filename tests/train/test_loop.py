"""A run in memory: what a step changes, what it leaves alone, and that nothing but the recipe decides its bits."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.train.anticipatory import RollbackSettings
from headrace.train.data.packing import IGNORE
from headrace.train.loop import Trainer
from headrace.train.optim.optimizer import StepReport
from headrace.train.recipe import LossSettings, Phase, StabilitySettings
from headrace.train.save import Snapshot
from tests.train.small_recipe import new_trainer, small_recipe


def copy_of(trainer: Trainer) -> Snapshot:
    """Return a snapshot that later steps leave alone."""
    found = trainer.snapshot()
    return Snapshot(found.step, {name: value.clone() for name, value in found.tensors.items()}, found.plain)


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    """Return the names of tensors that are not the same bits."""
    return {name for name in after if name not in before or not torch.equal(before[name], after[name])}


def steps(trainer: Trainer, count: int) -> None:
    """Take some steps."""
    for _ in range(count):
        trainer.step()


def test_the_same_recipe_gives_the_same_bits_twice() -> None:
    first, second = new_trainer(small_recipe()), new_trainer(small_recipe())
    steps(first, 9)
    steps(second, 9)
    assert first.is_done
    assert changed(first.snapshot().tensors, second.snapshot().tensors) == set()


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 6, 8])
def test_a_resumed_run_gives_the_bits_of_an_uninterrupted_one(cut: int) -> None:
    """Cuts lie inside phases, at their borders, and where rows grow."""
    whole, part = new_trainer(small_recipe()), new_trainer(small_recipe())
    steps(whole, 9)
    steps(part, cut)
    resumed = new_trainer(small_recipe())
    resumed.restore(copy_of(part))
    steps(resumed, 9 - cut)
    assert changed(whole.snapshot().tensors, resumed.snapshot().tensors) == set()
    assert whole.snapshot().plain == resumed.snapshot().plain


def test_a_phase_has_shares_of_its_own() -> None:
    tasks = tuple(
        replace(task, options={**task.options, "name": name}) for name in "ab" for task in small_recipe().tasks
    )
    trainer = new_trainer(
        small_recipe(tasks=tasks, phases=(Phase(shares={"b": 0.0}), Phase(start=1, shares={"a": 0.0})))
    )
    assert [set(trainer.step().loss_by_kind) for _ in range(2)] == [{"a"}, {"b"}]
    with pytest.raises(UserError, match="no kind 'c'"):
        new_trainer(small_recipe(tasks=tasks, phases=(Phase(shares={"c": 1.0}),)))


def test_a_phase_can_see_less_of_the_window() -> None:
    """The step is that of a model with the smaller window, and of no other."""
    narrow = small_recipe(phases=(Phase(window=2),))
    model = narrow.model
    assert model is not None
    same, wide = (new_trainer(small_recipe(phases=(Phase(),), model=replace(model, window=w))) for w in (2, 4))
    first = new_trainer(narrow)
    steps(first, 2)
    steps(same, 2)
    steps(wide, 2)
    assert changed(first.snapshot().tensors, same.snapshot().tensors) == set()
    assert changed(first.snapshot().tensors, wide.snapshot().tensors)
    with pytest.raises(UserError, match="window 5"):
        small_recipe(phases=(Phase(window=5),))


def test_another_seed_gives_other_bits() -> None:
    first, second = new_trainer(small_recipe()), new_trainer(small_recipe(seed=1))
    steps(first, 1)
    steps(second, 1)
    assert "master/embed.weight" in changed(first.snapshot().tensors, second.snapshot().tensors)


def test_a_step_moves_every_parameter_and_the_biases_of_layers_with_unequal_loads() -> None:
    trainer = new_trainer(small_recipe())
    before = copy_of(trainer).tensors
    record = trainer.step()
    moved = changed(before, trainer.snapshot().tensors)
    assert {name for name in before if name.startswith("master/")} <= moved
    assert record.busiest > 0
    assert "buffer/layers.1.ffn.gate.bias" in moved
    assert "buffer/layers.1.ffn.gate.bias_vl" not in moved, "there are no image tokens"
    assert (record.step, record.tokens, trainer.position.steps) == (1, record.num_tokens, 1)


def test_passes_of_any_size_give_the_same_gradients() -> None:
    """Numerators add up and are divided once, so how a batch is cut into passes does not matter."""
    losses = LossSettings(index_rows=None)
    whole, parts = (new_trainer(small_recipe(micro_batch=size, losses=losses)) for size in (1000, 27))
    one, two = whole.step(), parts.step()
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    assert two.index_loss == pytest.approx(one.index_loss, rel=1e-5)
    assert two.balance_loss == pytest.approx(one.balance_loss, rel=1e-6)
    for name, parameter in whole.masters.parameters.items():
        assert parameter.grad is not None
        torch.testing.assert_close(parts.masters.parameters[name].grad, parameter.grad, rtol=2e-4, atol=2e-6)


def test_a_loss_that_is_not_finite_changes_nothing_but_the_place_in_the_data() -> None:
    trainer, spoilt = new_trainer(small_recipe()), new_trainer(small_recipe())
    steps(trainer, 2)
    steps(spoilt, 2)
    good = spoilt.masters.parameters["head.weight"].detach().clone()
    with torch.no_grad():
        spoilt.masters.parameters["head.weight"][0, 0] = float("nan")
    before = copy_of(spoilt).tensors
    assert spoilt.step().is_skipped
    assert changed(before, spoilt.snapshot().tensors) - {"master/head.weight"} == set()
    assert spoilt.state.num_skipped == 1
    with torch.no_grad():
        spoilt.masters.parameters["head.weight"].copy_(good)
    assert changed(before, spoilt.snapshot().tensors) == {"master/head.weight"}
    assert not spoilt.step().is_skipped
    assert spoilt.position.steps == 4


def test_a_gradient_that_is_not_finite_skips_the_whole_step() -> None:
    trainer = new_trainer(small_recipe())
    trainer.masters.parameters["layers.1.ffn.experts.w2"].register_hook(lambda gradient: gradient * float("inf"))
    before = copy_of(trainer).tensors
    record = trainer.step()
    assert record.is_skipped
    assert changed(before, trainer.snapshot().tensors) == set()


def test_parameters_held_at_zero_stay_there() -> None:
    trainer = new_trainer(small_recipe(held_at_zero=("layers.*.attn.compressor.norm.weight",)))
    steps(trainer, 4)
    for layer_id in (0, 1):
        assert not trainer.masters.parameters[f"layers.{layer_id}.attn.compressor.norm.weight"].any()


def test_without_an_index_loss_the_indexer_stays_where_it_is() -> None:
    trainer = new_trainer(small_recipe(losses=LossSettings(index=0.0), phases=(Phase(),)))
    before = copy_of(trainer).tensors
    assert trainer.step().index_loss is None
    moved = changed(before, trainer.snapshot().tensors)
    assert moved
    assert [name for name in moved if ".indexer." in name] == []


def test_a_phase_that_trains_the_indexer_moves_nothing_else() -> None:
    """Attention is dense in it, and there is a choice to teach all the same."""
    trainer = new_trainer(small_recipe())
    steps(trainer, 3)
    before = copy_of(trainer).tensors
    record = trainer.step()
    assert record.index_loss
    assert record.index_shares["kept"] == pytest.approx(1.0), "dense attention picks everything"
    gradient = trainer.masters.parameters["layers.0.attn.indexer.wk.weight"].grad
    assert gradient is not None
    assert gradient.any()
    moved = {name for name in changed(before, trainer.snapshot().tensors) if name.startswith("master/")}
    assert moved == {name for name in before if name.startswith("master/") and ".indexer." in name}


def test_a_parameter_of_a_phase_without_gradient_gets_zeros_and_no_error() -> None:
    """Rows too short for the index loss leave the indexer without a gradient."""
    recipe = small_recipe(phases=(Phase(),))
    assert recipe.model is not None
    recipe = replace(recipe, model=replace(recipe.model, index_topk=32, candidate_blocks=20))
    trainer = new_trainer(recipe)
    assert not trainer.step().is_skipped


def test_candidates_and_replay_change_what_a_step_computes() -> None:
    plain = new_trainer(small_recipe(phases=(Phase(),))).step()
    pooled = new_trainer(small_recipe(phases=(Phase(has_candidates=True),))).step()
    replayed = new_trainer(small_recipe(phases=(Phase(replay="last-turn", exact_share=0.0),))).step()
    assert pooled.index_shares["pool"] < plain.index_shares["pool"]
    assert replayed.loss != plain.loss


def test_recomputation_changes_no_bit() -> None:
    first, second = new_trainer(small_recipe()), new_trainer(small_recipe(has_recomputation=True))
    steps(first, 2)
    steps(second, 2)
    assert changed(first.snapshot().tensors, second.snapshot().tensors) == set()


@pytest.mark.parametrize(
    "part", ["master/norm.weight", "buffer/layers.0.ffn.gate.bias", "optimizer/norm.weight/adamw.mean"]
)
def test_a_state_without_a_part_is_refused_by_name(part: str) -> None:
    trainer = new_trainer(small_recipe())
    found = copy_of(trainer)
    tensors = {name: value for name, value in found.tensors.items() if name != part}
    with pytest.raises(UserError, match=part.partition("/")[2]):
        new_trainer(small_recipe()).restore(Snapshot(found.step, tensors, found.plain))


def test_the_probe_asks_only_where_it_has_labels() -> None:
    trainer = new_trainer(small_recipe())
    batch = trainer.material.stream.next_batch(0, 27, 3)
    assert int((batch.labels != IGNORE).sum()) == 3 * 7


def spike_at(trainer: Trainer, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the gradients of one step not finite, the first time it is taken."""
    real, done = trainer.state.optimizer.step, []

    def move(rate: float) -> StepReport:
        if trainer.position.steps == step and not done:
            done.append(step)
            return StepReport(grad_norm=float("inf"), factor=0.0, is_skipped=True)
        return real(rate)

    monkeypatch.setattr(trainer.state.optimizer, "step", move)


STABLE = StabilitySettings(delta=2, rollback=RollbackSettings(snapshot_every=2, settle=1, anticipate_steps=3))


def test_a_spike_sends_the_run_back_and_experts_are_then_chosen_early(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer(small_recipe(stability=STABLE, phases=(Phase(),)))
    spike_at(trainer, 5, monkeypatch)
    records = [trainer.step() for _ in range(6)]
    assert [record.went_back_to for record in records] == [None] * 5 + [4]
    assert not any(record.is_anticipated for record in records)
    assert trainer.position.steps == 4
    after = [trainer.step() for _ in range(5)]
    assert [record.step for record in after] == [5, 6, 7, 8, 9]
    assert [record.is_anticipated for record in after] == [True, True, True, False, False]
    assert [record.num_tokens for record in after[:1]] == [records[4].num_tokens], "the same batch again"


def test_going_back_restores_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipe(stability=STABLE, phases=(Phase(),))
    plain, hurt = new_trainer(recipe), new_trainer(recipe)
    steps(plain, 4)
    spike_at(hurt, 5, monkeypatch)
    steps(hurt, 6)
    assert changed(plain.snapshot().tensors, hurt.snapshot().tensors) == set()


def test_waiting_batches_do_not_change_a_run() -> None:
    with_queue, without = new_trainer(small_recipe(stability=STABLE)), new_trainer(small_recipe())
    steps(with_queue, 7)
    steps(without, 7)
    found = changed(without.snapshot().tensors, with_queue.snapshot().tensors)
    assert {name for name in found if not name.startswith("kept/")} == set()


@pytest.mark.parametrize("cut", [4, 5, 7, 8])
def test_a_run_that_anticipates_resumes_bit_for_bit(monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    recipe = small_recipe(stability=STABLE, phases=(Phase(), Phase(start=6, replay="every-turn")))
    whole, part = new_trainer(recipe), new_trainer(recipe)
    for trainer in (whole, part):
        spike_at(trainer, 5, monkeypatch)
        steps(trainer, 6)
    steps(whole, 5)
    steps(part, cut - 4)
    resumed = new_trainer(recipe)
    resumed.restore(copy_of(part))
    steps(resumed, 9 - cut)
    assert changed(whole.snapshot().tensors, resumed.snapshot().tensors) == set()


def test_a_run_that_does_not_get_past_a_spike_gives_up_in_a_sentence() -> None:
    trainer = new_trainer(small_recipe(stability=STABLE, phases=(Phase(),)))
    steps(trainer, 3)
    trainer.masters.parameters["norm.weight"].register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(UserError, match="does not get past a spike"):
        steps(trainer, 20)
