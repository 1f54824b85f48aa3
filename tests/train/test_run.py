"""A run on disk: metrics, checkpoints, resuming, and what is refused before anything is overwritten."""

import contextlib
import json
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import CapacityError, UserError
from headrace.models.deepseek_v41.load import load_model
from headrace.models.deepseek_v41.weights import load_weights
from headrace.train import run as run_module
from headrace.train.evaluate import Evaluation
from headrace.train.loop import StepRecord
from headrace.train.progress import Pace
from headrace.train.recipe import LossSettings, Recipe, SaveSettings
from headrace.train.run import Outcome, train
from headrace.train.summary import summary_lines
from tests.train.small_recipe import small_recipe, text_recipe, write_texts


class Listener:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.paces: list[Pace] = []
        self.evaluations: list[Evaluation] = []
        self.saved: list[str] = []

    def on_start(self, _summary: object) -> None:
        """Hear nothing."""

    def on_step(self, record: StepRecord, pace: Pace) -> None:
        self.steps.append(record)
        self.paces.append(pace)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def on_saved(self, checkpoint: Path) -> None:
        self.saved.append(checkpoint.name)


def go(recipe: Recipe, out: Path, **options: Any) -> tuple[Outcome, Listener]:
    """Run a recipe in a folder."""
    listener = Listener()
    return train(recipe, out, listener, **options), listener


def files_of(checkpoint: Path) -> dict[str, bytes]:
    """Return the content of every file of a checkpoint."""
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}


def test_a_run_tells_judges_saves_and_ends(tmp_path: Path) -> None:
    outcome, heard = go(small_recipe(), tmp_path / "run")
    assert (outcome.step, outcome.is_done, outcome.checkpoint.name) == (9, True, "step-00000009")
    assert [record.step for record in heard.steps] == list(range(1, 10))
    assert [evaluation.step for evaluation in heard.evaluations] == [4, 8, 9]
    assert heard.saved == ["step-00000004", "step-00000008", "step-00000009"]
    _, again = go(small_recipe(), tmp_path / "run", is_resumed=True)
    assert again.saved == [], "it is there already"
    assert heard.paces[-1].share == 1.0
    assert heard.paces[-1].tokens == heard.steps[-1].tokens == sum(record.num_tokens for record in heard.steps)
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-00000009"]


def test_metrics_are_one_json_document_per_line(tmp_path: Path) -> None:
    go(small_recipe(), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines if line["type"] == "step"] == list(range(1, 10))
    first = next(line for line in lines if line["type"] == "step")
    assert {"tokens", "loss", "grad_norm", "rate", "tokens_per_second", "is_skipped"} <= first.keys()
    assert (lines[0]["type"], lines[0]["step"]) == ("start", 0)
    assert lines[0]["optimizer_state"]["muon"]["bytes_per_parameter"] == 4.0
    figures = [line for line in lines if line["type"] == "evaluation"]
    assert [line["step"] for line in figures] == [4, 8, 9]
    assert 0.0 <= figures[0]["accuracy.pairs"] <= 1.0


@pytest.mark.parametrize("cut", [2, 4, 7])
def test_stopping_and_resuming_gives_the_files_of_an_uninterrupted_run(tmp_path: Path, cut: int) -> None:
    """Weights, optimizer, counts and place in the data: every byte of the last checkpoint."""
    whole, _ = go(small_recipe(), tmp_path / "whole")
    asked = iter([False] * cut + [True])
    part, heard = go(small_recipe(), tmp_path / "part", should_stop=lambda: next(asked))
    assert (part.step, part.is_done, len(heard.steps)) == (cut, False, cut)
    rest, _ = go(small_recipe(), tmp_path / "part", is_resumed=True)
    assert rest.is_done
    assert files_of(rest.checkpoint) == files_of(whole.checkpoint)


def test_text_resumes_bit_for_bit_too_and_its_checkpoint_loads(tmp_path: Path) -> None:
    recipe = text_recipe(write_texts(tmp_path / "texts"))
    whole, heard = go(recipe, tmp_path / "whole")
    go(recipe, tmp_path / "part", last_step=5)
    rest, _ = go(recipe, tmp_path / "part", is_resumed=True)
    assert files_of(rest.checkpoint) == files_of(whole.checkpoint)
    assert heard.steps[0].bits_per_byte is not None
    assert {"held_out_loss", "held_out_bits_per_byte", "accuracy.pairs"} <= heard.evaluations[-1].values.keys()
    loaded = load_model(whole.checkpoint)
    assert loaded.tokenizer is not None
    load_weights(whole.checkpoint, loaded.model.config, device=loaded.model.device)


def test_a_finished_run_resumes_to_nothing(tmp_path: Path) -> None:
    first, _ = go(small_recipe(), tmp_path)
    again, heard = go(small_recipe(), tmp_path, is_resumed=True)
    assert heard.steps == []
    assert (again.step, again.is_done) == (first.step, True)


def test_a_resumed_run_with_another_recipe_is_refused_by_field(tmp_path: Path) -> None:
    outcome, _ = go(small_recipe(), tmp_path, last_step=2)
    before = files_of(outcome.checkpoint)
    with pytest.raises(UserError, match=r"losses\.index_rows \(11, now 12\)"):
        go(small_recipe(losses=LossSettings(index_rows=12)), tmp_path, is_resumed=True)
    assert files_of(outcome.checkpoint) == before


def test_a_resumed_run_says_that_other_kernels_computed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[str]] = []
    monkeypatch.setattr(Listener, "on_start", lambda _self, summary: told.append(summary_lines(summary)))
    go(small_recipe(), tmp_path, last_step=1)
    go(small_recipe(), tmp_path, is_resumed=True, last_step=2)
    monkeypatch.setattr(run_module, "kernels_in_use", lambda: "others")
    go(small_recipe(), tmp_path, is_resumed=True, last_step=3)
    assert [any("bit for bit" in line and "others" in line for line in lines) for lines in told] == [False, False, True]


def test_a_changed_text_is_refused_when_a_run_resumes(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    go(text_recipe(texts), tmp_path / "run", last_step=1)
    for file in texts.iterdir():
        file.write_text(file.read_text() + "one more line\n")
    with pytest.raises(UserError, match="another text"):
        go(text_recipe(texts), tmp_path / "run", is_resumed=True)


def test_an_empty_corpus_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    with pytest.raises(UserError, match="corpus is empty"):
        go(text_recipe(tmp_path / "texts"), tmp_path / "run")
    assert not list((tmp_path / "run").glob("step-*"))


def test_a_file_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    (write_texts(tmp_path / "texts") / "broken.txt").write_bytes(b"water \xff wheel " * 9)
    with pytest.raises(UserError, match=r"broken\.txt.*UTF-8"):
        go(text_recipe(tmp_path / "texts"), tmp_path / "run")


def test_a_full_disk_ends_the_run_with_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run_module.export_masters
    calls = 0

    def export(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise CapacityError("the disk is full: no room")
        real(*arguments)

    monkeypatch.setattr(run_module, "export_masters", export)
    with pytest.raises(CapacityError, match="disk is full"):
        go(small_recipe(), tmp_path / "part")
    assert [path.name for path in (tmp_path / "part").glob("step-*")] == ["step-00000004"]
    rest, _ = go(small_recipe(), tmp_path / "part", is_resumed=True)
    whole, _ = go(small_recipe(), tmp_path / "whole")
    assert files_of(rest.checkpoint) == files_of(whole.checkpoint)
    lines = [json.loads(line) for line in (tmp_path / "part" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["type"] == "step"] == list(range(1, 10))


def test_where_tensorboard_is_installed_a_run_writes_its_numbers_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the package, so that this runs without it."""
    folders: list[str] = []
    scalars: dict[str, list[int]] = {}

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            folders.append(folder)
            for steps in scalars.values():
                steps[:] = [step for step in steps if purge_step is None or step < purge_step]

        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert np.isfinite(value)
            scalars.setdefault(name, []).append(step)

        def close(self) -> None:
            folders.append("closed")

    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    monkeypatch.setattr(run_module.TensorBoardFile, "is_available", staticmethod(lambda: True))
    go(small_recipe(duration=5), tmp_path, last_step=2)
    scalars["step/loss"].append(3)  # of a step that was lost
    go(small_recipe(duration=5), tmp_path, is_resumed=True)
    assert folders == [str(tmp_path / "tensorboard"), "closed"] * 2
    assert scalars["step/loss"] == scalars["step/loss_by_kind.pairs"] == [1, 2, 3, 4, 5]
    assert scalars["evaluation/accuracy.pairs"] == [4, 5]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a file system of three megabytes of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_costs_no_checkpoint(small_disk: Path, tmp_path: Path) -> None:
    recipe = small_recipe(duration=4, saving=SaveSettings(every=1))
    good, _ = go(recipe, small_disk / "run", last_step=1)
    before = files_of(good.checkpoint)
    for left in (300_000, 0):  # room for half a checkpoint, room for nothing
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(small_disk).free
            (small_disk / "filler").write_bytes(bytes(max(0, free - left)))
        with pytest.raises(UserError, match=r"disk|No space left"):
            go(recipe, small_disk / "run", is_resumed=True)
        assert files_of(good.checkpoint) == before
        assert sorted(
            path.name for path in (small_disk / "run").iterdir() if path.name.startswith((".unf", "step"))
        ) == ["step-00000001"]
        (small_disk / "filler").unlink()
    rest, _ = go(recipe, small_disk / "run", is_resumed=True)
    whole, _ = go(recipe, tmp_path / "whole")
    assert files_of(rest.checkpoint) == files_of(whole.checkpoint)


def test_figures_count_right_answers(tmp_path: Path) -> None:
    """A head whose largest logit is always one value is right as often as that value is asked."""
    from headrace.train.evaluate import evaluate, task_rows
    from headrace.train.graph import GraphOptions, TrainGraph
    from tests.train.small_recipe import new_trainer

    trainer = new_trainer(small_recipe())
    recipe, material = trainer.recipe, trainer.material
    rows = task_rows(material.tasks[0], recipe, 33, 0)
    asked = np.concatenate([row.labels[answer.start] for row in rows for answer in row.answers for row in [row]], None)
    answer = int(np.bincount(asked).argmax())
    head = trainer.masters.parameters["head.weight"]
    head.data.zero_()
    output = TrainGraph(trainer.masters, None)
    trainer.masters.parameters["norm.weight"].data.zero_()
    figures = evaluate(output, GraphOptions(), material, recipe, 0).values
    assert figures["accuracy.pairs"] == 0.0, "ties go to id 0, which is padding"
    assert figures["loss.pairs"] == pytest.approx(np.log(head.shape[0]), rel=1e-6)
    assert answer in asked
