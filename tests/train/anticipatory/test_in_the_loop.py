"""A spike in a run: seen by the detector, answered by going back, anticipated steps, and then live ones again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.core.errors import UserError
from headrace.train.anticipatory import DetectorSettings, RollbackSettings
from headrace.train.loop import StepRecord, Trainer
from headrace.train.recipe import Phase, Recipe, StabilitySettings
from headrace.train.run import train
from headrace.train.save import RunFolder
from headrace.train.schedule import BatchRamp, Constant, LearningRate, Staircase, Warmup
from tests.train.small_recipe import new_trainer, small_recipe
from tests.train.test_loop import changed, copy_of, steps

SPIKE, DURATION = 9, 16
STABILITY = StabilitySettings(
    delta=2,
    detector=DetectorSettings(min_history=4, grad_limit=5.0),
    rollback=RollbackSettings(snapshot_every=4, settle=1, anticipate_steps=5),
)


def recipe(**changes: object) -> Recipe:
    """Return sixteen steps that answer spikes; snapshots after every fourth."""
    recipe = small_recipe(
        duration=DURATION,
        phases=(Phase(),),
        stability=STABILITY,
        sequence_length=Staircase(starts=(0,), values=(27,)),
        batch=BatchRamp(first=54, last=54, until=0),
    )
    return replace(recipe, **changes)  # type: ignore[arg-type]


def corrupt(trainer: Trainer) -> None:
    """Spoil a weight in memory, as a bad chip would: finite, and enough for gradients many times as large."""
    with torch.no_grad():
        trainer.masters.parameters["head.weight"].mul_(50.0)


def run_with_a_spike(trainer: Trainer, last_step: int = DURATION) -> list[StepRecord]:
    """Take steps to `last_step`, spoilt once before step `SPIKE`, and past the rollback that follows."""
    steps(trainer, SPIKE - 1)
    corrupt(trainer)
    records = [trainer.step()]
    while trainer.position.steps < last_step:
        records.append(trainer.step())
    return records


def test_a_spike_leads_back_to_a_snapshot_through_anticipated_steps_to_live_ones() -> None:
    trainer = new_trainer(recipe())
    records = run_with_a_spike(trainer)
    assert (records[0].step, records[0].went_back_to, records[0].is_anticipated) == (SPIKE, 8, False)
    assert records[0].grad_norm > 5 * records[1].grad_norm, "the spike was real"
    assert [record.step for record in records[1:]] == list(range(9, 17))
    assert [record.is_anticipated for record in records[1:]] == [True] * 5 + [False] * 3
    assert not any(record.is_skipped or record.went_back_to for record in records[1:])


def test_what_was_spoilt_leaves_no_trace() -> None:
    """The steps after going back are those of a run that goes back for no reason at all."""
    spoilt, twin = new_trainer(recipe()), new_trainer(recipe())
    run_with_a_spike(spoilt, SPIKE - 1)
    steps(twin, SPIKE - 1)
    assert changed(twin.snapshot().tensors, spoilt.snapshot().tensors) == set()


def test_anticipated_steps_are_other_steps_and_the_same_ones_every_time() -> None:
    first, second, quiet = (new_trainer(recipe()) for _ in range(3))
    run_with_a_spike(first)
    run_with_a_spike(second)
    steps(quiet, DURATION)
    assert changed(first.snapshot().tensors, second.snapshot().tensors) == set()
    assert first.snapshot().plain == second.snapshot().plain
    assert "master/embed.weight" in changed(quiet.snapshot().tensors, first.snapshot().tensors)


@pytest.mark.parametrize("cut", [10, 13])
def test_a_run_that_stops_after_a_spike_goes_on_with_the_same_bits_from_disk(tmp_path: Path, cut: int) -> None:
    """Cuts lie within the anticipated steps 9 to 13 and at their end."""
    whole, part = new_trainer(recipe()), new_trainer(recipe())
    run_with_a_spike(whole)
    run_with_a_spike(part, cut)
    folder = RunFolder(tmp_path, is_resumed=False)
    folder.save(part.snapshot(), lambda out: out.mkdir())
    resumed = new_trainer(recipe())
    resumed.restore(folder.load())
    folder.close()
    assert changed(part.snapshot().tensors, resumed.snapshot().tensors) == set()
    steps(resumed, DURATION - cut)
    assert changed(whole.snapshot().tensors, resumed.snapshot().tensors) == set()


def test_a_spike_after_resuming_goes_back_as_far_as_without() -> None:
    """Alarms need two good steps after a snapshot here, so the run goes back behind the place it resumed from."""
    stability = replace(STABILITY, rollback=replace(STABILITY.rollback, settle=2))
    whole, part = (new_trainer(recipe(stability=stability)) for _ in range(2))
    steps(whole, SPIKE - 1)
    steps(part, SPIKE - 1)
    resumed = new_trainer(recipe(stability=stability))
    resumed.restore(copy_of(part))
    for trainer in (whole, resumed):
        corrupt(trainer)
    assert [trainer.step().went_back_to for trainer in (whole, resumed)] == [4, 4]
    steps(whole, 3)
    steps(resumed, 3)
    assert changed(whole.snapshot().tensors, resumed.snapshot().tensors) == set()


def test_a_rate_that_spoils_the_run_every_time_ends_it_in_a_sentence(tmp_path: Path) -> None:
    """A step of the schedule is far too long; going back cannot help, and the checkpoint before it stays."""
    bad = (Constant(value=5e-3, until=8), Constant(value=50.0, until=9), Constant(value=5e-3, until=10))
    spoilt = recipe(learning_rate=LearningRate(warmup=Warmup(steps=0), parts=bad))
    heard: list[StepRecord] = []

    class Listener:
        def on_start(self, _summary: object) -> None:
            """Hear nothing."""

        def on_step(self, record: StepRecord, _pace: object) -> None:
            heard.append(record)

        def on_evaluation(self, _evaluation: object) -> None:
            pass

        def on_saved(self, _checkpoint: Path) -> None:
            pass

    with pytest.raises(UserError, match=r"get past a spike at step \d+ \(a value is nan\); a lower learning rate"):
        train(spoilt, tmp_path, Listener())
    assert [record.went_back_to for record in heard if record.went_back_to is not None]
    assert any(record.is_anticipated for record in heard)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000008"], "the last one before the bad step"
