"""One run from its folder to its last checkpoint: start or resume, step, judge, save, stop when asked.

`Trainer` or `DraftLoop` computes, `RunFolder` keeps, the metrics go to their files and the lines to whoever watches.
"""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from headrace.core.errors import InternalError, UserError
from headrace.train.allocator import keep_freed_memory
from headrace.train.backbone import load_backbone
from headrace.train.draft_loop import DraftLoop, DraftRecord
from headrace.train.draft_recipe import DraftRecipe
from headrace.train.evaluate import Evaluation
from headrace.train.export import export_masters
from headrace.train.loop import StepRecord, Trainer
from headrace.train.mixture import gather_material
from headrace.train.progress import MetricsFile, MetricsSink, Pace, TensorBoardFile
from headrace.train.recipe import Recipe
from headrace.train.recipe_json import difference, to_json
from headrace.train.save import METRICS_NAME, RECIPE_NAME, TENSORBOARD_NAME, RunFolder, Snapshot
from headrace.train.schedule import Position
from headrace.train.summary import kernels_in_use, summarise


class Watcher(Protocol):
    """Whoever wants to know how a run goes."""

    def on_start(self, summary: Mapping[str, Any]) -> None:
        """Hear what the run says of itself before its first step, see `summary.py`."""

    def on_step(self, record: StepRecord | DraftRecord, pace: Pace) -> None:
        """Hear of a step."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Hear of figures."""

    def on_proof(self, when: str, digest: str) -> None:
        """Hear the hash of a frozen backbone, "before" the first step and "after" the last."""

    def on_saved(self, checkpoint: Path) -> None:
        """Hear of a complete checkpoint."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: steps done, its newest checkpoint, the last figures, and whether the recipe is done."""

    step: int
    checkpoint: Path
    evaluation: Evaluation | None
    is_done: bool


class _Work(Protocol):
    """What a run carries out: `Trainer`, or `DraftLoop`."""

    @property
    def recipe(self) -> Recipe | DraftRecipe:
        """Duration, and when to look and save."""

    @property
    def position(self) -> Position:
        """How far the run is."""

    @property
    def is_done(self) -> bool:
        """Whether the recipe's duration is over."""

    def step(self) -> StepRecord | DraftRecord:
        """Take one step."""

    def evaluate(self) -> Evaluation:
        """Judge the state as it is."""

    def snapshot(self) -> Snapshot:
        """Return the whole state."""


@dataclass(frozen=True)
class _Job:
    """Work, how its checkpoint is written, its vocabulary, what to note at the start, and the hash of what stays."""

    work: _Work
    export: Callable[[Path], None]
    tokenizer: str | None
    summary: dict[str, Any]
    prove: Callable[[], str] | None = None


def train(
    recipe: Recipe | DraftRecipe,
    out: Path,
    watcher: Watcher,
    *,
    backbone: Path | None = None,
    is_resumed: bool = False,
    last_step: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Carry out a recipe in a folder.

    Args:
        recipe: what to do.
        out: the run's folder, see `save.py`.
        watcher: hears of steps, figures and checkpoints.
        backbone: of a draft recipe: a checkpoint folder or a run's folder. None, for a run that is resumed, takes the
            one it was started on.
        is_resumed: go on with the run in the folder.
        last_step: stop after this step, although the recipe goes on; it can be resumed.
        should_stop: asked after every step; the run then saves and ends.

    Raises:
        UserError: the recipe, its text, the folder or the state in it is refused. Checkpoints stay as they are.
    """
    _check_backbone(recipe, backbone, is_resumed=is_resumed)
    if isinstance(recipe, Recipe) and recipe.obstacle is not None:
        raise UserError(f"recipe {recipe.name!r} cannot be run here: {recipe.obstacle}.", param="recipe")
    keep_freed_memory()
    folder = RunFolder(out, is_resumed=is_resumed)
    sinks: list[MetricsSink] = []
    try:
        snapshot = folder.load() if is_resumed else None
        if snapshot is not None:
            _check_same(recipe, folder, snapshot)
        job = _job(recipe, snapshot, backbone)
        kernels = {"kernels": kernels_in_use()}
        if snapshot is not None:
            kernels["kernels_before"] = snapshot.plain.get("kernels", kernels["kernels"])
        job = replace(job, summary={**job.summary, **kernels})
        if snapshot is None:
            folder.write_json(RECIPE_NAME, to_json(recipe))
        resumed_step = None if snapshot is None else snapshot.step
        sinks.append(MetricsFile(folder.path / METRICS_NAME, resumed_step=resumed_step))
        if TensorBoardFile.is_available():
            sinks.append(TensorBoardFile(folder.path / TENSORBOARD_NAME, resumed_step=resumed_step))
        for sink in sinks:
            sink.write({"type": "start", "step": job.work.position.steps, **job.summary})
        watcher.on_start(job.summary)
        gc.freeze()  # what is there now stays; looking through it again and again took a twentieth of a step
        return _Run(job, folder, watcher, sinks).until(last_step, should_stop)
    finally:
        for sink in sinks:
            sink.close()
        folder.close()


def _check_backbone(recipe: Recipe | DraftRecipe, backbone: Path | None, *, is_resumed: bool) -> None:
    """Refuse a draft without a backbone, and a backbone without a draft."""
    if isinstance(recipe, DraftRecipe):
        if backbone is None and not is_resumed:
            raise UserError(
                f"recipe {recipe.name!r} trains a draft module and --backbone is missing; a checkpoint folder or the "
                "folder of a run is accepted.",
                param="backbone",
            )
    elif backbone is not None:
        raise UserError(
            f"recipe {recipe.name!r} trains a whole model and takes no --backbone {backbone}; a draft recipe is "
            "accepted with one.",
            param="backbone",
        )


def _check_same(recipe: Recipe | DraftRecipe, folder: RunFolder, snapshot: Snapshot) -> None:
    changed = difference(to_json(recipe), snapshot.plain["recipe"])
    if changed:
        raise UserError(
            f"the run in {folder.path} was started with another recipe: {changed}; the same one is accepted.",
            param="recipe",
        )


def _job(recipe: Recipe | DraftRecipe, snapshot: Snapshot | None, backbone: Path | None) -> _Job:
    if isinstance(recipe, DraftRecipe):
        return _draft_job(recipe, snapshot, backbone)
    trainer = Trainer(recipe, gather_material(recipe, None if snapshot is None else snapshot.plain["tokenizer"]))
    if snapshot is not None:
        trainer.restore(snapshot)
    tokenizer = trainer.material.tokenizer
    content = None if tokenizer is None else tokenizer.encode()
    return _Job(trainer, lambda out: export_masters(trainer.masters, out, content), tokenizer, summarise(trainer))


def _draft_job(recipe: DraftRecipe, snapshot: Snapshot | None, backbone: Path | None) -> _Job:
    """Load the backbone that is named, or the one that the run was started on."""
    if backbone is None and snapshot is not None:
        backbone = Path(snapshot.plain["backbone"])
        if not backbone.is_dir():
            raise UserError(
                f"the backbone {backbone} that the run was started on is gone; --backbone with its new place is "
                "accepted.",
                param="backbone",
            )
    if backbone is None:
        raise InternalError("a draft run was started without a backbone")
    loaded = load_backbone(backbone, recipe.numerics)
    loop = DraftLoop(recipe, loaded, None if snapshot is None else snapshot.plain["data"])
    if snapshot is not None:
        loop.restore(snapshot)
    return _Job(loop, loop.export, loop.backbone.tokenizer, loop.summary(), loop.prove)


class _Run:
    """A run while its process lives; owns the latest figures."""

    def __init__(self, job: _Job, folder: RunFolder, watcher: Watcher, sinks: list[MetricsSink]) -> None:
        self._job, self._work = job, job.work
        self._folder, self._watcher, self._sinks = folder, watcher, sinks
        self._document = to_json(job.work.recipe)
        self._evaluation: Evaluation | None = None

    def until(self, last_step: int | None, should_stop: Callable[[], bool]) -> Outcome:
        work, recipe = self._work, self._work.recipe
        began, first = time.monotonic(), work.position
        has_stopped = should_stop()
        if first.steps == 0:
            self._prove("before")
        while not (work.is_done or has_stopped or (last_step is not None and work.position.steps >= last_step)):
            record = work.step()
            pace = self._pace(first, time.monotonic() - began)
            self._write("step", asdict(record) | {"tokens_per_second": pace.tokens_per_second})
            self._watcher.on_step(record, pace)
            has_stopped = should_stop()
            if record.went_back_to is not None:
                self._save()
                self._folder.discard_after(record.went_back_to)
            elif not has_stopped and not work.is_done:
                if _is_due(recipe.evaluation.every, record.step):
                    self._evaluate()
                if _is_due(recipe.saving.every, record.step):
                    self._save()
        if work.is_done:
            self._evaluate()
        checkpoint = self._save()
        self._prove("after")
        return Outcome(work.position.steps, checkpoint, self._evaluation, work.is_done)

    def _prove(self, when: str) -> None:
        if self._job.prove is not None:
            digest = self._job.prove()
            self._write("backbone", {"step": self._work.position.steps, "when": when, "sha256": digest})
            self._watcher.on_proof(when, digest)

    def _pace(self, first: Position, seconds: float) -> Pace:
        recipe, position = self._work.recipe, self._work.position
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
        self._evaluation = self._work.evaluate()
        self._write("evaluation", {"step": self._evaluation.step, **self._evaluation.values})
        self._watcher.on_evaluation(self._evaluation)

    def _save(self) -> Path:
        state = self._work.snapshot()
        more = {"recipe": self._document, "tokenizer": self._job.tokenizer, "kernels": kernels_in_use()}
        plain = {**state.plain, **more}
        before = self._folder.checkpoints()
        checkpoint = self._folder.save(
            Snapshot(state.step, state.tensors, plain), self._job.export, self._work.recipe.saving.keep
        )
        if checkpoint not in before:
            self._watcher.on_saved(checkpoint)
        return checkpoint

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.write({"type": kind, **values})


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
