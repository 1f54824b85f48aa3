"""`headrace train` as a user runs it: signals, resuming, refusals in one sentence."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.train.recipe import EvaluationSettings, LossSettings, SaveSettings
from headrace.train.recipe_json import to_json
from tests.train.small_recipe import small_recipe, text_recipe, write_texts

STEPS = 24


def command(*arguments: str | Path) -> list[str]:
    """Return the command line of a run."""
    return [sys.executable, "-m", "headrace", "train", *map(str, arguments)]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, check=False)


def write_recipe(path: Path, **changes: object) -> Path:
    """Write a small recipe down and return its file."""
    settings = {"duration": STEPS, "saving": SaveSettings(every=0), "evaluation": EvaluationSettings(every=0)}
    path.write_text(json.dumps(to_json(small_recipe(**{**settings, **changes}))), encoding="utf-8")
    return path


def steps_of(out: Path) -> list[int]:
    """Return the steps in the metrics of a run, which are all valid JSON lines."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line["step"] for line in lines if line["type"] == "step"]


def files_of(out: Path) -> dict[str, bytes]:
    """Return every file of a run's only checkpoint."""
    (checkpoint,) = out.glob("step-*")
    return {str(path.relative_to(out)): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_a_signal_ends_goes_on_with_the_same_bits(tmp_path: Path, number: signal.Signals) -> None:
    recipe = write_recipe(tmp_path / "recipe.json")
    assert run(recipe, "--out", tmp_path / "whole").returncode == 0
    process = subprocess.Popen(
        command(recipe, "--out", tmp_path / "part"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 200
    while len(steps_of(tmp_path / "part")) < 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    shown, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert "--resume" in shown
    stopped_at = len(steps_of(tmp_path / "part"))
    assert 3 <= stopped_at < STEPS
    resumed = run(recipe, "--out", tmp_path / "part", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert steps_of(tmp_path / "part") == list(range(1, STEPS + 1))
    assert files_of(tmp_path / "part") == files_of(tmp_path / "whole")


def test_stopping_at_a_step_and_going_on_gives_the_same_bits(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.json", duration=7)
    assert run(recipe, "--out", tmp_path / "whole").returncode == 0
    assert "stopped" in run(recipe, "--out", tmp_path / "part", "--steps", "5").stdout
    assert "done" in run(recipe, "--out", tmp_path / "part", "--resume").stdout
    assert files_of(tmp_path / "part") == files_of(tmp_path / "whole")


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Check that a run was refused in one sentence that holds some words."""
    assert done.returncode == 2, done.stderr
    sentence = done.stderr.strip().splitlines()
    assert len(sentence) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in sentence[0]


def test_damaged_resume_state_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.json", duration=2)
    run(recipe, "--out", tmp_path / "run", "--steps", "1")
    file = tmp_path / "run" / "step-00000001" / "resume" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    before = files_of(tmp_path / "run")
    refused(run(recipe, "--out", tmp_path / "run", "--resume"), "damaged", "resume/model.safetensors")
    assert files_of(tmp_path / "run") == before


def test_another_recipe_is_refused_when_a_run_resumes(tmp_path: Path) -> None:
    run(write_recipe(tmp_path / "one.json"), "--out", tmp_path / "run", "--steps", "1")
    other = write_recipe(tmp_path / "other.json", losses=LossSettings(index_rows=11, balance=0.5))
    refused(run(other, "--out", tmp_path / "run", "--resume"), "losses.", "now 0.5")


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.json")
    refused(run("no-such-recipe", "--out", tmp_path / "run"), "no-such-recipe", "micro")
    refused(run("v4-pro", "--out", tmp_path / "run"), "v4-pro", "33 trillion")
    refused(run(recipe), "--out")
    refused(run(recipe, "--out", tmp_path / "run", "--steps", "-1"), "--steps")
    refused(run(recipe, "--out", tmp_path / "run", "--resume"), "no checkpoint")
    document = json.loads(recipe.read_text())
    document["learning_rat"] = 1
    recipe.write_text(json.dumps(document))
    refused(run(recipe, "--out", tmp_path / "run"), "learning_rat")


def test_text_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    (tmp_path / "empty").mkdir()
    recipe.write_text(json.dumps(to_json(text_recipe(tmp_path / "empty"))))
    refused(run(recipe, "--out", tmp_path / "run"), "corpus is empty")
    texts = write_texts(tmp_path / "texts")
    (texts / "broken.txt").write_bytes(b"wheel \xfe water " * 8)
    recipe.write_text(json.dumps(to_json(text_recipe(texts))))
    refused(run(recipe, "--out", tmp_path / "run"), "broken.txt", "UTF-8")


def test_a_recipe_is_shown_as_json_that_trains(tmp_path: Path) -> None:
    shown = run("micro", "--show")
    assert (shown.returncode, shown.stderr) == (0, "")
    (tmp_path / "copy.json").write_text(shown.stdout)
    again = run(tmp_path / "copy.json", "--show")
    assert json.loads(again.stdout) == json.loads(shown.stdout)


def test_a_limit_on_file_sizes_is_a_sentence_and_costs_no_checkpoint(tmp_path: Path) -> None:
    """A limit of the operating system makes the writes fail for real."""
    recipe = write_recipe(tmp_path / "recipe.json", duration=3, saving=SaveSettings(every=2))
    assert run(recipe, "--out", tmp_path / "run", "--steps", "1").returncode == 0
    before = files_of(tmp_path / "run")
    limited = ["bash", "-c", 'ulimit -f 100; trap "" XFSZ; exec "$@"', "-"]
    done = subprocess.run(
        [*limited, *command(recipe, "--out", tmp_path / "run", "--resume")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "cannot write" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert files_of(tmp_path / "run") == before
    assert run(recipe, "--out", tmp_path / "run", "--resume").returncode == 0
