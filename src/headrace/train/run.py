"""One run from its folder to its last checkpoint: start or resume, step, judge, save, stop when asked.

`Trainer` computes, `RunFolder` keeps, the metrics go to their files and the lines to whoever watches.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.core.errors import UserError
from headrace.train.allocator import keep_freed_memory
from headrace.train.evaluate import Evaluation
from headrace.train.export import export_masters
from headrace.train.loop import StepRecord, Trainer
from headrace.train.mixture import gather_material
from headrace.train.progress import MetricsFile, MetricsSink, Pace, TensorBoardFile
from headrace.train.recipe import Recipe
from headrace.train.recipe_json import difference, to_json
from headrace.train.save import METRICS_NAME, RECIPE_NAME, TENSORBOARD_NAME, RunFolder, Snapshot
from headrace.train.schedule import Position
from headrace.train.summary import summarise


class Watcher(Protocol):
    """Whoever wants to know how a run goes."""

    def on_step(self, record: StepRecord, pace: Pace) -> None:
        """Hear of a step."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Hear of figures."""

    def on_saved(self, checkpoint: Path) -> None:
        """Hear of a complete checkpoint."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: steps done, its newest checkpoint, the last figures, and whether the recipe is done."""

    step: int
    checkpoint: Path
    evaluation: Evaluation | None
    is_done: bool


def train(
    recipe: Recipe,
    out: Path,
    watcher: Watcher,
    *,
    is_resumed: bool = False,
    last_step: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Carry out a recipe in a folder.

    Args:
        recipe: what to do.
        out: the run's folder, see `save.py`.
        watcher: hears of steps, figures and checkpoints.
        is_resumed: go on with the run in the folder.
        last_step: stop after this step, although the recipe goes on; it can be resumed.
        should_stop: asked after every step; the run then saves and ends.

    Raises:
        UserError: the recipe, its text, the folder or the state in it is refused. Checkpoints stay as they are.
    """
    if recipe.obstacle is not None:
        raise UserError(f"recipe {recipe.name!r} cannot be run here: {recipe.obstacle}.", param="recipe")
    keep_freed_memory()
    folder = RunFolder(out, is_resumed=is_resumed)
    sinks: list[MetricsSink] = []
    try:
        snapshot = folder.load() if is_resumed else None
        trainer = _trainer(recipe, folder, snapshot)
        resumed_step = None if snapshot is None else snapshot.step
        sinks.append(MetricsFile(folder.path / METRICS_NAME, resumed_step=resumed_step))
        if TensorBoardFile.is_available():
            sinks.append(TensorBoardFile(folder.path / TENSORBOARD_NAME, resumed_step=resumed_step))
        for sink in sinks:
            sink.write({"type": "start", "step": trainer.position.steps, **summarise(trainer)})
        return _Run(trainer, folder, watcher, sinks).until(last_step, should_stop)
    finally:
        for sink in sinks:
            sink.close()
        folder.close()


def _trainer(recipe: Recipe, folder: RunFolder, snapshot: Snapshot | None) -> Trainer:
    document = to_json(recipe)
    if snapshot is None:
        trainer = Trainer(recipe, gather_material(recipe))
        folder.write_json(RECIPE_NAME, document)
        return trainer
    changed = difference(document, snapshot.plain["recipe"])
    if changed:
        raise UserError(
            f"the run in {folder.path} was started with another recipe: {changed}; the same one is accepted.",
            param="recipe",
        )
    trainer = Trainer(recipe, gather_material(recipe, snapshot.plain["tokenizer"]))
    trainer.restore(snapshot)
    return trainer


class _Run:
    """A run while its process lives; owns the latest figures."""

    def __init__(self, trainer: Trainer, folder: RunFolder, watcher: Watcher, sinks: list[MetricsSink]) -> None:
        self._trainer, self._folder, self._watcher, self._sinks = trainer, folder, watcher, sinks
        self._document = to_json(trainer.recipe)
        self._evaluation: Evaluation | None = None

    def until(self, last_step: int | None, should_stop: Callable[[], bool]) -> Outcome:
        trainer, recipe = self._trainer, self._trainer.recipe
        began, first = time.monotonic(), trainer.position
        has_stopped = should_stop()
        while not (trainer.is_done or has_stopped or (last_step is not None and trainer.position.steps >= last_step)):
            record = trainer.step()
            pace = self._pace(first, time.monotonic() - began)
            self._write("step", asdict(record) | {"tokens_per_second": pace.tokens_per_second})
            self._watcher.on_step(record, pace)
            has_stopped = should_stop()
            if record.went_back_to is not None:
                self._save()
                self._folder.discard_after(record.went_back_to)
            elif not has_stopped and not trainer.is_done:
                if _is_due(recipe.evaluation.every, record.step):
                    self._evaluate()
                if _is_due(recipe.saving.every, record.step):
                    self._save()
        if trainer.is_done:
            self._evaluate()
        return Outcome(trainer.position.steps, self._save(), self._evaluation, trainer.is_done)

    def _pace(self, first: Position, seconds: float) -> Pace:
        recipe, position = self._trainer.recipe, self._trainer.position
        done, before = position.in_unit(recipe.unit), first.in_unit(recipe.unit)
        return Pace(
            share=min(1.0, done / recipe.duration),
            share_here=(done - before) / recipe.duration,
            step=position.steps,
            last_step=recipe.duration if recipe.unit == "steps" else None,
            tokens=position.tokens,
            tokens_here=position.tokens - first.tokens,
            seconds=seconds,
        )

    def _evaluate(self) -> None:
        self._evaluation = self._trainer.evaluate()
        self._write("evaluation", {"step": self._evaluation.step, **self._evaluation.values})
        self._watcher.on_evaluation(self._evaluation)

    def _save(self) -> Path:
        trainer, material = self._trainer, self._trainer.material
        state = trainer.snapshot()
        plain = {**state.plain, "recipe": self._document, "tokenizer": material.tokenizer}
        tokenizer = None if material.tokenizer is None else material.tokenizer.encode()
        before = self._folder.checkpoints()
        checkpoint = self._folder.save(
            Snapshot(state.step, state.tensors, plain),
            lambda out: export_masters(trainer.masters, out, tokenizer),
            trainer.recipe.saving.keep,
        )
        if checkpoint not in before:
            self._watcher.on_saved(checkpoint)
        return checkpoint

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.write({"type": kind, **values})


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
